//! Element types.
use half::{bf16, f16};
use std::fmt;

/// The element type of a tensor. Arithmetic is done in `F32` and `F64`; `F16` and `BF16` are for storage and transport,
/// the integers for labels, token ids and pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE double precision.
    F64,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `F32`.
    BF16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 8-bit unsigned integer.
    U8,
}

impl DType {
    /// Every element type; the position of one is its code in messages and files.
    pub const ALL: [DType; 7] = [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::U8];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// Whether gradients can flow through values of this type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    /// The difference between 1 and the next larger number; 0 for integers.
    pub const fn epsilon(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON as f64,
            DType::F16 => 9.765625e-4,
            DType::BF16 => 7.8125e-3,
            _ => 0.0,
        }
    }

    /// The name used in files and on the command line, such as `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::U8 => "u8",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that can be the element of a tensor.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug + 'static {
    /// The element type it stands for.
    const DTYPE: DType;
    /// Its value as `f64` (exact but for large `i64`).
    fn to_f64(self) -> f64;
    /// The nearest value to `x`; integers truncate and saturate.
    fn from_f64(x: f64) -> Self;
}

macro_rules! element {
    ($($t:ty => $d:ident, $to:expr, $from:expr;)*) => { $(
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            fn to_f64(self) -> f64 { ($to)(self) }
            fn from_f64(x: f64) -> Self { ($from)(x) }
        }
    )* };
}
// Not `from_f64` of the half types: it drops the low bits before it rounds, so that some values of f32 come out wrong.
element! {
    f64 => F64, |x| x, |x| x;
    f32 => F32, f64::from, |x| x as f32;
    f16 => F16, f16::to_f64, |x| f16::from_f32(x as f32);
    bf16 => BF16, bf16::to_f64, |x| bf16::from_f32(x as f32);
    i64 => I64, |x| x as f64, |x| x as i64;
    i32 => I32, f64::from, |x| x as i32;
    u8 => U8, f64::from, |x| x as u8;
}

/// Runs `$body` with `$T` standing for the Rust type of the element type `$dtype`.
macro_rules! with_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $T = half::f16;
                $body
            }
            $crate::tensor::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            $crate::tensor::DType::I64 => {
                type $T = i64;
                $body
            }
            $crate::tensor::DType::I32 => {
                type $T = i32;
                $body
            }
            $crate::tensor::DType::U8 => {
                type $T = u8;
                $body
            }
        }
    };
}
/// Like `with_dtype`, for the two types that arithmetic is done in; any other is an error of kind `DType`.
macro_rules! with_float {
    ($dtype:expr, $what:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::tensor::DType::F32 => {
                type $T = f32;
                $body
            }
            other => Err($crate::Error::dtype(format!(
                "{}: arithmetic is done in f32 and f64, not {other}; cast first",
                $what
            ))),
        }
    };
}
pub(crate) use {with_dtype, with_float};
