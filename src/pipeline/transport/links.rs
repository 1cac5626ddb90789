//! How fast messages are between the workers there really are.
use super::{Channel, Header, Transport};
use crate::{
    Error, Result,
    pipeline::planner::Link,
    tensor::{DType, Device, Tensor},
};
use std::time::Instant;

/// The highest tag that every MPI library grants: no edge of a plan gets there.
pub(in crate::pipeline) const CHANNEL: Channel = Channel(32_767);
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
    together: Vec<Together>,
}

/// What the workers of two hosts move when several of them send at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Together {
    /// The hosts.
    pub hosts: [usize; 2],
    /// Pairs of workers, one of each host, that sent at once.
    pub pairs: usize,
    /// Bytes per second of a pair while no other sends.
    pub alone: f64,
    /// Of all pairs together, at once.
    pub at_once: f64,
}

impl Together {
    /// Whether they share one link, rather than each having one of its own: whether what they move at once is closer to what one of
    /// them moves than to that times their number.
    pub fn is_shared(&self) -> bool {
        self.at_once < self.alone * (1.0 + self.pairs as f64) / 2.0
    }
}

impl Links {
    /// The link between two workers; none from a worker to itself, or to one that does not exist.
    pub fn between(&self, a: usize, b: usize) -> Option<Link> {
        let (low, high) = (a.min(b), a.max(b));
        if low == high || high >= self.size {
            return None;
        }
        // Before those of `low` come those of all lower ones, each with all that are higher than itself.
        self.links.get(low * (2 * self.size - low - 1) / 2 + high - low - 1).copied()
    }

    /// What the workers of each two hosts with several workers move at once.
    pub fn together(&self) -> &[Together] {
        &self.together
    }
}

/// Measures every link by messages there and back, one pair after the other while the other workers wait; then, for each two hosts
/// with several workers, what pairs of them move at once. All workers call it together, with no message under way, and all get the
/// same result. Within a process a message is a handle, whatever its
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
    let mut measured = Links { links, size, together: Vec::new() };
    measured.together = all_at_once(transport, &measured)?;
    Ok(measured)
}

/// Messages of a stream: enough that streams which begin at once also end at about the same time.
const STREAM: usize = 6;

/// For each two hosts with two or more workers each, what one pair of these moves, and what all pairs move at once. All send the same
/// way: messages there and back would soon take turns on a link that carries both ways at once.
fn all_at_once(transport: &mut dyn Transport, links: &Links) -> Result<Vec<Together>> {
    let of = transport.hosts().to_vec();
    let members = |host: usize| (0..of.len()).filter(|&w| of[w] == host).collect::<Vec<_>>();
    let count = of.iter().max().map_or(0, |h| h + 1);
    let mut found = Vec::new();
    for (a, b) in pairs(count) {
        let abreast: Vec<(usize, usize)> = members(a).into_iter().zip(members(b)).collect();
        if abreast.len() < 2 {
            continue;
        }
        let bandwidths = abreast.iter().filter_map(|&(a, b)| links.between(a, b)).map(|l| l.bandwidth);
        // Long enough for the streams to meet, and the same for all of them.
        let bytes = ((bandwidths.fold(0.0, f64::max) * LONG_ENOUGH) as usize).clamp(LARGE >> 6, LARGE);
        let alone = streamed(transport, &abreast[..1], bytes)?;
        let at_once = streamed(transport, &abreast, bytes)?;
        found.push(Together { hosts: [a, b], pairs: abreast.len(), alone, at_once });
    }
    Ok(found)
}

/// Bytes per second, in all, from the first worker of each pair to its second one, of all pairs at once.
fn streamed(transport: &mut dyn Transport, abreast: &[(usize, usize)], bytes: usize) -> Result<f64> {
    let (me, device) = (transport.rank(), Device::reference());
    let mut mine = 0.0f64;
    transport.all_gather(&[])?;
    if let Some(&(_, to)) = abreast.iter().find(|pair| pair.0 == me) {
        let data = Tensor::zeros(&[bytes], DType::U8, &device)?;
        let start = Instant::now();
        let heard = transport.post_recv(to, CHANNEL, SMALL, &device)?;
        let sent =
            (0..STREAM).map(|_| transport.send(to, CHANNEL, header(&data), &data)).collect::<Result<Vec<_>>>()?;
        transport.wait(heard)?;
        mine = (STREAM * bytes) as f64 / start.elapsed().as_secs_f64().max(1e-12);
        sent.into_iter().try_for_each(|ticket| transport.wait(ticket).map(|_| ()))?;
    } else if let Some(&(from, _)) = abreast.iter().find(|pair| pair.1 == me) {
        let posted =
            (0..STREAM).map(|_| transport.post_recv(from, CHANNEL, bytes, &device)).collect::<Result<Vec<_>>>()?;
        posted.into_iter().try_for_each(|ticket| transport.wait(ticket).map(|_| ()))?;
        say_end(transport, from)?;
    }
    let all = transport.all_gather(&mine.to_le_bytes())?.concat();
    Ok(all.chunks_exact(8).map(bytemuck::pod_read_unaligned::<f64>).sum())
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
    say_end(transport, to)?;
    let (latency, one_way) = (small / 2.0, long / 2.0);
    // Noise must not make the time of the data vanish.
    let of_data = (one_way - latency).max(one_way / 10.0).max(1e-12);
    Ok(Link { latency, bandwidth: bytes as f64 / of_data })
}

/// Lets the other end stop answering.
fn say_end(transport: &mut dyn Transport, to: usize) -> Result<()> {
    let last = Tensor::zeros(&[0], DType::U8, &Device::reference())?;
    let sent = transport.send(to, CHANNEL, header(&last), &last)?;
    transport.wait(sent).map(|_| ())
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

/// The header of a message that belongs to no edge.
pub(in crate::pipeline) fn header(data: &Tensor) -> Header {
    Header { edge: u32::MAX, backward: false, mb: 0, version: 0, dtype: data.dtype(), shape: data.shape().to_vec() }
}
