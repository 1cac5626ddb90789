//! Sums of gradients over the workers of a stage: every way of adding them up, beside a plain loop.
use pipewright::{
    Error, Result,
    autograd::Grads,
    pipeline::{
        reduce::{AllReduce, Compression, Means, Reducer, Share},
        status::Status,
        transport::{
            Aborter, Channel, Header, Ticket, Transport,
            threads::{self, Options},
        },
        weights::Slot,
    },
    tensor::{DType, Device, Tensor},
};

/// More than one bucket, one of which a single parameter fills, and parameters that cannot be cut into equal parts.
const SHAPES: [&[usize]; 5] = [&[7], &[1], &[1 << 10, 513], &[3, 5, 2], &[129, 65]];

fn slots() -> Vec<Slot> {
    SHAPES.iter().enumerate().map(|(slot, shape)| Slot { slot, shape: shape.to_vec() }).collect()
}

/// The gradient of a slot that micro-batch `mb` makes.
fn gradient(mb: usize, slot: usize, device: &Device) -> Result<Tensor> {
    let number = |i: usize| ((i * 7919 + mb * 131 + slot * 31) % 1009) as f64 / 504.0 - 1.0;
    let elements = SHAPES[slot].iter().product();
    Tensor::from_host(&(0..elements).map(number).collect::<Vec<_>>(), SHAPES[slot], device)
}

/// Which slots a micro-batch has a gradient of: not all of all.
fn has(mb: usize, slot: usize) -> bool {
    slot != 3 || mb % 3 == 1
}

/// Counts the bytes that go to workers on other hosts.
struct Counting<'t> {
    inner: &'t mut dyn Transport,
    hosts: Vec<usize>,
    abroad: usize,
}

impl Transport for Counting<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn hosts(&self) -> &[usize] {
        &self.hosts
    }
    fn status(&self) -> &Status {
        self.inner.status()
    }
    fn send(&mut self, to: usize, channel: Channel, header: Header, tensor: &Tensor) -> Result<Ticket> {
        if self.hosts[to] != self.hosts[self.rank()] {
            self.abroad += tensor.byte_len();
        }
        self.inner.send(to, channel, header, tensor)
    }
    fn post_recv(&mut self, from: usize, channel: Channel, max_bytes: usize, device: &Device) -> Result<Ticket> {
        self.inner.post_recv(from, channel, max_bytes, device)
    }
    fn wait(&mut self, ticket: Ticket) -> Result<Option<(Header, Tensor)>> {
        self.inner.wait(ticket)
    }
    fn test(&mut self, ticket: Ticket) -> Result<bool> {
        self.inner.test(ticket)
    }
    fn all_gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.inner.all_gather(bytes)
    }
    fn abort(&mut self, error: &Error) {
        self.inner.abort(error);
    }
    fn aborter(&self) -> Aborter {
        self.inner.aborter()
    }
    fn finish(&mut self) -> Result<()> {
        self.inner.finish()
    }
}

/// What a worker has after an update, by slot, and the bytes that it sent to other hosts.
type Got = (Vec<Option<Vec<f64>>>, usize);

/// Sums twice, so that what is left over of a first update would show, on threads. Worker q has the micro-batches `of[q]`, of `samples`.
fn sums(hosts: &[usize], means: Means, of: &[Vec<usize>], samples: fn(usize) -> usize) -> Result<Vec<Got>> {
    let workers: Vec<usize> = (0..of.len()).collect();
    threads::run(of.len(), Options::default(), |t| {
        let (device, me) = (Device::cpu(1)?, t.rank());
        let mut t = Counting { inner: t, hosts: hosts.to_vec(), abroad: 0 };
        let mut reducer = Reducer::new((0, &workers, me), hosts, means, &slots(), DType::F64, &device)?;
        let mut got = Vec::new();
        for _ in 0..2 {
            t.abroad = 0;
            let mut shares = Vec::new();
            for &mb in &of[me] {
                let mut grads = Grads::default();
                for slot in (0..SHAPES.len()).filter(|&slot| has(mb, slot)) {
                    grads.add(slot, gradient(mb, slot, &device)?)?;
                }
                shares.push(Share { mb, samples: samples(mb), grads });
            }
            // The way of a backward pass: some slots of an only share are offered before.
            if of.iter().all(|mbs| mbs.len() == 1) {
                for slot in [4, 3, 2] {
                    if let Some(g) = shares[0].grads.get(slot) {
                        reducer.offer(&mut t, (shares[0].mb, shares[0].samples), slot, g)?;
                    }
                }
            }
            reducer.begin(&mut t, shares, &of.iter().map(Vec::len).collect::<Vec<_>>())?;
            let mut sum = reducer.finish(&mut t, &[true, true, true, true, false])?;
            let all = (0..SHAPES.len()).map(|slot| sum.take(slot).map(|g| g.to_f64()).transpose());
            got = all.collect::<Result<_>>()?;
        }
        Ok((got, t.abroad))
    })
}

/// The same by a plain loop in the order of micro-batches.
fn plain(mean: bool, of: &[Vec<usize>], samples: fn(usize) -> usize) -> Result<Vec<Option<Vec<f64>>>> {
    let device = Device::cpu(1)?;
    let mut mbs: Vec<usize> = of.concat();
    mbs.sort_unstable();
    let total: usize = mbs.iter().map(|&mb| samples(mb)).sum();
    let mut all = Vec::new();
    for (slot, shape) in SHAPES.iter().enumerate() {
        let mut sum = vec![0.0; shape.iter().product()];
        for &mb in mbs.iter().filter(|&&mb| has(mb, slot)) {
            let weight = if mean { samples(mb) as f64 / total as f64 } else { 1.0 };
            sum.iter_mut().zip(gradient(mb, slot, &device)?.to_f64()?).for_each(|(s, g)| *s += weight * g);
        }
        all.push((slot != 4).then_some(sum));
    }
    Ok(all)
}

