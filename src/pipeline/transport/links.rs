//! How fast messages are between the workers there really are.
use super::{Channel, Header, Transport};
use crate::{
    Error, Result,
    pipeline::planner::Link,
    tensor::{DType, Device, Tensor},
};
use std::time::Instant;

/// The highest tag that every MPI library grants: no edge of a plan gets there.
const CHANNEL: Channel = Channel(32_767);
/// Bytes of a message whose time is all latency.
const SMALL: usize = 8;
/// Bytes of the longest message; slow links are measured with shorter ones.
const LARGE: usize = 4 << 20;
/// Seconds for a round trip that are long enough to tell the bandwidth.
const LONG_ENOUGH: f64 = 0.02;

/// The links between all workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// One for each pair of workers, in the order of [`pairs`].
    links: Vec<Link>,
    size: usize,
}

impl Links {
    /// The link between two workers; none from a worker to itself, or to one that does not exist.
    pub fn between(&self, a: usize, b: usize) -> Option<Link> {
        let wanted = (a.min(b), a.max(b));
        pairs(self.size).zip(&self.links).find(|(pair, _)| *pair == wanted).map(|(_, link)| *link)
    }

    /// The longest latency and the lowest bandwidth of all; none if there is only one worker.
    pub fn slowest(&self) -> Option<Link> {
        self.links.iter().copied().reduce(Link::and)
    }
}

/// Measures every link by messages there and back, one pair after the other while the other workers wait. All workers call it
/// together, with no message under way, and all get the same result. Within a process a message is a handle, whatever its
/// length: the bandwidth is then very large.
///
/// # Errors
/// If another worker fails.
pub fn measure_links(transport: &mut dyn Transport) -> Result<Links> {
    let size = transport.size();
    let mut mine = Vec::new();
    for (a, b) in pairs(size) {
        if transport.rank() == a {
            let link = ask(transport, b)?;
            mine.extend([link.latency, link.bandwidth]);
        } else if transport.rank() == b {
            answer(transport, a)?;
        }
        // So that no other pair disturbs this one.
        transport.all_gather(&[])?;
    }
    // The lower worker of each pair measured, so all measurements in order of rank are in the order of the pairs.
    let all = transport.all_gather(bytemuck::cast_slice(&mine))?.concat();
    let words: Vec<f64> = all.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
    let links: Vec<Link> = words.chunks_exact(2).map(|w| Link { latency: w[0], bandwidth: w[1] }).collect();
    if links.len() != pairs(size).count() {
        return Err(Error::transport(format!("links of {size} workers: {} measurements arrived", links.len())));
    }
    Ok(Links { links, size })
}

/// Each two workers once, the lower first.
fn pairs(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).flat_map(move |a| (a + 1..size).map(move |b| (a, b)))
}

fn ask(transport: &mut dyn Transport, to: usize) -> Result<Link> {
    let small = round_trip(transport, to, SMALL, 64)?;
    let mut bytes = LARGE >> 6;
    let mut long = round_trip(transport, to, bytes, 2)?;
    while long < LONG_ENOUGH && bytes < LARGE {
        bytes <<= 2;
        long = round_trip(transport, to, bytes, 2)?;
    }
    let last = Tensor::zeros(&[0], DType::U8, &Device::reference())?;
    let sent = transport.send(to, CHANNEL, header(&last), &last)?;
    transport.wait(sent)?;
    let (latency, one_way) = (small / 2.0, long / 2.0);
    // Noise must not make the time of the data vanish.
    let of_data = (one_way - latency).max(one_way / 10.0).max(1e-12);
    Ok(Link { latency, bandwidth: bytes as f64 / of_data })
}

/// Seconds for `bytes` bytes there and back: the median of `repeats`, after one that is not counted.
fn round_trip(transport: &mut dyn Transport, to: usize, bytes: usize, repeats: usize) -> Result<f64> {
    let device = Device::reference();
    let data = Tensor::zeros(&[bytes], DType::U8, &device)?;
    let mut seconds = Vec::with_capacity(repeats + 1);
    for _ in 0..=repeats {
        let start = Instant::now();
        let back = transport.post_recv(to, CHANNEL, bytes, &device)?;
        let sent = transport.send(to, CHANNEL, header(&data), &data)?;
        transport.wait(back)?;
        seconds.push(start.elapsed().as_secs_f64());
        transport.wait(sent)?;
    }
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[(seconds.len() - 1) / 2])
}

/// Sends back what `from` asks with, until an empty message.
fn answer(transport: &mut dyn Transport, from: usize) -> Result<()> {
    loop {
        let ticket = transport.post_recv(from, CHANNEL, LARGE, &Device::reference())?;
        let (header, data) =
            transport.wait(ticket)?.ok_or_else(|| Error::transport("measuring links: no message in a receive"))?;
        if data.is_empty() {
            return Ok(());
        }
        let sent = transport.send(from, CHANNEL, header, &data)?;
        transport.wait(sent)?;
    }
}

fn header(data: &Tensor) -> Header {
    Header { edge: u32::MAX, backward: false, mb: 0, version: 0, dtype: data.dtype(), shape: data.shape().to_vec() }
}
