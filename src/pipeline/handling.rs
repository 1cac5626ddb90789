//! What messages and sums of gradients take of the cores that compute: seconds that threads had on one, counted while messages and sums
//! are made as a run makes them.
//!
//! Workers look now and then whether something has come, as they do between passes, and do not wait for it: a communication thread that
//! is waited for looks all the time, and what it takes then is nobody's.
use super::{
    plan::{Plan, StagePlan},
    planner::Link,
    reduce::{Notes, Share},
    stage::Setup,
    transport::{CHANNEL, Ticket, Transport, header_of},
    weights::{Slot, Weights},
};
use crate::{
    Result,
    autograd::Grads,
    clock::seconds_of_this_thread,
    tensor::{DType, Device, Tensor},
};
use std::{collections::BTreeMap, thread, time::Duration};

/// Messages or sums that are counted, after one that is not.
const TIMES: usize = 4;
/// The pause between two looks at what has come.
const LOOK: Duration = Duration::from_millis(1);
/// Seconds that the gradients of one sum may take on the link; of more a part is summed.
const LONG_ENOUGH: f64 = 0.25;

/// Seconds of the communication thread for a message at one of its ends, of messages of so many bytes from the first worker to the second
/// and back at once: the average of both ends. All workers call it together, with no message under way.
///
/// # Errors
/// If another worker fails.
pub fn of_messages(transport: &mut dyn Transport, ends: [usize; 2], bytes: [usize; 2]) -> Result<f64> {
    let mut mine = 0.0;
    if let Some(me) = ends.iter().position(|&w| w == transport.rank())
        && let Some(mut before) = transport.seconds_of_communication()?
    {
        let data = Tensor::zeros(&[bytes[me]], DType::U8, &Device::reference())?;
        for n in 0..=TIMES {
            let came = transport.post_recv(ends[1 - me], CHANNEL, bytes[1 - me], &Device::reference())?;
            let sent = transport.send(ends[1 - me], CHANNEL, header_of(&data), &data)?;
            look_after(transport, &[came, sent])?;
            let now = transport.seconds_of_communication()?.unwrap_or(before);
            if n == 0 {
                before = now;
            }
            mine = now - before;
        }
    }
    // Each end has sent and received.
    Ok(gathered(transport, &[mine])?.concat().iter().sum::<f64>() / (4 * TIMES) as f64)
}

/// For each stage, what a sum of its gradients over its workers takes of the core of each: seconds of the worker, which lays them side by
/// side, adds them up and takes the sums apart, and, if it `shares` its core with the worker, of the communication thread. All workers
/// call it together, with no message under way.
///
/// # Errors
/// If there is no memory for the gradients, or another worker fails.
pub fn of_sums(
    setup: &Setup,
    plan: &Plan,
    link: &dyn Fn(usize, usize) -> Link,
    shares: bool,
    transport: &mut dyn Transport,
    device: &Device,
) -> Result<Vec<f64>> {
    let mut mine = vec![0.0; plan.stages().len()];
    for (index, stage) in plan.stages().iter().enumerate().filter(|(_, stage)| stage.workers.len() > 1) {
        if let Some(me) = stage.workers.iter().position(|&w| w == transport.rank()) {
            let others = stage.workers.iter().filter(|&&w| w != transport.rank());
            let bandwidth = others.map(|&w| link(transport.rank(), w).bandwidth).fold(f64::INFINITY, f64::min);
            mine[index] = of_sum(setup, (index, stage, me), bandwidth, shares, transport, device)?;
        }
        // So that no other stage disturbs this one.
        transport.all_gather(&[])?;
    }
    let all = gathered(transport, &mine)?;
    let mean = |(index, stage): (usize, &StagePlan)| {
        stage.workers.iter().map(|&w| all[w][index]).sum::<f64>() / stage.workers.len() as f64
    };
    Ok(plan.stages().iter().enumerate().map(mean).collect())
}

fn of_sum(
    setup: &Setup,
    (index, stage, me): (usize, &StagePlan, usize),
    bandwidth: f64,
    shares: bool,
    transport: &mut dyn Transport,
    device: &Device,
) -> Result<f64> {
    let weights = Weights::new(&setup.graph, &stage.nodes, &*setup.optimizer, 0, setup.dtype, &Device::meta())?;
    let bytes = |slot: &Slot| slot.shape.iter().product::<usize>() * setup.dtype.size();
    let (mut slots, mut moved, mut all) = (Vec::new(), 0, 0);
    // As B makes them.
    for slot in weights.slots().into_iter().rev() {
        all += bytes(&slot);
        if (moved as f64) < bandwidth * LONG_ENOUGH {
            moved += bytes(&slot);
            slots.push(slot);
        }
    }
    if slots.is_empty() {
        return Ok(0.0);
    }
    let in_order: Vec<Slot> = slots.iter().rev().cloned().collect();
    let mut reducer = setup.reducer((index, &stage.workers, me), &in_order, device)?;
    let by: Vec<_> = (0..stage.workers.len()).map(|q| vec![q]).collect();
    let counts = vec![1; by.len()];
    let mut seconds = 0.0;
    for n in 0..=TIMES {
        let mut grads = Grads::default();
        for slot in &slots {
            grads.add(slot.slot, Tensor::full(1.0, &slot.shape, setup.dtype, device)?)?;
        }
        let handled = transport.seconds_of_communication()?;
        let start = seconds_of_this_thread();
        for slot in &slots {
            let Some(grad) = grads.get(slot.slot) else { continue };
            reducer.offer(transport, (me, 1), slot.slot, grad)?;
            // B would make the next ones.
            thread::sleep(LOOK + Duration::from_secs_f64(2.0 * bytes(slot) as f64 / bandwidth));
        }
        let shares_of_it = [Share { mb: me, samples: 1, grads }];
        let notes = Notes::new(&shares_of_it, Vec::new(), BTreeMap::new(), reducer.slots());
        let posted = reducer.tell(transport, &notes, &by, 0)?;
        reducer.begin(transport, shares_of_it.into(), &counts)?;
        let notes = reducer.hear(transport, notes, posted, &by, 0)?;
        reducer.finish(transport, notes.present())?;
        let added = seconds_of_this_thread() - start;
        let handled = transport.seconds_of_communication()?.zip(handled).map_or(0.0, |(after, before)| after - before);
        if n > 0 {
            seconds += added + if shares { handled } else { 0.0 };
        }
    }
    Ok(seconds / TIMES as f64 * all as f64 / moved as f64)
}

/// Waits for tickets without being seen to.
fn look_after(transport: &mut dyn Transport, tickets: &[Ticket]) -> Result<()> {
    for &ticket in tickets {
        while !transport.test(ticket)? {
            thread::sleep(LOOK);
        }
        transport.wait(ticket)?;
    }
    Ok(())
}

/// The numbers of all workers, by rank.
fn gathered(transport: &mut dyn Transport, mine: &[f64]) -> Result<Vec<Vec<f64>>> {
    let all = transport.all_gather(bytemuck::cast_slice(mine))?;
    Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()).collect())
}
