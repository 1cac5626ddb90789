//! Messages and failures among workers that are threads of one process.
use pipewright::{
    Error, ErrorKind, Result,
    pipeline::{
        handling::of_messages,
        transport::{
            Channel, Header, Transport, measure_links,
            threads::{self, Options},
        },
    },
    tensor::{DType, Device, Tensor},
};
use std::{
    thread,
    time::{Duration, Instant},
};

fn header(mb: u64, t: &Tensor) -> Header {
    Header { edge: 1, backward: false, mb, version: 2, dtype: t.dtype(), shape: t.shape().to_vec() }
}

fn floats(n: usize, value: f64) -> Result<Tensor> {
    Tensor::full(value, &[n], DType::F32, &Device::reference())
}

#[test]
fn first_in_first_out_per_channel() -> Result<()> {
    for synchronous in [false, true] {
        threads::run(2, Options { synchronous }, |t| {
            let (peer, device) = (1 - t.rank(), Device::reference());
            // Both send first, on channels that the other waits for in another order.
            let mut sends = Vec::new();
            for (mb, channel) in [(0, 4), (1, 5), (2, 4)] {
                let x = floats(3 + mb, mb as f64)?;
                sends.push(t.send(peer, Channel(channel), header(mb as u64, &x), &x)?);
            }
            let first = t.post_recv(peer, Channel(4), 64, &device)?;
            let second = t.post_recv(peer, Channel(4), 64, &device)?;
            let other = t.post_recv(peer, Channel(5), 64, &device)?;
            for (ticket, mb) in [(other, 1), (second, 2), (first, 0)] {
                let (h, x) = t.wait(ticket)?.ok_or_else(|| Error::transport("no message"))?;
                assert_eq!((h.mb, x.shape(), x.to_f64()?[0]), (mb, &[3 + mb as usize][..], mb as f64));
                assert!(t.wait(ticket).is_err(), "a ticket is good once");
            }
            sends.into_iter().try_for_each(|s| t.wait(s).map(|_| ()))
        })?;
    }
    Ok(())
}

#[test]
fn a_message_is_a_handle_on_the_receivers_device() -> Result<()> {
    let device = Device::cpu(1)?;
    threads::run(2, Options::default(), |t| {
        let x = Tensor::zeros(&[1 << 16], DType::F64, &device)?;
        let allocated = device.memory().live_bytes;
        let sent = t.send(1 - t.rank(), Channel(0), header(0, &x), &x)?;
        let own = Device::cpu(1)?;
        let ticket = t.post_recv(1 - t.rank(), Channel(0), x.byte_len(), &own)?;
        let (_, y) = t.wait(ticket)?.ok_or_else(|| Error::transport("no message"))?;
        t.wait(sent)?;
        assert!(*y.device() == own && own.memory().live_bytes == 0 && allocated >= x.byte_len());
        // Until the other has seen what this one allocated.
        t.all_gather(&[]).map(|_| ())
    })?;
    assert_eq!(device.memory().live_bytes, 0);
    Ok(())
}

