//! Reverse-mode differentiation on a tape that its backward pass consumes.
//!
//! A forward pass runs in a [`Cx`]: ops are its methods (`cx.linear(&x, &w, &b)`), each beside its backward pass in `ops`.
//! [`Tape::backward`] is B; [`Tape::backward_input`] is I and leaves a [`WeightPass`] for W.
pub mod check;
mod cx;
mod op;
pub mod ops;
mod tape;

pub use cx::{Cx, Mode, Outputs, ParamRef, RunKey, Scope, Stat};
pub use op::{Mask, Op, Saved, Sink};
pub use tape::{Grads, InputGrads, Path, Tape, Var, WeightPass};

use crate::{Error, Result, tensor::Tensor};

/// The value of a scalar function and its gradient by each argument.
///
/// ```
/// use pipewright::{autograd, tensor::{Device, Tensor}};
/// let x = Tensor::from_host(&[1.0, 2.0, 3.0], &[3], &Device::reference())?;
/// let (y, dx) = autograd::value_and_grad(|cx, x| { let s = cx.mul(&x[0], &x[0])?; cx.sum(&s) }, &[x])?;
/// assert_eq!((y.item()?, dx[0].to_f64()?), (14.0, vec![2.0, 4.0, 6.0]));
/// # Ok::<(), pipewright::Error>(())
/// ```
///
/// # Errors
/// If `f` fails, or returns more than one element.
pub fn value_and_grad(
    f: impl FnOnce(&mut Cx, &[Var]) -> Result<Var>,
    args: &[Tensor],
) -> Result<(Tensor, Vec<Tensor>)> {
    let mut cx = Cx::recording(Mode::Train, RunKey::default());
    let vars: Vec<Var> = args.iter().map(|t| cx.input(t.clone(), true)).collect();
    let y = f(&mut cx, &vars)?;
    if y.value().len() != 1 {
        return Err(Error::shape(format!("value_and_grad: the function must return one element, got {:?}", y.shape())));
    }
    let one = Tensor::full(1.0, y.shape(), y.value().dtype(), y.value().device())?;
    let tape = cx.finish().0.ok_or_else(|| Error::graph("value_and_grad: nothing was recorded"))?;
    let mut grads = tape.backward(&[(&y, one)], &mut Grads::default())?;
    let of = |(t, v): (&Tensor, &Var)| match grads.take(v) {
        Some(g) => Ok(g),
        None => Tensor::zeros(t.shape(), t.dtype(), t.device()),
    };
    Ok((y.value().clone(), args.iter().zip(&vars).map(of).collect::<Result<_>>()?))
}