/// How the micro-batches are spread over so many workers: one each; none on some; several on some.
fn spreads(workers: usize) -> Vec<Vec<Vec<usize>>> {
    let every = |n: usize| (0..workers).map(|q| (q..n).step_by(workers).collect()).collect();
    vec![every(workers), every(1), every(2 * workers + 1)]
}

#[test]
fn all_ways_give_the_sum_on_all_workers() -> Result<()> {
    let cases: [(AllReduce, &[usize]); 10] = [
        (AllReduce::Direct, &[0, 0]),
        (AllReduce::Direct, &[0, 0, 0]),
        (AllReduce::Direct, &[0; 5]),
        (AllReduce::Auto, &[0, 0, 1]),
        (AllReduce::Auto, &[0, 1, 1, 0]),
        (AllReduce::Halving, &[0, 0]),
        (AllReduce::Halving, &[0; 4]),
        (AllReduce::Halving, &[0; 8]),
        (AllReduce::TwoLevel, &[0, 1, 2, 0, 1, 2]),
        (AllReduce::TwoLevel, &[0, 0, 0, 1, 1, 1]),
    ];
    for (all_reduce, hosts) in cases {
        for mean in [false, true] {
            for of in spreads(hosts.len()) {
                let samples = |mb: usize| 3 + mb % 4;
                let got = sums(hosts, Means { all_reduce, mean, ..Means::default() }, &of, samples)?;
                let case = format!("{all_reduce} on {hosts:?}, mean {mean}, {of:?}");
                assert!(got.iter().all(|(sum, _)| *sum == got[0].0), "{case}: all workers have the same bits");
                for (slot, (got, plain)) in got[0].0.iter().zip(plain(mean, &of, samples)?).enumerate() {
                    assert_eq!(got.is_some(), plain.is_some(), "{case}: slot {slot}");
                    for (a, b) in got.iter().flatten().zip(plain.iter().flatten()) {
                        approx::assert_relative_eq!(a, b, max_relative = 1e-13, epsilon = 1e-14);
                        if all_reduce == AllReduce::Direct && !mean && has(0, slot) {
                            assert_eq!(a, b, "{case}: slot {slot} in the order of micro-batches");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn few_bytes_leave_a_host() -> Result<()> {
    let hosts = [0, 0, 0, 1, 1, 1];
    let of = &spreads(6)[0];
    let bytes = |all_reduce, compression| -> Result<Vec<usize>> {
        let got = sums(&hosts, Means { all_reduce, compression, ..Means::default() }, of, |_| 1)?;
        Ok((0..2).map(|host| (0..6).filter(|&q| hosts[q] == host).map(|q| got[q].1).sum()).collect())
    };
    let all: usize = SHAPES.iter().map(|s| s.iter().product::<usize>() * 8).sum();
    // Each of 2 hosts sends half of the gradients to the other, added up, and the sum of its own half.
    let two_level = bytes(AllReduce::TwoLevel, Compression::None)?;
    assert_eq!(two_level.iter().sum::<usize>(), 2 * all);
    assert!(two_level.iter().all(|b| b.abs_diff(all) < all / 100), "{two_level:?} of {all}");
    // Each worker sends 3 of 6 parts of its own and its own sum to 3 others.
    assert_eq!(bytes(AllReduce::Direct, Compression::None)?.iter().sum::<usize>(), 6 * all);
    assert_eq!(bytes(AllReduce::TwoLevel, Compression::Bf16)?.iter().sum::<usize>(), 2 * all / 4);
    let factors: usize = SHAPES.iter().map(|s| Compression::PowerSgd { rank: 2 }.elements(s) * 8).sum();
    assert_eq!(bytes(AllReduce::Direct, Compression::PowerSgd { rank: 2 })?.iter().sum::<usize>(), 6 * factors);
    assert!(factors * 20 < all);
    Ok(())
}

#[test]
fn what_is_rounded_is_what_is_sent() -> Result<()> {
    let round = |x: f64| half::bf16::from_f32(x as f32).to_f64();
    for hosts in [&[0, 0][..], &[0, 0, 0]] {
        for mean in [false, true] {
            let of = &spreads(hosts.len())[0];
            let means = Means { compression: Compression::Bf16, mean, ..Means::default() };
            let got = sums(hosts, means, of, |_| 2)?;
            let device = Device::cpu(1)?;
            for slot in 0..4 {
                let mut sum = vec![0.0; SHAPES[slot].iter().product()];
                for mb in (0..hosts.len()).filter(|&mb| has(mb, slot)) {
                    let g = gradient(mb, slot, &device)?.to_f64()?;
                    let weight = if mean { 1.0 / hosts.len() as f64 } else { 1.0 };
                    sum.iter_mut().zip(g).for_each(|(s, g)| *s += weight * round(g));
                }
                let sum: Vec<f64> = sum.into_iter().map(round).collect();
                for (worker, (got, _)) in got.iter().enumerate() {
                    let got = got[slot].as_ref().expect("present");
                    let same = got.iter().zip(&sum).filter(|(a, b)| a == b).count();
                    assert_eq!(same, sum.len(), "worker {worker}, slot {slot}, mean {mean}");
                }
            }
        }
    }
    Ok(())
}
