//! What convolutions, poolings, attention and recurrence are of: their sizes and what follows from them.
use crate::{Error, Result};

/// A two-dimensional convolution of `x[n,h,w,ci]` with `w[kh,kw,ci/groups,co]` to `y[n,oh,ow,co]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Samples.
    pub n: usize,
    /// Input height and width.
    pub hw: [usize; 2],
    /// Input channels.
    pub ci: usize,
    /// Output channels.
    pub co: usize,
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Steps between outputs.
    pub stride: [usize; 2],
    /// Zeros added on both sides.
    pub padding: [usize; 2],
    /// Steps between kernel elements.
    pub dilation: [usize; 2],
    /// Independent groups of channels.
    pub groups: usize,
}

/// A two-dimensional pooling of `x[n,h,w,c]` to `y[n,oh,ow,c]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool2d {
    /// Samples.
    pub n: usize,
    /// Input height and width.
    pub hw: [usize; 2],
    /// Channels.
    pub c: usize,
    /// Window height and width.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Padding on both sides: never the maximum; counted as zeros by the average.
    pub padding: [usize; 2],
}

/// Places along an axis, if they are numbers with a sign: those in padding are counted from the first that is none.
fn out_size(n: usize, kernel: usize, stride: usize, padding: usize, dilation: usize) -> Option<usize> {
    let span = dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
    let padded = padding.checked_mul(2)?.checked_add(n)?;
    isize::try_from(padded).ok()?;
    Some(padded.checked_sub(span)?.checked_div(stride)? + 1)
}

/// Positions of a window must be numbers of 31 bits: max pooling keeps them as such.
fn countable(op: &str, kernel: [usize; 2]) -> Result<()> {
    match kernel[0].checked_mul(kernel[1]) {
        Some(..=MOST_POSITIONS) => Ok(()),
        _ => Err(Error::shape(format!("{op}: a kernel has at most {MOST_POSITIONS} positions, got {kernel:?}"))),
    }
}

const MOST_POSITIONS: usize = i32::MAX as usize;

impl Conv2d {
    /// Output height and width, or why there is none.
    pub fn out(&self) -> Result<[usize; 2]> {
        let positive = [self.stride, self.dilation, self.kernel].iter().flatten().all(|&v| v > 0);
        if !positive || self.groups == 0 || !self.ci.is_multiple_of(self.groups) || !self.co.is_multiple_of(self.groups)
        {
            return Err(Error::shape(format!(
                "conv2d: kernel, stride and dilation must be positive and groups divide both channel counts, got kernel {:?} stride {:?} dilation {:?} groups {} channels {} to {}",
                self.kernel, self.stride, self.dilation, self.groups, self.ci, self.co
            )));
        }
        countable("conv2d", self.kernel)?;
        let o = |i: usize| out_size(self.hw[i], self.kernel[i], self.stride[i], self.padding[i], self.dilation[i]);
        match (o(0), o(1)) {
            (Some(h), Some(w)) => Ok([h, w]),
            _ => Err(Error::shape(format!(
                "conv2d: kernel {:?} with dilation {:?} does not fit the input {:?} with padding {:?}",
                self.kernel, self.dilation, self.hw, self.padding
            ))),
        }
    }

    /// The shape of x.
    pub fn x_shape(&self) -> [usize; 4] {
        [self.n, self.hw[0], self.hw[1], self.ci]
    }

    /// The shape of w.
    pub fn w_shape(&self) -> [usize; 4] {
        [self.kernel[0], self.kernel[1], self.ci / self.groups.max(1), self.co]
    }

    /// The shape of y, or why there is none.
    pub fn y_shape(&self) -> Result<[usize; 4]> {
        let [oh, ow] = self.out()?;
        Ok([self.n, oh, ow, self.co])
    }

    /// Multiply-adds of the forward pass, times two.
    pub fn flops(&self) -> u64 {
        let [oh, ow] = self.out().unwrap_or_default();
        let [kh, kw] = self.kernel;
        operations(&[self.n, oh, ow, self.co, kh, kw, self.ci / self.groups.max(1)])
    }
}

