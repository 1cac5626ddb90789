//! A layer of one's own, with an op of its own, and its gradient test: `cargo test --example custom_layer`.
use pipewright::autograd::{Mask, Op, Saved, Sink, check};
use pipewright::prelude::*;

/// `y = x³`.
struct Cube;

impl Op for Cube {
    fn name(&self) -> &'static str {
        "cube"
    }
    fn backward(&self, saved: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let (Some(dy), x) = (&dy[0], saved.get(0)?) else { return Ok(()) };
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

#[test]
fn gradient() -> Result<()> {
    check::examples::<Cube>()
}

fn main() -> Result<()> {
    check::examples::<Cube>().inspect(|()| println!("the gradient of {} is right", Cube.kind()))
}
