//! The differentiable operations, forward and backward side by side: methods of [`Cx`](super::Cx).
mod attention;
mod conv2d;
mod dropout;
mod elementwise;
mod index;
mod linear;
mod loss;
mod lstm;
mod norm;
mod pool2d;
mod reduce;
mod shape;
mod softmax;