#[test]
fn a_synchronous_send_waits_for_its_receive() -> Result<()> {
    for synchronous in [false, true] {
        threads::run(2, Options { synchronous }, |t| {
            let x = floats(1, 0.0)?;
            if t.rank() == 0 {
                let sent = t.send(1, Channel(0), header(0, &x), &x)?;
                assert_eq!(t.test(sent)?, !synchronous);
                t.all_gather(&[])?;
                t.wait(sent)?;
            } else {
                t.all_gather(&[])?;
                let ticket = t.post_recv(0, Channel(0), 4, &Device::reference())?;
                t.wait(ticket)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn gathers_in_order_of_rank() -> Result<()> {
    let all = threads::run(3, Options::default(), |t| {
        let first = t.all_gather(&vec![t.rank() as u8; t.rank()])?;
        Ok((first, t.all_gather(b"again")?))
    })?;
    for (first, second) in all {
        assert_eq!(first, [vec![], vec![1], vec![2, 2]]);
        assert_eq!(second, vec![b"again".to_vec(); 3]);
    }
    Ok(())
}

#[test]
fn refuses_what_cannot_be_delivered() -> Result<()> {
    threads::run(1, Options::default(), |t| {
        let x = floats(4, 0.0)?;
        let wrong = Header { shape: vec![5], ..header(0, &x) };
        let e = t.send(0, Channel(0), wrong, &x).expect_err("header and tensor differ").to_string();
        assert!(e.contains("f32[5]") && e.contains("f32[4]"), "{e}");
        assert!(t.send(1, Channel(0), header(0, &x), &x).is_err(), "no such worker");
        assert!(t.post_recv(1, Channel(0), 1, &Device::reference()).is_err(), "no such worker");
        let part = Tensor::from_host(&[1.0f32; 6], &[2, 3], &Device::reference())?.transpose()?;
        assert!(t.send(0, Channel(0), header(0, &part), &part).is_err(), "not contiguous");
        let sent = t.send(0, Channel(0), header(7, &x), &x)?;
        let ticket = t.post_recv(0, Channel(0), 15, &Device::reference())?;
        t.wait(sent)?;
        let e = t.wait(ticket).expect_err("longer than announced").to_string();
        assert!(e.contains("16 bytes") && e.contains("15") && e.contains("micro-batch 7"), "{e}");
        Ok(())
    })?;
    Ok(())
}

/// Worker 1 fails as `fail` does while the others wait in every way there is.
fn others_end(fail: impl Fn(&mut dyn Transport) -> Result<()> + Sync) -> String {
    let start = Instant::now();
    let result = threads::run(4, Options { synchronous: true }, |t| match t.rank() {
        1 => fail(t),
        0 => {
            let ticket = t.post_recv(2, Channel(0), 8, &Device::reference())?;
            t.wait(ticket).map(|_| ())
        }
        2 => {
            let x = floats(1, 0.0)?;
            let ticket = t.send(3, Channel(0), header(0, &x), &x)?;
            t.wait(ticket).map(|_| ())
        }
        _ => t.all_gather(b"").map(|_| ()),
    });
    assert!(start.elapsed() < Duration::from_secs(2), "the others must not wait");
    result.expect_err("one worker failed").to_string()
}

#[test]
fn one_failure_ends_all_waits() {
    let e = others_end(|_| Err(Error::new(ErrorKind::Data, "disk on fire").context("micro-batch 3")));
    assert_eq!(e, "data: disk on fire (in micro-batch 3)", "the first error itself, not one that follows from it");
    let e = others_end(|_| panic!("out of luck"));
    assert!(e.contains("worker 1 panicked: out of luck at tests/threads.rs"), "{e}");
    let e = others_end(|_| Ok(()));
    assert!(e.contains("worker 1 has finished"), "{e}");
}

#[test]
fn another_thread_can_end_the_job() {
    let e = others_end(|t| {
        let end = t.aborter();
        thread::spawn(move || end(&Error::transport("the watchdog bites")));
        let ticket = t.post_recv(0, Channel(9), 8, &Device::reference())?;
        t.wait(ticket).map(|_| ())
    });
    assert!(e.contains("the watchdog bites"), "{e}");
}

#[test]
fn a_dropped_connection_is_a_failure() {
    let mut two = threads::world(2);
    drop(two.pop());
    let e = two[0].all_gather(b"").expect_err("alone").to_string();
    assert!(e.contains("worker 1 left before the end"), "{e}");
}

#[test]
fn links_are_the_same_on_all_workers() -> Result<()> {
    let all = threads::run(3, Options { synchronous: true }, |t| measure_links(t))?;
    assert!(all.iter().all(|links| *links == all[0]));
    let links = [(0, 1), (0, 2), (1, 2)].map(|(a, b)| all[0].between(a, b).zip(all[0].between(b, a)));
    for link in links {
        let (there, back) = link.ok_or_else(|| Error::transport("a link is missing"))?;
        assert_eq!(there, back);
        assert!(there.latency > 0.0 && there.bandwidth > 0.0 && there.bandwidth.is_finite());
    }
    assert!(links[0] != links[1] && links[1] != links[2] && links[0] != links[2], "each is measured: {links:?}");
    assert!(all[0].between(1, 1).is_none() && all[0].between(0, 3).is_none());
    // All threads are on one host.
    assert!(all[0].together().is_empty());
    // They have no thread for messages.
    assert_eq!(threads::run(2, Options::default(), |t| of_messages(t, [0, 1], [8, 8]))?, [0.0; 2]);
    Ok(())
}
