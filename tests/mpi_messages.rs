//! Messages between real MPI ranks: every case is a job of `mpirun` whose ranks are this program again.
#![cfg(feature = "mpi")]
mod launcher;
mod mpirun;

use mpirun::mpirun;
use pipewright::{
    Error, ErrorKind, Result,
    pipeline::{
        handling::of_messages,
        transport::{Channel, Header, Ticket, Transport, launch, measure_links},
    },
    tensor::{DType, Device, Philox, Tensor},
};

/// Larger than what any transport sends without the receiver's consent.
const LARGE: usize = 3_000_000;

#[test]
fn all_kinds_of_messages() {
    for n in [1, 2, 4] {
        for (synchronous, piece) in [("0", "1073741824"), ("1", "1073741824"), ("0", "1000"), ("1", "4096")] {
            let env = [("PIPEWRIGHT_MPI_SYNCHRONOUS", synchronous), ("PIPEWRIGHT_MPI_PIECE", piece)];
            let Some(job) = mpirun(n, "messages", &env) else { return };
            assert!(job.success, "{n} ranks, {env:?}, {:?}: {}", job.took, job.text);
        }
    }
}

#[test]
fn too_long_is_refused() {
    for piece in ["1073741824", "1000"] {
        let Some(job) = mpirun(2, "too long", &[("PIPEWRIGHT_MPI_PIECE", piece)]) else { return };
        assert!(!job.success, "{}", job.text);
        for words in ["rank 1 ends the job", "worker 0 on channel 3", "at most 40 were expected"] {
            assert!(job.text.contains(words), "{words:?} expected in {}", job.text);
        }
    }
}

#[test]
fn wrong_settings_are_refused() {
    let Some(job) = mpirun(1, "messages", &[("PIPEWRIGHT_MPI_PIECE", "0")]) else { return };
    assert!(!job.success && job.text.contains("PIPEWRIGHT_MPI_PIECE=0"), "{}", job.text);
}

#[test]
#[ignore = "a rank of the other tests"]
fn rank() -> Result<()> {
    match mpirun::case().as_deref() {
        Some("messages") => launch(1, |t| {
            ring(t)?;
            both_send_first(t)?;
            interleaved(t)?;
            gathers(t)?;
            links(t)
        }),
        Some("too long") => launch(1, too_long),
        _ => Ok(()),
    }
}

/// The `number`-th tensor that rank `from` sends.
fn tensor(from: usize, number: usize, dtype: DType, shape: &[usize], device: &Device) -> Result<Tensor> {
    let n: usize = shape.iter().product::<usize>() * dtype.size();
    let rng = Philox::new(from as u64, number as u64, "message");
    let bytes: Vec<u8> = (0..n as u64).map(|i| rng.below(1, i, 200) as u8).collect();
    Tensor::from_bytes(&bytes, dtype, shape, device)
}

fn header(number: usize, t: &Tensor) -> Header {
    Header { edge: 3, backward: true, mb: number as u64, version: 9, dtype: t.dtype(), shape: t.shape().to_vec() }
}

fn expect(message: Option<(Header, Tensor)>, number: usize, wanted: &Tensor) -> Result<()> {
    let (head, t) = message.ok_or_else(|| Error::transport("a message expected"))?;
    assert_eq!(head, header(number, wanted));
    assert_eq!((t.shape(), t.dtype()), (wanted.shape(), wanted.dtype()));
    assert!(t.is_contiguous());
    let (got, wanted) = (t.to_f64()?, wanted.to_f64()?);
    assert!(got.iter().zip(&wanted).all(|(a, b)| a.to_bits() == b.to_bits()), "other data");
    assert_eq!(got.len(), wanted.len());
    Ok(())
}

/// Every element type, ragged shapes and none at all, into buffers that are larger; then written into, as a user may.
fn ring(t: &mut dyn Transport) -> Result<()> {
    let device = Device::cpu(1)?;
    let (next, before) = ((t.rank() + 1) % t.size(), (t.rank() + t.size() - 1) % t.size());
    let shapes: [&[usize]; 6] = [&[4, 3], &[3, 3], &[0, 3], &[], &[7, 1, 2, 1, 1, 1, 1, 3], &[1001]];
    let mut number = 0;
    for dtype in DType::ALL {
        for shape in shapes {
            let receive = t.post_recv(before, Channel(3), 9001, &device)?;
            let mine = tensor(t.rank(), number, dtype, shape, &device)?;
            let send = t.send(next, Channel(3), header(number, &mine), &mine)?;
            let theirs = tensor(before, number, dtype, shape, &device)?;
            let message = t.wait(receive)?;
            expect(message.clone(), number, &theirs)?;
            t.wait(send)?;
            assert!(t.wait(send).is_err(), "a ticket is used once");
            if let Some((_, mut received)) = message.filter(|_| dtype == DType::F32) {
                received.update(|b, mut io| b.fill(1.5, io.dst.again()))?;
                assert!(received.to_f64()?.iter().all(|&x| x == 1.5));
            }
            number += 1;
        }
    }
    Ok(())
}

