//! The simulator against the golden numbers and closed forms of the published schedules.
use pipewright::pipeline::schedule::{
    Inst, Kind, Wiring, lower, make, make_for, prepare, simulate,
    simulate::{Costs, StageCost},
};

fn uniform(kind: Kind, p: usize, m: usize, lowered: bool) -> simulate::Timeline {
    let wiring = Wiring::straight(p);
    let mut programs = make(kind, p, m).unwrap();
    if lowered {
        programs = lower(&programs, &wiring).unwrap();
    }
    simulate(&programs, &wiring, &Costs::uniform(&wiring, 1.0, 1.0, 1.0)).unwrap()
}

#[test]
fn golden_numbers_of_four_workers_and_eight_micro_batches() {
    for (kind, peaks) in [(Kind::GPipe, [8, 8, 8, 8]), (Kind::OneFOneB, [4, 3, 2, 1])] {
        let timeline = uniform(kind, 4, 8, true);
        assert_eq!(timeline.makespan, 33.0, "{kind}");
        assert_eq!(format!("{:.4}", timeline.bubble_fraction()), "0.2727", "{kind}");
        assert_eq!(timeline.workers.iter().map(|w| w.peak_activations).collect::<Vec<_>>(), peaks, "{kind}");
        assert_eq!(timeline.draw(1.0, 99).lines().count(), 4);
    }
    // Worker 1 takes F0 at 1, B0 at 2, F1 at 4, B1 at 5: worker 0 gets the gradients at 4 and at 7.
    assert_eq!(uniform(Kind::OneFOneB, 2, 2, true).draw(1.0, 99), "  0 01..aa.bb\n  1 .0aa1bb..\n");
}

#[test]
fn bubbles_and_makespans_are_those_of_the_closed_forms_lowered_or_not() {
    for p in 1..=8usize {
        for m in 1..=20usize {
            for kind in Kind::ALL {
                let plain = uniform(kind, p, m, false);
                let lowered = uniform(kind, p, m, true);
                assert_eq!(plain, lowered, "{kind} p={p} m={m}");
                let makespan = if kind == Kind::Sequential { 3 * p * m } else { 3 * (m + p - 1) };
                if kind.is_synchronous() {
                    assert_eq!(plain.makespan, makespan as f64, "{kind} p={p} m={m}");
                }
                if matches!(kind, Kind::GPipe | Kind::OneFOneB) {
                    let bubble = (p - 1) as f64 / (m + p - 1) as f64;
                    assert!((plain.bubble_fraction() - bubble).abs() < 1e-12, "{kind} p={p} m={m}");
                }
            }
        }
    }
}

#[test]
fn a_long_run_takes_what_its_slowest_stage_takes() {
    let wiring = Wiring::straight(4);
    let mut costs = Costs::uniform(&wiring, 1.0, 1.0, 1.0);
    costs.stages[2].weight_grad = 3.0;
    costs.edges.iter_mut().for_each(|e| e.forward = 0.25);
    for n in [1000, 1 << 30] {
        let programs = lower(&make(Kind::PipeDream, 4, n).unwrap(), &wiring).unwrap();
        let timeline = simulate(&programs, &wiring, &costs).unwrap();
        assert!((timeline.seconds_per_micro_batch - 5.0).abs() < 1e-9, "{}", timeline.seconds_per_micro_batch);
        assert!((timeline.makespan / n as f64 - 5.0).abs() < 0.05, "{}", timeline.makespan);
    }
}

