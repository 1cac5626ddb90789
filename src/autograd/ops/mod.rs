//! The differentiable operations, forward and backward side by side: methods of [`Cx`](super::Cx).
mod elementwise;
mod linear;
