//! A layer of one's own, with an op of its own, and its gradient test.
use pipewright::{
    autograd::{Mask, Op, Saved, Sink, check},
    prelude::*,
};

/// `y = x³`.
struct Cube;

impl Op for Cube {
    fn name(&self) -> &'static str {
        "cube"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        let x = saved.get(0)?;
        dx.put(0, x.mul(x)?.affine(3.0, 0.0)?.mul(dy)?)
    }
}

impl Layer for Cube {
    fn kind(&self) -> &'static str {
        "cube"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let y = x.value().mul(x.value())?.mul(x.value())?;
        cx.record(Cube, &[x], vec![y], &[(x.value(), Mask::only(0))])
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("plain", Cube, &[&[2, 3]])]
    }
}

fn main() -> Result<()> {
    check::examples::<Cube>()?;
    println!("the gradient of {} is right", Cube.kind());
    Ok(())
}
