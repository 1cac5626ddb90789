//! THE list of kernels: what a device must be able to do.
//!
//! Letters: n samples, h w height and width, c channels (ci in, co out), kh kw kernel, m rows, k inner size, v vocabulary,
//! d features, t tokens. Unless said otherwise operands are contiguous and of one floating type, and an output is written whole: its
//! buffer holds leftovers of earlier use. Shapes were checked by the caller ([`Tensor`](super::Tensor) and the ops).
//!
//! Every kernel is deterministic: the same bits whatever the number of threads.
mod shapes;

pub(crate) use shapes::operations;
pub use shapes::{Attention, Conv2d, Lstm, Pool2d};

use super::{Buffer, DType, Element, Layout, Philox, Pool};
use crate::{Error, Result};
use std::sync::Arc;

/// An operand to be read.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// Where its elements are.
    pub buf: &'a Buffer,
    /// How they lie there.
    pub layout: &'a Layout,
    /// Their type.
    pub dtype: DType,
}

/// An operand to be written.
pub struct ViewMut<'a> {
    /// Where its elements are.
    pub buf: &'a mut Buffer,
    /// How they lie there.
    pub layout: &'a Layout,
    /// Their type.
    pub dtype: DType,
}

/// An operand to be updated: in place where `src` is `None`, else from `src` into the fresh `dst`.
pub struct InOut<'a> {
    /// The old value, if it must stay.
    pub src: Option<View<'a>>,
    /// The old value in place, or the buffer for the new one.
    pub dst: ViewMut<'a>,
}

impl<'a> View<'a> {
    /// The elements of a contiguous operand of type `T`.
    pub fn slice<T: Element>(&self) -> Result<&'a [T]> {
        host_type::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(&self.buf.bytes()[bytes_of::<T>(self.layout)?]))
    }

    /// All elements of the buffer, to be read at the layout's positions.
    pub fn raw<T: Element>(&self) -> Result<&'a [T]> {
        host_type::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(&self.buf.bytes()[..self.buf.bytes().len() / size_of::<T>() * size_of::<T>()]))
    }
}

impl ViewMut<'_> {
    /// The elements of a contiguous operand of type `T`.
    pub fn slice<T: Element>(&mut self) -> Result<&mut [T]> {
        host_type::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice_mut(&mut self.buf.bytes_mut()[bytes_of::<T>(self.layout)?]))
    }

    /// The same operand, borrowed again.
    pub fn again(&mut self) -> ViewMut<'_> {
        ViewMut { buf: self.buf, layout: self.layout, dtype: self.dtype }
    }
}

impl InOut<'_> {
    /// The old value if it is apart, and the place of the new one.
    pub fn slices<T: Element>(&mut self) -> Result<(Option<&[T]>, &mut [T])> {
        let src = self.src.as_ref().map(|s| s.slice::<T>()).transpose()?;
        Ok((src, self.dst.slice::<T>()?))
    }
}

fn host_type<T: Element>(dtype: DType) -> Result<()> {
    if T::DTYPE == dtype { Ok(()) } else { Err(Error::dtype(format!("expected {}, got {dtype}", T::DTYPE))) }
}

/// Where the elements of a contiguous operand are; the buffer may end in the middle of another one.
fn bytes_of<T>(l: &Layout) -> Result<std::ops::Range<usize>> {
    if l.is_empty() {
        // A cut of nothing may lie beyond the end.
        Ok(0..0)
    } else if l.is_contiguous() {
        Ok(l.offset() * size_of::<T>()..(l.offset() + l.len()) * size_of::<T>())
    } else {
        Err(Error::shape(format!(
            "a kernel needs a contiguous operand, got strides {:?} of {:?}",
            l.strides(),
            l.shape()
        )))
    }
}

