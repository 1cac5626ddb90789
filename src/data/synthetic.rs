//! Data without files, drawn from a seed by index: images whose classes can be learned, and sequences of tokens that follow a
//! rule. For benchmarks, tests and first steps.
use super::{Data, Dataset, Field, Sample, check_len};
use crate::{
    Error, Result,
    tensor::{DType, Philox},
};

/// The coarse points along each side of the image that a class is.
const GRID: usize = 4;

/// Images of `shape` [h, w, c] in `classes` classes, `train` and `test` of them: the smooth image of the class, values in
/// `[-1, 1]`, plus noise uniform in [-1, 1). Fields: `image: f32[h,w,c]` and `label: i64[]`.
///
/// # Errors
/// If a shape or number is 0 or too large.
pub fn synthetic(shape: [usize; 3], classes: usize, train: usize, test: usize, seed: u64) -> Result<Data> {
    let data = Data::new(SyntheticImages::new("synthetic", shape, classes, train, seed)?);
    Ok(data.with_test(SyntheticImages::new("synthetic test", shape, classes, test, seed)?))
}

/// Sequences of `length` tokens below `vocabulary`, `train` and `test` of them: in seven of eight places the next token follows
/// from the one before, in the others it is any. Fields: `tokens: i64[length]` and `target: i64[length]`, the tokens one
/// place on.
///
/// # Errors
/// If a number is 0 or too large.
pub fn synthetic_tokens(length: usize, vocabulary: usize, train: usize, test: usize, seed: u64) -> Result<Data> {
    let data = Data::new(SyntheticTokens::new("synthetic-tokens", length, vocabulary, train, seed)?);
    Ok(data.with_test(SyntheticTokens::new("synthetic-tokens test", length, vocabulary, test, seed)?))
}

/// See [`synthetic`].
struct SyntheticImages {
    name: String,
    len: usize,
    fields: [Field; 2],
    /// The image of each class: [classes, h, w, c].
    templates: Vec<f32>,
    classes: usize,
    labels: Philox,
    noise: Philox,
}

impl SyntheticImages {
    /// Sets of different names have the same classes and other samples.
    fn new(name: &str, shape: [usize; 3], classes: usize, len: usize, seed: u64) -> Result<SyntheticImages> {
        let fields = [Field::new("image", shape, DType::F32), Field::new("label", [], DType::I64)];
        let all = fields[0].bytes()?.checked_mul(classes).filter(|&n| n <= 1 << 32);
        if all.is_none_or(|n| n == 0) {
            return Err(Error::config(format!(
                "synthetic: {classes} classes of images {shape:?}; 1 or more each expected, and 4 GiB at most"
            )));
        }
        check_len(name, len)?;
        let points = Philox::new(seed, 0, "data/synthetic/classes");
        let templates = (0..classes as u64).flat_map(|class| template(shape, &points, class)).collect();
        let labels = Philox::new(seed, 0, &format!("data/{name}/label"));
        let noise = Philox::new(seed, 0, &format!("data/{name}/noise"));
        Ok(SyntheticImages { name: name.into(), len, fields, templates, classes, labels, noise })
    }
}

/// The image [h,w,c] of `class`: random values at the points of a coarse grid, linear between them. Sums and products only, so
/// that it is the same on every machine.
fn template([h, w, c]: [usize; 3], points: &Philox, class: u64) -> Vec<f32> {
    let coarse: Vec<f64> = points.uniform(class, GRID * GRID * c).map(|u| 2.0 * u - 1.0).collect();
    // The point before position i of n, and how far it is on the way to the next.
    let place = |i: usize, n: usize| {
        let at = (i * (GRID - 1)) as f64 / (n.max(2) - 1) as f64;
        let before = (at as usize).min(GRID - 2);
        (before, at - before as f64)
    };
    let mut image = Vec::with_capacity(h * w * c);
    for y in 0..h {
        let (gy, fy) = place(y, h);
        for x in 0..w {
            let (gx, fx) = place(x, w);
            for k in 0..c {
                let at = |dy: usize, dx: usize| coarse[((gy + dy) * GRID + gx + dx) * c + k];
                let upper = at(0, 0) * (1.0 - fx) + at(0, 1) * fx;
                let lower = at(1, 0) * (1.0 - fx) + at(1, 1) * fx;
                image.push((upper * (1.0 - fy) + lower * fy) as f32);
            }
        }
    }
    image
}

impl Dataset for SyntheticImages {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.len
    }

    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        let class = self.labels.below(index as u64, 0, self.classes as u64) as usize;
        let size = self.templates.len() / self.classes;
        let mut image = self.templates[class * size..(class + 1) * size].to_vec();
        for (block, four) in image.chunks_mut(4).enumerate() {
            let noise = self.noise.block(index as u64, block as u64);
            four.iter_mut().zip(noise).for_each(|(v, n)| *v += 2.0 * Philox::unit(n) - 1.0);
        }
        out.put(0, &image)?;
        out.put(1, &[class as i64])
    }

    fn classes(&self) -> Option<usize> {
        Some(self.classes)
    }
}

/// See [`synthetic_tokens`].
struct SyntheticTokens {
    name: String,
    len: usize,
    fields: [Field; 2],
    length: usize,
    vocabulary: usize,
    stream: Philox,
}

impl SyntheticTokens {
    fn new(name: &str, length: usize, vocabulary: usize, len: usize, seed: u64) -> Result<SyntheticTokens> {
        if length == 0 || vocabulary == 0 || vocabulary > 1 << 32 {
            return Err(Error::config(format!(
                "synthetic-tokens: sequences of {length} tokens below {vocabulary}; 1 or more each expected, and 2^32 at most"
            )));
        }
        let fields = [Field::new("tokens", [length], DType::I64), Field::new("target", [length], DType::I64)];
        if fields[0].bytes()? > 1 << 32 {
            return Err(Error::config(format!(
                "synthetic-tokens: sequences of {length} tokens; 4 GiB at most expected"
            )));
        }
        check_len(name, len)?;
        let stream = Philox::new(seed, 0, &format!("data/{name}"));
        Ok(SyntheticTokens { name: name.into(), len, fields, length, vocabulary, stream })
    }
}

impl Dataset for SyntheticTokens {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self) -> usize {
        self.len
    }

    fn fields(&self) -> &[Field] {
        &self.fields
    }

    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        let n = self.vocabulary as u64;
        let mut all = Vec::with_capacity(self.length + 1);
        let mut token = 0;
        for place in 0..=self.length as u64 {
            let any = self.stream.below(index as u64, 2 * place, n);
            let follows = place > 0 && self.stream.below(index as u64, 2 * place + 1, 8) > 0;
            token = if follows { (5 * token + 3) % n } else { any };
            all.push(token as i64);
        }
        out.put(0, &all[..self.length])?;
        out.put(1, &all[1..])
    }

    fn classes(&self) -> Option<usize> {
        Some(self.vocabulary)
    }
}