#[test]
fn workers_that_share_cores_slow_each_other_down() {
    let wiring = Wiring::straight(2);
    let costs = |cores| Costs { cores, ..Costs::uniform(&wiring, 1.0, 1.0, 1.0) };
    let run = |kind, m, cores| {
        let programs = lower(&make(kind, 2, m).unwrap(), &wiring).unwrap();
        simulate(&programs, &wiring, &costs(cores)).unwrap()
    };
    // Both on one core: worker 0 alone until 1, its F1 beside the other's F0 until 3, B0 beside the other's B1 from 6 to 10.
    let shared = run(Kind::GPipe, 2, Some(1.0));
    assert_eq!(shared.draw(1.0, 99), "  0 011...aaaabb\n  1 .001aabbbb..\n");
    for m in 1..10 {
        for kind in Kind::ALL {
            let (alone, enough, one) = (run(kind, m, None), run(kind, m, Some(2.0)), run(kind, m, Some(1.0)));
            assert_eq!(alone, enough, "{kind} {m}");
            // A core is never idle here, since one of the two can always go on.
            approx::assert_relative_eq!(one.makespan, 6.0 * m as f64, max_relative = 1e-12);
            assert!(run(kind, m, Some(1.5)).makespan <= one.makespan + 1e-9);
            assert!(run(kind, m, Some(1.5)).makespan >= alone.makespan - 1e-9);
            assert_eq!(one.workers[0].busy, 3.0 * m as f64);
        }
    }
}

/// Starts of the forward passes, or of the updates, of a worker.
fn starts(timeline: &simulate::Timeline, worker: usize, forward: bool) -> Vec<f64> {
    let wanted = |i: Inst| if forward { matches!(i, Inst::F { .. }) } else { matches!(i, Inst::Step { .. }) };
    timeline.events.iter().filter(|e| e.worker == worker && wanted(e.inst)).map(|e| e.start).collect()
}

#[test]
fn messages_of_one_direction_share_the_link_of_a_worker() {
    let run = |replicas: &[usize], seconds: [f64; 2], reduce: f64| {
        let wiring = Wiring::replicated(replicas);
        let mut costs = Costs::uniform(&wiring, 1.0, 1.0, 1.0);
        (costs.edges[0].forward, costs.edges[0].backward) = (seconds[0], seconds[1]);
        costs.stages[0].reduce = reduce;
        let programs = make_for(Kind::GPipe, &wiring.shape().unwrap(), 2).unwrap().placed(&wiring).unwrap();
        simulate(&lower(&programs, &wiring).unwrap(), &wiring, &costs).unwrap()
    };
    // Values made at 1 and 2 for two workers: out of worker 0 one after the other.
    let out = run(&[1, 2], [4.0, 0.0], 0.0);
    assert_eq!([starts(&out, 1, true), starts(&out, 2, true)], [[5.0], [9.0]]);
    // Both made at 1, on two workers: into worker 2 one after the other.
    let into = run(&[2, 1], [4.0, 0.0], 0.0);
    assert_eq!(starts(&into, 2, true), [5.0, 9.0]);
    // Worker 2 makes gradients at 5 and 7, of which the second waits for the first; a worker's sum takes its turn behind both, and
    // the two updates come when it is done: 5 + 4, + 4, a backward pass of 2, and the sum.
    let back = run(&[2, 1], [0.0, 4.0], 3.0);
    assert_eq!([0, 1].map(|w| starts(&back, w, false)), [[18.0], [18.0]]);
    // The other direction is free meanwhile: F1 of worker 0 is sent while the gradient of micro-batch 0 comes.
    let both = |backward| {
        let wiring = Wiring::straight(2);
        let mut costs = Costs::uniform(&wiring, 1.0, 1.0, 1.0);
        (costs.edges[0].forward, costs.edges[0].backward) = (4.0, backward);
        simulate(&lower(&make(Kind::OneFOneB, 2, 2).unwrap(), &wiring).unwrap(), &wiring, &costs).unwrap()
    };
    // F1 arrives at 9 behind F0 while the gradient of 0, made at 8, is under way until 12.
    assert_eq!(starts(&both(4.0), 1, true), starts(&both(0.0), 1, true));
}