/// Functions of one value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// −x
    Neg,
    /// eˣ
    Exp,
    /// ln x
    Log,
    /// √x
    Sqrt,
    /// 1/x
    Recip,
    /// x²
    Square,
    /// |x|
    Abs,
    /// max(x, 0); a NaN stays NaN
    Relu,
    /// x·Φ(x), Φ the distribution function of the standard normal distribution; −∞, and the gradient at ±∞, is a NaN
    Gelu,
    /// tanh x
    Tanh,
    /// 1/(1+e⁻ˣ)
    Sigmoid,
    /// scale·x + shift
    Affine {
        /// The factor.
        scale: f64,
        /// The summand.
        shift: f64,
    },
}

impl Unary {
    /// Whether the gradient is a function of the result y (else of x): what the tape keeps.
    pub fn saves_result(self) -> bool {
        matches!(self, Unary::Exp | Unary::Sqrt | Unary::Recip | Unary::Relu | Unary::Tanh | Unary::Sigmoid)
    }
}

/// Functions of two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a·b
    Mul,
    /// a / b
    Div,
    /// max(a, b)
    Max,
}

/// How an axis is folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The largest.
    Max,
}

/// `y[b,m,n] = op(a[b]) · op(b[b]) (+ bias[n])`, each operand row-major; `ta`: a is stored k×m; `tb`: b is stored n×k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Independent products.
    pub batch: usize,
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Inner size.
    pub k: usize,
    /// Whether `a` is read transposed.
    pub ta: bool,
    /// Whether `b` is read transposed.
    pub tb: bool,
}

/// Cross-entropy of `logits[m,v]` against `classes[m]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CrossEntropy {
    /// Rows.
    pub m: usize,
    /// Classes.
    pub v: usize,
    /// Weight of the uniform distribution in the target, 0 for none.
    pub smoothing: f64,
    /// A class whose rows do not count.
    pub ignore: Option<i64>,
}

/// Which elements are dropped: those whose random number is below `rate`. Axis 0 of x is `samples × rows_per_sample`.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// The probability of dropping, 0 ≤ rate < 1; what stays is divided by 1 − rate.
    pub rate: f64,
    /// The stream of random numbers of this node at this step.
    pub rng: Philox,
    /// The sample that each part of axis 0 belongs to.
    pub samples: &'a [u64],
}

/// One step of stochastic gradient descent: g ← g + decay·w; v ← momentum·v + g; w ← w − lr·(nesterov ? g + momentum·v : v).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 for none, and then there is no v.
    pub momentum: f64,
    /// Weight decay (L2), read at the version being updated.
    pub decay: f64,
    /// Nesterov's variant.
    pub nesterov: bool,
}

/// One step of Adam (decay added to the gradient) or AdamW (`decoupled`: w ← w − lr·decay·w first).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the square root.
    pub eps: f64,
    /// Weight decay.
    pub decay: f64,
    /// AdamW.
    pub decoupled: bool,
    /// The number of this step, from 1, for the bias correction.
    pub t: u64,
}

/// Work that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// Floating-point operations.
    pub flops: u64,
    /// Those of them that are products of matrices, of convolutions and attention too.
    pub products: u64,
    /// Bytes of operands.
    pub bytes: u64,
    /// Seconds on the machine that is asked about, if one is.
    pub seconds: f64,
}

/// What a device does. Implementations: [`reference`](super::Device::reference) (the executable specification),
/// [`meta`](super::Device::meta) (counts, computes nothing), [`cpu`](super::Device::cpu).
pub trait Backend: Send + Sync {
    /// A short name such as `cpu`.
    fn name(&self) -> &str;
    /// Its memory.
    fn pool(&self) -> &Arc<Pool>;
    /// Whether its tensors hold data.
    fn has_data(&self) -> bool {
        true
    }
    /// What was counted so far; only the meta backend counts.
    fn counted(&self) -> Counted {
        Counted::default()
    }
    /// Threads that its kernels use.
    fn threads(&self) -> usize {
        1
    }

    /// y ← value, of any type.
    fn fill(&self, value: f64, y: ViewMut) -> Result<()>;
    /// y ← x with any layouts of equal shape and any types.
    fn copy(&self, x: View, y: ViewMut) -> Result<()>;