/// Twice the product of `factors`: the operations of so many multiply-adds.
pub(crate) fn operations(factors: &[usize]) -> u64 {
    factors.iter().fold(2, |n: u64, &f| n.saturating_mul(f as u64))
}

impl Pool2d {
    /// Output height and width, or why there is none.
    pub fn out(&self) -> Result<[usize; 2]> {
        let positive = [self.stride, self.kernel].iter().flatten().all(|&v| v > 0);
        countable("pool2d", self.kernel)?;
        let padded = (0..2).all(|i| self.padding[i] <= self.kernel[i] / 2);
        let o = |i: usize| out_size(self.hw[i], self.kernel[i], self.stride[i], self.padding[i], 1);
        match (positive && padded, o(0), o(1)) {
            (true, Some(h), Some(w)) => Ok([h, w]),
            _ => Err(Error::shape(format!(
                "pool2d: window {:?} stride {:?} padding {:?} does not fit the input {:?} (padding may be half a window at most)",
                self.kernel, self.stride, self.padding, self.hw
            ))),
        }
    }

    /// The shape of x.
    pub fn x_shape(&self) -> [usize; 4] {
        [self.n, self.hw[0], self.hw[1], self.c]
    }

    /// The shape of y, or why there is none.
    pub fn y_shape(&self) -> Result<[usize; 4]> {
        let [oh, ow] = self.out()?;
        Ok([self.n, oh, ow, self.c])
    }
}

/// Self-attention: for every head, y = softmax(q·kᵀ/√d)·v of `qkv[n,t,3,heads,d]` to `y[n,t,heads·d]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Samples.
    pub n: usize,
    /// Tokens of a sample.
    pub t: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a head.
    pub d: usize,
    /// Whether a token sees only itself and those before it.
    pub causal: bool,
}

impl Attention {
    /// The shape of qkv.
    pub fn qkv_shape(&self) -> [usize; 5] {
        [self.n, self.t, 3, self.heads, self.d]
    }

    /// The shape of y.
    pub fn y_shape(&self) -> [usize; 3] {
        [self.n, self.t, self.heads * self.d]
    }

    /// The shape of lse, the logarithm of the sum of the exponentials of each row of scores q·kᵀ/√d.
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.n, self.heads, self.t]
    }

    /// Multiply-adds, times two, of one product with all scores of all heads; the forward pass has two. Scores that `causal` leaves
    /// out count too.
    pub fn flops(&self) -> u64 {
        operations(&[self.n, self.heads, self.t, self.t, self.d])
    }
}

/// Long short-term memory, run over a sequence: the recurrent part of gates `i, f, g, o`, each of d units.
///
/// With `a[n,4d]` what a token's input gives to the gates and h, c the state of before: a ← a + h·wᵀ; i, f, o = σ(a) and
/// g = tanh(a); c ← f·c + i·g; h ← o·tanh(c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lstm {
    /// Samples.
    pub n: usize,
    /// Tokens of a sample.
    pub t: usize,
    /// Units.
    pub d: usize,
}

impl Lstm {
    /// The shape of h and of c after every token.
    pub fn y_shape(&self) -> [usize; 3] {
        [self.n, self.t, self.d]
    }

    /// The shape of the gates.
    pub fn gates_shape(&self) -> [usize; 3] {
        [self.n, self.t, 4 * self.d]
    }

    /// The shape of w.
    pub fn w_shape(&self) -> [usize; 2] {
        [4 * self.d, self.d]
    }

    /// The shape of a state.
    pub fn state_shape(&self) -> [usize; 2] {
        [self.n, self.d]
    }

    /// Multiply-adds of the products of all tokens, times two: forward, and as many backward.
    pub fn flops(&self) -> u64 {
        operations(&[self.n, self.t, 4, self.d, self.d])
    }
}