#[test]
fn time_is_split_into_passes_waiting_for_messages_and_the_rest() {
    let wiring = Wiring::replicated(&[1, 2]);
    let mut costs = Costs::uniform(&wiring, 1.0, 1.0, 1.0);
    (costs.edges[0].forward, costs.edges[0].backward, costs.edges[0].latency) = (3.0, 0.0, 1.0);
    costs.stages[1].reduce = 5.0;
    let programs = make_for(Kind::GPipe, &wiring.shape().unwrap(), 2).unwrap().placed(&wiring).unwrap();
    let timeline = simulate(&lower(&programs, &wiring).unwrap(), &wiring, &costs).unwrap();
    // Worker 1 has the value at 1 + 3 + 1 and ends B at 8, worker 2 at 1 + 3 + 3 + 1 and at 11, when both begin the sum.
    let parts = |w: usize| [timeline.workers[w].elapsed, timeline.workers[w].blocked, timeline.workers[w].end];
    assert_eq!([parts(1), parts(2)], [[3.0, 5.0, 16.0], [3.0, 8.0, 16.0]]);
    // Worker 0 does two passes each way; the gradients are there at 9 and 12.
    let [elapsed, blocked, end] = parts(0);
    assert_eq!([elapsed, blocked + elapsed, end], [6.0, end, end]);
    assert_eq!(end, 14.0);
}

#[test]
fn missing_costs_are_refused() {
    let wiring = Wiring::straight(2);
    let programs = make(Kind::GPipe, 2, 2).unwrap();
    let error = simulate(&programs, &wiring, &Costs::default()).unwrap_err();
    assert!(error.to_string().contains("costs of 0 stages"), "{error}");
}

/// What a sum takes of a core comes before the wait for the others, and lasts longer where cores are shared.
#[test]
fn a_sum_takes_what_is_added_and_what_the_links_take() {
    let wiring = Wiring::replicated(&[2]);
    let (programs, _) = prepare(Kind::PipeDream, &wiring.shape().unwrap(), &wiring, 200).unwrap();
    let uniform = Costs::uniform(&wiring, 1.0, 1.0, 1.0);
    let stage = StageCost { sum: 0.5, reduce: 0.25, step: 0.125, ..uniform.stages[0] };
    let run = |cores| simulate(&programs, &wiring, &Costs { stages: vec![stage], cores, ..uniform.clone() }).unwrap();
    let alone = run(None);
    // A hundred rounds of two minibatches at once.
    assert_eq!(alone.makespan, 100.0 * (3.0 + 0.5 + 0.25 + 0.125));
    for worker in &alone.workers {
        assert_eq!((worker.busy, worker.elapsed, worker.communication), (362.5, 362.5, 25.0));
    }
    // On one core all but the wait takes twice as long.
    let shared = run(Some(1.0));
    assert_eq!(shared.makespan, 100.0 * (2.0 * (3.0 + 0.5 + 0.125) + 0.25));
    assert_eq!((shared.workers[0].busy, shared.workers[0].elapsed), (362.5, 725.0));
}

/// What a message takes of a core comes out of the pass that it meets; who waits anyway has it for nothing.
#[test]
fn messages_take_their_handling_out_of_passes() {
    let wiring = Wiring::straight(2);
    let mut costs = Costs::uniform(&wiring, 0.25, 0.25, 0.25);
    costs.stages[1] = StageCost { forward: 3.0, input_grad: 3.0, weight_grad: 3.0, ..StageCost::default() };
    let run = |kind, costs: &Costs| {
        let programs = lower(&make(kind, 2, 1000).unwrap(), &wiring).unwrap();
        simulate(&programs, &wiring, costs).unwrap()
    };
    let without = [Kind::PipeDream, Kind::Sequential].map(|kind| run(kind, &costs));
    assert_eq!(without[0].seconds_per_micro_batch, 9.0);
    costs.edges[0].handling = 0.125;
    let with = [Kind::PipeDream, Kind::Sequential].map(|kind| run(kind, &costs));
    // While the slow worker computes, a value comes and a gradient leaves for each minibatch.
    assert_eq!(with[0].seconds_per_micro_batch, 9.25);
    assert_eq!(with[0].workers[1].busy, without[0].workers[1].busy);
    // One after the other: nobody computes while a message is under way but the first worker, which begins with the next micro-batch as
    // soon as it has the last one's gradient.
    assert_eq!(with[1].makespan, without[1].makespan);
}