    /// `y[*] = op(x[*])`.
    fn unary(&self, op: Unary, x: View, y: ViewMut) -> Result<()>;
    /// dx = dy · op′, given x or y as [`Unary::saves_result`] says.
    fn unary_grad(&self, op: Unary, saved: View, dy: View, dx: ViewMut) -> Result<()>;
    /// `y[*] = op(a[*], b[*])`: equal shapes, or b (contiguous) repeats along leading axes of a.
    fn binary(&self, op: Binary, a: View, b: View, y: ViewMut) -> Result<()>;
    /// y ← y + alpha·x.
    fn axpy(&self, alpha: f64, x: View, y: InOut) -> Result<()>;
    /// `y[o,i]` = fold of `x[o,m,i]` over m, in order of m; `dims = [o,m,i]`.
    fn reduce(&self, op: Reduce, dims: [usize; 3], x: View, y: ViewMut) -> Result<()>;
    /// Whether every element is finite.
    fn all_finite(&self, x: View) -> Result<bool>;

    /// See [`Gemm`].
    fn gemm(&self, g: Gemm, a: View, b: View, bias: Option<View>, y: ViewMut) -> Result<()>;
    /// See [`Conv2d`]; `bias[co]`.
    fn conv2d(&self, c: Conv2d, x: View, w: View, bias: Option<View>, y: ViewMut) -> Result<()>;
    /// `dx[n,h,w,ci]` from `dy[n,oh,ow,co]` and w.
    fn conv2d_input_grad(&self, c: Conv2d, w: View, dy: View, dx: ViewMut) -> Result<()>;
    /// dw[kh,kw,ci/groups,co] from x and dy.
    fn conv2d_weight_grad(&self, c: Conv2d, x: View, dy: View, dw: ViewMut) -> Result<()>;

    /// The maximum of each window, and in `arg[n,oh,ow,c]` (i32) its position kh·KW + kw in the window, the first of equals;
    /// NaN counts as the maximum. Windows without any element (images of size 0) have −∞ and −1.
    fn max_pool2d(&self, p: Pool2d, x: View, y: ViewMut, arg: ViewMut) -> Result<()>;
    /// dx from arg and dy.
    fn max_pool2d_grad(&self, p: Pool2d, arg: View, dy: View, dx: ViewMut) -> Result<()>;
    /// The mean of each window.
    fn avg_pool2d(&self, p: Pool2d, x: View, y: ViewMut) -> Result<()>;
    /// dx from dy.
    fn avg_pool2d_grad(&self, p: Pool2d, dy: View, dx: ViewMut) -> Result<()>;

