//! The two-dimensional convolution.
use super::{Example, Init, Layer, ParamSpec, image, positive, single};
use crate::{
    Error, Result,
    autograd::{Cx, Outputs, Var},
    tensor::backend,
};

/// `y[n,oh,ow,co] = x[n,h,w,ci] ∗ weight[kh,kw,ci/groups,co] + bias[co]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    ci: usize,
    co: usize,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
    bias: bool,
    frozen: bool,
}

impl Conv2d {
    /// From `ci` to `co` channels with a square kernel.
    pub fn new(ci: usize, co: usize, kernel: usize) -> Conv2d {
        Conv2d::rectangular(ci, co, [kernel, kernel])
    }

    /// With a kernel of given height and width.
    pub fn rectangular(ci: usize, co: usize, kernel: [usize; 2]) -> Conv2d {
        let one = [1, 1];
        Conv2d { ci, co, kernel, stride: one, padding: [0, 0], dilation: one, groups: 1, bias: true, frozen: false }
    }

    /// Steps between outputs.
    pub fn stride(self, stride: usize) -> Conv2d {
        Conv2d { stride: [stride, stride], ..self }
    }

    /// Zeros added on each side.
    pub fn padding(self, padding: usize) -> Conv2d {
        Conv2d { padding: [padding, padding], ..self }
    }

    /// Steps between the kernel's elements.
    pub fn dilation(self, dilation: usize) -> Conv2d {
        Conv2d { dilation: [dilation, dilation], ..self }
    }

    /// Independent groups of channels.
    pub fn groups(self, groups: usize) -> Conv2d {
        Conv2d { groups, ..self }
    }

    /// With or without bias.
    pub fn bias(self, yes: bool) -> Conv2d {
        Conv2d { bias: yes, ..self }
    }

    /// Its parameters are not learned.
    pub fn frozen(self) -> Conv2d {
        Conv2d { frozen: true, ..self }
    }
}

impl Layer for Conv2d {
    fn kind(&self) -> &'static str {
        "conv2d"
    }

    fn params(&self) -> Vec<ParamSpec> {
        let [kh, kw] = self.kernel;
        let ci = self.ci / self.groups.max(1);
        let init = Init::fan_in(kh.saturating_mul(kw).saturating_mul(ci));
        let mut p = vec![ParamSpec::new("weight", &[kh, kw, ci, self.co], init).frozen(self.frozen)];
        if self.bias {
            p.push(ParamSpec::new("bias", &[self.co], init).frozen(self.frozen));
        }
        p
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        positive("conv2d", &[("input channels", self.ci), ("output channels", self.co)])?;
        let [n, h, w, c] = image(x)?;
        if c != self.ci {
            return Err(Error::shape(format!("conv2d: {} channels expected, got x{:?}", self.ci, x.shape())));
        }
        let Conv2d { ci, co, kernel, stride, padding, dilation, groups, .. } = *self;
        let spec = backend::Conv2d { n, hw: [h, w], ci, co, kernel, stride, padding, dilation, groups };
        let w = cx.param(0)?;
        let b = if self.bias { Some(cx.param(1)?) } else { None };
        Ok(cx.conv2d(spec, x, &w, b.as_ref())?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("3×3, padded", Conv2d::new(2, 3, 3).padding(1), &[&[2, 5, 4, 2]]),
            Example::new("stride 2, no bias", Conv2d::new(1, 2, 3).stride(2).bias(false), &[&[1, 7, 6, 1]]),
            Example::new("dilated, grouped", Conv2d::new(4, 6, 2).dilation(2).groups(2).padding(1), &[&[2, 4, 5, 4]]),
            Example::new("depthwise", Conv2d::new(3, 3, 3).groups(3).padding(1), &[&[1, 4, 4, 3]]),
            Example::new("1×1, frozen", Conv2d::new(3, 2, 1).frozen(), &[&[2, 3, 3, 3]]),
            Example::new("rectangular", Conv2d::rectangular(2, 2, [1, 3]).stride(2).padding(1), &[&[1, 4, 6, 2]]),
        ]
    }
}
