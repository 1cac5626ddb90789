//! Two-dimensional pooling.
use super::{Example, Layer, image, single};
use crate::{
    Result,
    autograd::{Cx, Outputs, Var},
    tensor::backend::Pool2d,
};

/// A window over x[n,h,w,c].
#[derive(Clone, Copy, Debug)]
struct Window {
    kernel: usize,
    stride: usize,
    padding: usize,
}

impl Window {
    fn over(self, x: &Var) -> Result<Pool2d> {
        let [n, h, w, c] = image(x)?;
        let square = |v| [v, v];
        Ok(Pool2d {
            n,
            hw: [h, w],
            c,
            kernel: square(self.kernel),
            stride: square(self.stride),
            padding: square(self.padding),
        })
    }
}

/// The maximum of each window; padding is never the maximum.
#[derive(Clone, Copy, Debug)]
pub struct MaxPool2d(Window);

impl MaxPool2d {
    /// Square windows side by side.
    pub fn new(kernel: usize) -> MaxPool2d {
        MaxPool2d(Window { kernel, stride: kernel, padding: 0 })
    }

    /// Steps between windows.
    pub fn stride(self, stride: usize) -> MaxPool2d {
        MaxPool2d(Window { stride, ..self.0 })
    }

    /// Padding on each side, half a window at most.
    pub fn padding(self, padding: usize) -> MaxPool2d {
        MaxPool2d(Window { padding, ..self.0 })
    }
}

impl Layer for MaxPool2d {
    fn kind(&self) -> &'static str {
        "max_pool2d"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        Ok(cx.max_pool2d(self.0.over(x)?, x)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("2×2", MaxPool2d::new(2), &[&[2, 4, 4, 3]]),
            Example::new("overlapping, padded, odd", MaxPool2d::new(3).stride(2).padding(1), &[&[1, 5, 6, 2]]),
            Example::new("gaps, a rest", MaxPool2d::new(2).stride(3), &[&[2, 6, 7, 1]]),
        ]
    }
}

/// The mean of each window; padding counts as zeros.
#[derive(Clone, Copy, Debug)]
pub struct AvgPool2d(Window);

impl AvgPool2d {
    /// Square windows side by side.
    pub fn new(kernel: usize) -> AvgPool2d {
        AvgPool2d(Window { kernel, stride: kernel, padding: 0 })
    }

    /// Steps between windows.
    pub fn stride(self, stride: usize) -> AvgPool2d {
        AvgPool2d(Window { stride, ..self.0 })
    }

    /// Padding on each side, half a window at most.
    pub fn padding(self, padding: usize) -> AvgPool2d {
        AvgPool2d(Window { padding, ..self.0 })
    }
}

impl Layer for AvgPool2d {
    fn kind(&self) -> &'static str {
        "avg_pool2d"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        Ok(cx.avg_pool2d(self.0.over(x)?, x)?.into())
    }

    fn examples() -> Vec<Example> {
        vec![
            Example::new("2×2", AvgPool2d::new(2), &[&[2, 4, 4, 3]]),
            Example::new("overlapping, padded, odd", AvgPool2d::new(3).stride(2).padding(1), &[&[1, 5, 6, 2]]),
            Example::new("gaps, a rest", AvgPool2d::new(2).stride(3), &[&[2, 6, 7, 1]]),
        ]
    }
}

/// The mean over height and width: `x[n,h,w,c]` becomes `y[n,c]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalAvgPool;

impl Layer for GlobalAvgPool {
    fn kind(&self) -> &'static str {
        "global_avg_pool"
    }

    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let [n, h, w, c] = image(x)?;
        let p = Pool2d { n, hw: [h, w], c, kernel: [h, w], stride: [h.max(1), w.max(1)], padding: [0, 0] };
        let y = cx.avg_pool2d(p, x)?;
        Ok(cx.reshape(&y, &[n, c])?.into())
    }

    fn examples() -> Vec<Example> {
        vec![Example::new("plain", GlobalAvgPool, &[&[2, 3, 5, 2]])]
    }
}