    /// `mean[c]` and `var[c]` (divided by m) of `x[m,c]`.
    fn batch_stats(&self, x: View, mean: ViewMut, var: ViewMut) -> Result<()>;
    /// `y[m,c] = (x − mean[c]) / √(var[c] + eps) · gamma[c] + beta[c]`.
    fn batch_norm(&self, eps: f64, x: View, stats: [View; 2], gamma: View, beta: View, y: ViewMut) -> Result<()>;
    /// `dgamma[c] = Σ dy·x̂` and `dbeta[c] = Σ dy` over m.
    fn batch_norm_weight_grad(
        &self,
        eps: f64,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()>;
    /// dx through the batch's own statistics, with the sums of `batch_norm_weight_grad`.
    fn batch_norm_input_grad(
        &self,
        eps: f64,
        x: View,
        stats: [View; 2],
        gamma: View,
        sums: [View; 2],
        dy: View,
        dx: ViewMut,
    ) -> Result<()>;
    /// `y[m,d] = (x − mean[m]) / √(var[m] + eps) · gamma[d] + beta[d]`; keeps `mean[m]` and `rstd[m]`.
    fn layer_norm(
        &self,
        eps: f64,
        x: View,
        gamma: View,
        beta: View,
        y: ViewMut,
        mean: ViewMut,
        rstd: ViewMut,
    ) -> Result<()>;
    /// `dx[m,d]`.
    fn layer_norm_input_grad(&self, x: View, stats: [View; 2], gamma: View, dy: View, dx: ViewMut) -> Result<()>;
    /// `dgamma[d]` and `dbeta[d]`.
    fn layer_norm_weight_grad(
        &self,
        x: View,
        stats: [View; 2],
        dy: View,
        dgamma: ViewMut,
        dbeta: ViewMut,
    ) -> Result<()>;

    /// `y[m,d]` = softmax of each row of x.
    fn softmax(&self, x: View, y: ViewMut) -> Result<()>;
    /// dx = y·(dy − Σ dy·y).
    fn softmax_grad(&self, y: View, dy: View, dx: ViewMut) -> Result<()>;
    /// See [`Attention`]; keeps `lse[n,heads,t]`.
    fn attention(&self, a: Attention, qkv: View, y: ViewMut, lse: ViewMut) -> Result<()>;
    /// `dqkv[n,t,3,heads,d]` from qkv, `[y, lse]` of the forward pass, and dy.
    fn attention_grad(&self, a: Attention, qkv: View, kept: [View; 2], dy: View, dqkv: ViewMut) -> Result<()>;

    /// See [`Lstm`]: `gates[n,t,4d]` from what the inputs give to them, `y[n,t,d]` and `c[n,t,d]` from `w[4d,d]` and the state
    /// `[h, c]` to start with, each `[n,d]`; zeros without.
    fn lstm(&self, l: Lstm, w: View, start: Option<[View; 2]>, gates: InOut, y: ViewMut, c: ViewMut) -> Result<()>;
    /// `[da, dh0, dc0]` from `[gates, c]` of the forward pass, `dy[n,t,d]` and the gradient of the last state (zeros without):
    /// `da[n,t,4d]` is that of what the inputs give to the gates; without c0, dh0 and dc0 are leftovers.
    fn lstm_grad(
        &self,
        l: Lstm,
        w: View,
        kept: [View; 2],
        c0: Option<View>,
        dy: View,
        dlast: Option<[View; 2]>,
        out: [ViewMut; 3],
    ) -> Result<()>;

    /// `loss[1]` = the sum over rows, `correct[1]` = rows whose largest logit is the class's, `prob[m,v]` = softmax, kept for the
    /// gradient. `classes` is i64, i32 or u8; one outside 0..v that is not ignored is an error.
    fn cross_entropy(
        &self,
        c: CrossEntropy,
        logits: View,
        classes: View,
        loss: ViewMut,
        correct: ViewMut,
        prob: ViewMut,
    ) -> Result<()>;
    /// `dx[m,v] = dy[1] · (prob − target)`.
    fn cross_entropy_grad(&self, c: CrossEntropy, prob: View, classes: View, dy: View, dx: ViewMut) -> Result<()>;

    /// `y[m,d] = table[ids[m],d]`; an id outside 0..v is an error.
    fn embedding(&self, table: View, ids: View, y: ViewMut) -> Result<()>;
    /// `dtable[v,d] = Σ dy[m,d]` over the m with `ids[m] = v`, in order of m.
    fn embedding_grad(&self, ids: View, dy: View, dtable: ViewMut) -> Result<()>;

    /// y = x·mask/(1 − rate), and also the gradient. The element at offset e of sample s takes lane e mod 4 of the Philox
    /// block (s, e div 4).
    fn dropout(&self, d: Dropout, x: View, y: ViewMut) -> Result<()>;

    /// See [`SgdStep`]; `v` only with momentum.
    fn sgd(&self, s: SgdStep, g: View, w: InOut, v: Option<InOut>) -> Result<()>;
    /// See [`AdamStep`]; first and second moments.
    fn adam(&self, s: AdamStep, g: View, w: InOut, m: InOut, v: InOut) -> Result<()>;
}