/// Large messages, sent before any receive is posted.
fn both_send_first(t: &mut dyn Transport) -> Result<()> {
    let device = Device::cpu(1)?;
    let me = t.rank();
    let others: Vec<usize> = (0..t.size()).filter(|&r| r != me).collect();
    let mut sends = Vec::new();
    for &other in &others {
        let mine = tensor(me, 1, DType::U8, &[LARGE], &device)?;
        sends.push(t.send(other, Channel(0), header(1, &mine), &mine)?);
    }
    for &other in &others {
        let ticket = t.post_recv(other, Channel(0), LARGE, &device)?;
        while !t.test(ticket)? {
            std::thread::yield_now();
        }
        expect(t.wait(ticket)?, 1, &tensor(other, 1, DType::U8, &[LARGE], &device)?)?;
    }
    sends.into_iter().try_for_each(|s| t.wait(s).map(|_| ()))
}

/// Several messages of several channels under way at once, waited for in another order, with a gathering between them.
fn interleaved(t: &mut dyn Transport) -> Result<()> {
    let device = Device::cpu(1)?;
    let me = t.rank();
    let others: Vec<usize> = (0..t.size()).filter(|&r| r != me).collect();
    let rows = |number: usize| 1 + (number * 37) % 900;
    let mut receives: Vec<(Ticket, usize, usize)> = Vec::new();
    let mut sends = Vec::new();
    for round in 0..5 {
        for channel in 0..4 {
            for &other in &others {
                let number = round * 4 + channel;
                receives.push((t.post_recv(other, Channel(channel as u32), 901 * 8, &device)?, other, number));
                let mine = tensor(me, number, DType::I64, &[rows(number)], &device)?;
                sends.push(t.send(other, Channel(channel as u32), header(number, &mine), &mine)?);
            }
        }
        if round == 2 {
            gathers(t)?;
        }
    }
    for (ticket, from, number) in receives.into_iter().rev() {
        expect(t.wait(ticket)?, number, &tensor(from, number, DType::I64, &[rows(number)], &device)?)?;
    }
    sends.into_iter().rev().try_for_each(|s| t.wait(s).map(|_| ()))
}

fn gathers(t: &mut dyn Transport) -> Result<()> {
    for length in [0, 1, 70_000] {
        let bytes = |rank: usize| vec![rank as u8; length * rank];
        let all = t.all_gather(&bytes(t.rank()))?;
        assert_eq!(all, (0..t.size()).map(bytes).collect::<Vec<_>>());
    }
    Ok(())
}

/// Measured links are those of a real machine, and the same for all.
fn links(t: &mut dyn Transport) -> Result<()> {
    let links = measure_links(t)?;
    for (a, b) in (0..t.size()).flat_map(|a| (0..a).map(move |b| (a, b))) {
        let link = links.between(a, b).ok_or_else(|| Error::transport("every pair has a link"))?;
        assert!((1e-8..0.1).contains(&link.latency) && (1e6..1e12).contains(&link.bandwidth), "{link:?}");
    }
    // So is what a message takes of a core.
    let handling = if t.size() > 1 { of_messages(t, [0, 1], [LARGE, 8])? } else { 1e-3 };
    assert!((1e-7..0.1).contains(&handling), "{handling}");
    let before = t.seconds_of_communication()?.unwrap_or(f64::NAN);
    assert!(before > 0.0 && t.seconds_of_communication()?.is_some_and(|after| after >= before));
    let text = format!("{links:?} {handling:?}").into_bytes();
    assert!(t.all_gather(&text)?.iter().all(|other| *other == text));
    Ok(())
}

fn too_long(t: &mut dyn Transport) -> Result<()> {
    let device = Device::cpu(1)?;
    if t.rank() == 0 {
        let mine = tensor(0, 0, DType::F32, &[1000], &device)?;
        let send = t.send(1, Channel(3), header(0, &mine), &mine)?;
        t.wait(send)?;
        return t.all_gather(&[]).map(|_| ());
    }
    let ticket = t.post_recv(0, Channel(3), 40, &device)?;
    match t.wait(ticket) {
        Err(e) if e.kind() == ErrorKind::Transport => Err(e),
        other => panic!("{other:?}"),
    }
}
