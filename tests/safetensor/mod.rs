//! Golden files: numbers of another framework.
use safetensors::SafeTensors;
use std::{collections::HashMap, path::Path};

/// A golden file: shapes and values of tensors by name.
pub struct Golden {
    pub tensors: HashMap<String, (Vec<usize>, Vec<f64>)>,
}

impl Golden {
    pub fn read(name: &str) -> Golden {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.safetensors"));
        let bytes = std::fs::read(path).expect("a golden file");
        let file = SafeTensors::deserialize(&bytes).expect("tensors");
        let values = |t: &safetensors::tensor::TensorView| -> Vec<f64> {
            match t.dtype() {
                safetensors::Dtype::F32 => {
                    t.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect()
                }
                _ => t.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            }
        };
        let tensors = file.tensors().into_iter().map(|(n, t)| (n, (t.shape().to_vec(), values(&t)))).collect();
        Golden { tensors }
    }

    pub fn values(&self, name: &str) -> &[f64] {
        &self.tensors[name].1
    }
}

/// The largest difference, relative to the largest element.
pub fn off(want: &[f64], got: &[f64]) -> f64 {
    assert_eq!(want.len(), got.len());
    let scale = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    // Not `f64::max`, which passes over NaN.
    let worse = |m: f64, v: f64| if v <= m { m } else { v };
    want.iter().zip(got).map(|(a, b)| (a - b).abs()).fold(0.0, worse) / scale
}
