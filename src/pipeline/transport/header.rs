//! What travels before the data of a message, so that nothing is taken for something else.
use crate::{Error, Result, tensor::DType};

/// The largest number of axes of a tensor that crosses a stage boundary.
pub const MAX_RANK: usize = 8;

/// Says what a message is: checked by the receiver against what it expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The edge.
    pub edge: u32,
    /// Whether it is a gradient on its way back.
    pub backward: bool,
    /// The micro-batch.
    pub mb: u64,
    /// The version of the sender's weights that it was computed with.
    pub version: u64,
    /// Element type.
    pub dtype: DType,
    /// Actual shape (a ragged micro-batch is smaller).
    pub shape: Vec<usize>,
}

impl Header {
    /// Bytes of every header on the wire.
    pub const BYTES: usize = 8 * (4 + MAX_RANK);

    /// The form on the wire: little-endian words `magic|dtype|rank|backward, edge, mb, version, shape…`.
    pub fn encode(&self) -> Result<[u8; Header::BYTES]> {
        if self.shape.len() > MAX_RANK {
            return Err(Error::shape(format!("a message holds at most {MAX_RANK} axes, got {:?}", self.shape)));
        }
        let dtype = DType::ALL.iter().position(|d| *d == self.dtype).unwrap_or_default() as u64;
        let first = MAGIC | dtype << 16 | (self.shape.len() as u64) << 8 | u64::from(self.backward);
        let words = [first, self.edge.into(), self.mb, self.version];
        let mut out = [0; Header::BYTES];
        for (slot, word) in out.chunks_exact_mut(8).zip(words.into_iter().chain(self.shape.iter().map(|&n| n as u64))) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        Ok(out)
    }

    /// Reads what `encode` wrote.
    pub fn decode(bytes: &[u8]) -> Result<Header> {
        let bad = |what: String| Error::transport(format!("message header: {what}"));
        if bytes.len() != Header::BYTES {
            return Err(bad(format!("{} bytes expected, got {}", Header::BYTES, bytes.len())));
        }
        let word = |i: usize| bytes[8 * i..8 * i + 8].iter().rev().fold(0u64, |w, &b| w << 8 | u64::from(b));
        let first = word(0);
        let (dtype, rank) = ((first >> 16 & 0xFF) as usize, (first >> 8 & 0xFF) as usize);
        let dtype = DType::ALL
            .get(dtype)
            .copied()
            .filter(|_| first & !0xFF_FFFF == MAGIC && rank <= MAX_RANK && first & 0xFF <= 1);
        let dtype = dtype.ok_or_else(|| bad(format!("unknown form {first:#x}")))?;
        let edge = u32::try_from(word(1)).map_err(|_| bad(format!("edge {}", word(1))))?;
        let shape: Vec<usize> = (0..rank).map(|i| word(4 + i) as usize).collect();
        shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).ok_or_else(|| bad(format!("shape {shape:?}")))?;
        Ok(Header { edge, backward: first & 1 == 1, mb: word(2), version: word(3), dtype, shape })
    }

    /// Bytes of the data that follows.
    pub fn data_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// "pipew", shifted clear of the low three bytes.
const MAGIC: u64 = 0x70_6970_6577 << 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusal() -> Result<()> {
        let h = Header { edge: 7, backward: true, mb: 1 << 40, version: 3, dtype: DType::BF16, shape: vec![2, 0, 5] };
        let bytes = h.encode()?;
        assert_eq!(Header::decode(&bytes)?, h);
        assert!(Header::decode(&bytes[1..]).is_err());
        for (at, value) in [(7, 0), (2, 9), (1, 9), (0, 2), (12, 1)] {
            let mut broken = bytes;
            broken[at] = value;
            assert!(Header::decode(&broken).is_err(), "byte {at}");
        }
        assert!(Header { shape: vec![1; 9], ..h }.encode().is_err());
        Ok(())
    }
}
