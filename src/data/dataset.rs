//! What a data set is: samples addressed by index, each with the same fields.
use crate::{
    Error, Result,
    tensor::{DType, Element},
};

/// One part of every sample, such as its image or its label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// What the graph's inputs call it.
    pub name: String,
    /// The shape within one sample: `[h, w, c]` for an image, `[]` for a class label.
    pub shape: Vec<usize>,
    /// The element type.
    pub dtype: DType,
}

impl Field {
    /// A field `name` of `shape` (of one sample) and `dtype`.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Field {
        Field { name: name.into(), shape: shape.into(), dtype }
    }

    /// Bytes of one sample.
    ///
    /// # Errors
    /// If they cannot be counted in a `usize`.
    pub(crate) fn bytes(&self) -> Result<usize> {
        self.shape
            .iter()
            .try_fold(self.dtype.size(), |n, &d| n.checked_mul(d))
            .ok_or_else(|| Error::shape(format!("field {:?}: {}{:?} is too large", self.name, self.dtype, self.shape)))
    }
}

/// A set of samples addressed by index. The same index always gives the same sample: what varies from epoch to epoch is the
/// business of [`Transform`](super::Transform)s.
///
/// ```
/// use pipewright::{Result, data::*, tensor::{DType, Device}};
///
/// /// y = 2x for x = 0, 1, …, 99.
/// struct Line(Vec<Field>);
///
/// impl Dataset for Line {
///     fn name(&self) -> &str { "line" }
///     fn len(&self) -> usize { 100 }
///     fn fields(&self) -> &[Field] { &self.0 }
///     fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
///         out.put(0, &[index as f32])?;
///         out.put(1, &[2.0 * index as f32])
///     }
/// }
///
/// let line = Line(vec![Field::new("x", [1], DType::F32), Field::new("y", [1], DType::F32)]);
/// let data = Data::new(line);
/// let batch = Loader::new(data.train, &[], &Device::reference(), 0, true)?.load(0, &[3, 50])?;
/// assert_eq!(batch.field("y")?.to_host::<f32>()?, [6.0, 100.0]);
/// assert_eq!(batch.field("y")?.shape(), [2, 1]);
/// # Ok::<(), pipewright::Error>(())
/// ```
pub trait Dataset: Send + Sync {
    /// What messages call it.
    fn name(&self) -> &str;

    /// The number of samples.
    fn len(&self) -> usize;

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What every sample consists of.
    fn fields(&self) -> &[Field];

    /// Writes sample `index` (below [`len`](Dataset::len)): each field once, by [`Sample::put`]. Called from a background
    /// thread while training goes on.
    fn read(&self, index: usize, out: &mut Sample) -> Result<()>;

    /// The number of classes, if the samples have class labels.
    fn classes(&self) -> Option<usize> {
        None
    }
}

/// The rows of one field of a minibatch in host memory, aligned for every element type.
pub(crate) struct Column {
    words: Vec<u64>,
    row: usize,
    rows: usize,
}

impl Column {
    /// `rows` rows of `row` bytes each.
    pub(crate) fn new(row: usize, rows: usize) -> Result<Column> {
        let bytes = row.checked_mul(rows).filter(|&n| n <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::shape(format!("{rows} samples of {row} bytes are too many")))?;
        Ok(Column { words: vec![0; bytes.div_ceil(8)], row, rows })
    }

    /// All rows.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.row * self.rows]
    }

    /// Row `i`.
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[i * self.row..(i + 1) * self.row]
    }
}

/// Where [`Dataset::read`] puts a sample.
pub struct Sample<'a> {
    fields: &'a [Field],
    columns: &'a mut [Column],
    written: Vec<bool>,
    row: usize,
}

impl<'a> Sample<'a> {
    /// To write row after row of `columns`, one for each of `fields`; [`start`](Sample::start) comes first.
    pub(crate) fn new(fields: &'a [Field], columns: &'a mut [Column]) -> Sample<'a> {
        Sample { written: vec![false; fields.len()], fields, columns, row: 0 }
    }

    /// Goes on to row `row`.
    pub(crate) fn start(&mut self, row: usize) {
        self.row = row;
        self.written.fill(false);
    }

    /// The bytes of field `field` in this row.
    pub(crate) fn bytes_mut(&mut self, field: usize) -> &mut [u8] {
        self.columns[field].row_mut(self.row)
    }

    /// Whether all fields were written.
    ///
    /// # Errors
    /// Naming the first one that was not.
    pub(crate) fn finish(&self) -> Result<()> {
        match self.written.iter().position(|w| !w) {
            None => Ok(()),
            Some(i) => Err(Error::data(format!("field {:?} was not written", self.fields[i].name))),
        }
    }

    /// Writes field number `field`, in the order of [`Dataset::fields`], in row-major order.
    ///
    /// # Errors
    /// If there is no such field, or its type or number of elements is another one.
    pub fn put<T: Element>(&mut self, field: usize, values: &[T]) -> Result<()> {
        let f = self.fields.get(field).ok_or_else(|| {
            Error::data(format!("field number {field} was written, but the data set has {} fields", self.fields.len()))
        })?;
        if f.dtype != T::DTYPE {
            return Err(Error::dtype(format!("field {:?} is {}, but {} was written", f.name, f.dtype, T::DTYPE)));
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let slot = self.columns[field].row_mut(self.row);
        if slot.len() != bytes.len() {
            let (want, got) = (slot.len() / f.dtype.size(), values.len());
            return Err(Error::shape(format!(
                "field {:?} of shape {:?} has {want} elements, but {got} were written",
                f.name, f.shape
            )));
        }
        slot.copy_from_slice(bytes);
        self.written[field] = true;
        Ok(())
    }
}
