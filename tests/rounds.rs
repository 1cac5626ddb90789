//! Schedules of replicated stages (1F1B-RR): their versions, their proofs, and that no ratio of workers waits for ever.
use pipewright::{
    Result,
    layers::*,
    pipeline::{
        plan::{Edge, Plan},
        predict,
        schedule::{
            Inst, Kind, Link, Programs, Shape, Wiring, lower, make_for, prepare, simulate,
            simulate::{Costs, EdgeCost, StageCost},
            verify, warm_up,
        },
    },
};
use proptest::prelude::*;
use std::time::Instant;

/// Stages on so many workers each, each feeding the next, and the first one the last.
fn wiring(replicas: &[usize]) -> Wiring {
    let mut wiring = Wiring::replicated(replicas);
    if replicas.len() > 2 {
        wiring.edges.push(Link { from: 0, to: replicas.len() - 1, grad: true });
    }
    wiring
}

/// All ways to give at most `most` workers to each of at most `stages` stages.
fn ratios(stages: usize, most: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    for n in 0..stages {
        let longer = all.iter().filter(|r| r.len() == n).flat_map(|r| (1..=most).map(|w| [&r[..], &[w]].concat()));
        let longer: Vec<Vec<usize>> = longer.collect();
        all.extend(longer);
    }
    all.retain(|r| !r.is_empty());
    all
}

#[test]
fn the_warm_up_is_the_published_one() {
    assert_eq!(warm_up(&[1, 1, 1, 1]), [3, 2, 1, 0]);
    assert_eq!(warm_up(&[2, 1]), [1, 0]);
    assert_eq!(warm_up(&[1, 2]), [2, 0]);
    assert_eq!(warm_up(&[15, 1]), [1, 0]);
    assert_eq!(warm_up(&[4, 3, 1]), [1, 1, 0]);
    assert_eq!(warm_up(&[3]), [0]);
}

/// F of micro-batch j reads version max(0, ⌊j/R⌋ − w), and its gradient is part of update ⌊j/R⌋.
#[test]
fn every_worker_reads_the_version_of_its_round() {
    for replicas in ratios(3, 3) {
        let wiring = wiring(&replicas);
        let shape = wiring.shape().unwrap();
        for n in [1, 2, 3, 5, 7, 12, 13] {
            let (_, facts) = prepare(Kind::PipeDream, &shape, &wiring, n).unwrap();
            for s in &facts.stages {
                let (r, w) = (replicas[s.stage], shape.warm_up()[s.stage]);
                let (replica, _) = wiring.replica(s.stage, s.worker).unwrap();
                for j in 0..n {
                    let expected = (j % r == replica).then(|| (j / r).saturating_sub(w));
                    let read = s.reads.get(j);
                    assert_eq!(read.map(|read| read.forward), expected, "{replicas:?} n={n} stage {} mb {j}", s.stage);
                    assert_eq!(read.and_then(|read| read.backward), expected);
                }
            }
        }
    }
}

#[test]
fn every_ratio_and_number_of_micro_batches_is_safe() {
    let mut count = 0;
    for replicas in ratios(4, 3).into_iter().chain([vec![5, 2], vec![2, 5], vec![7], vec![4, 3, 1], vec![6, 4]]) {
        let wiring = wiring(&replicas);
        for kind in Kind::ALL.into_iter().filter(|&kind| kind != Kind::PipeDreamVertical) {
            let shape = wiring.shape().unwrap();
            for m in [1, 2, 3, 4, 7, 8, 11] {
                prepare(kind, &shape, &wiring, m).unwrap_or_else(|e| panic!("{kind} {replicas:?} m={m}: {e}"));
                count += 1;
            }
        }
    }
    assert_eq!(count, (3 + 9 + 27 + 81 + 5) * 5 * 7);
}

/// Also those of which the runtime of the paper waited for ever (4-3-1, 8-5-3, 8-7-1): here a worker sums gradients right after its
/// backward pass, before the next forward pass.
#[test]
fn no_ratio_waits_for_ever() {
    let endless = 1 << 40;
    let all = ratios(3, 8).into_iter().filter(|r| r.iter().sum::<usize>() <= 12);
    for replicas in all.chain([vec![8, 5, 3], vec![8, 7, 1], vec![15, 1], vec![1, 15]]) {
        let wiring = Wiring::replicated(&replicas);
        let shape = wiring.shape().unwrap();
        let start = Instant::now();
        prepare(Kind::PipeDream, &shape, &wiring, endless).unwrap_or_else(|e| panic!("{replicas:?}: {e}"));
        assert!(start.elapsed().as_secs() < 5, "{replicas:?}: {:?}", start.elapsed());
    }
}

/// With compute that fits the workers every one of them is busy all the time; with a sum of gradients that takes d it waits for
/// that once a round.
#[test]
fn balanced_replicas_are_busy() {
    let replicas = [2, 1];
    let wiring = Wiring::replicated(&replicas);
    let shape = wiring.shape().unwrap();
    let n = 2000;
    let (programs, _) = prepare(Kind::PipeDream, &shape, &wiring, n).unwrap();
    let stage = |seconds: f64, reduce: f64| StageCost {
        forward: seconds,
        input_grad: seconds,
        weight_grad: seconds,
        reduce,
        ..StageCost::default()
    };
    for reduce in [0.0, 3.0] {
        let costs =
            Costs { stages: vec![stage(2.0, reduce), stage(1.0, 0.0)], ..Costs::uniform(&wiring, 1.0, 1.0, 1.0) };
        let timeline = simulate(&programs, &wiring, &costs).unwrap();
        // A worker of stage 0 takes 6 for a minibatch, of which there are two at once.
        let expected = (6.0 + reduce) / 2.0;
        assert!(
            (timeline.seconds_per_micro_batch / expected - 1.0).abs() < 0.01,
            "{}",
            timeline.seconds_per_micro_batch
        );
    }
}

#[test]
fn a_run_may_start_before_its_end_is_known() {
    let reaches = |inst: &Inst, n: usize| inst.mb().is_some_and(|mb| mb >= n);
    for replicas in ratios(3, 3) {
        let wiring = wiring(&replicas);
        let shape = wiring.shape().unwrap();
        let programs = |n| prepare(Kind::PipeDream, &shape, &wiring, n).unwrap().0;
        let long = programs(1 << 40);
        for n in 1..=15 {
            let short = programs(n);
            for worker in 0..shape.workers() {
                let before: Vec<Inst> = long.stream(worker).take_while(|i| !reaches(i, n)).collect();
                let same: Vec<Inst> = short.stream(worker).take(before.len()).collect();
                assert_eq!(before, same, "{replicas:?} n={n} worker {worker}");
            }
        }
    }
}

#[test]
fn endless_programs_stay_short() {
    for replicas in ratios(3, 4).into_iter().chain([vec![15, 1], vec![8, 7, 1]]) {
        let wiring = wiring(&replicas);
        let (programs, _) = prepare(Kind::PipeDream, &wiring.shape().unwrap(), &wiring, 1 << 40).unwrap();
        let longest = programs.workers.iter().map(|p| p.prologue.len() + p.period.len() + p.epilogue.len()).max();
        assert!(longest < Some(20_000), "{replicas:?}: {longest:?} instructions");
    }
}

#[test]
fn texts_keep_rounds() {
    let wiring = Wiring::replicated(&[2, 1]);
    let shape = wiring.shape().unwrap();
    let programs = make_for(Kind::PipeDream, &shape, 5).unwrap();
    let text = programs.to_text();
    assert!(text.contains("step-every 1 each-replica\n"), "{text}");
    assert!(
        text.contains("0F0\n  repeat 2 shift 2 version-shift 1 {\n    0F2 0B0 0A1 0U\n  }\n  0B0 0A1 0U"),
        "{text}"
    );
    assert_eq!(Programs::from_text(&text).unwrap(), programs);
    let lowered = lower(&programs, &wiring).unwrap();
    assert_eq!(Programs::from_text(&lowered.to_text()).unwrap(), lowered);
}

/// What the planner prolongs a warm-up to is proven, and what a plan file asks for is refused where it waits for ever.
#[test]
fn warm_ups_of_plans_are_safe() -> Result<()> {
    let mut g = Graph::new();
    let (x, target) = (g.input("x", [2]), g.input("target", [2]));
    let a = g.add(Linear::new(2, 2), [x])?;
    let b = g.add(Linear::new(2, 2), [a])?;
    let loss = g.add(Mse, [b, target])?;
    let g = g.with_loss(loss)?;
    let cut = g.find("linear2").expect("a layer");
    for replicas in [[4, 3], [3, 4], [5, 4], [2, 3], [8, 7], [2, 1]] {
        let plan = Plan::replicated(&g, &[cut], &replicas)?;
        let costs = Costs::uniform(&plan.wiring(true), 1.0, 1.0, 1.0);
        let before = predict::seconds_per_minibatch(Kind::PipeDream, &plan, &costs, 1, 1.0)?;
        let longer = predict::warmed_up(Kind::PipeDream, plan.clone(), &costs, 1, 1.0)?;
        let after = predict::seconds_per_minibatch(Kind::PipeDream, &longer, &costs, 1, 1.0)?;
        println!("{replicas:?}: {:?} {before:.3} {:?} {after:.3}", plan.shape()?.warm_up(), longer.shape()?.warm_up());
        assert!(after <= before, "{replicas:?}");
        prepare(Kind::PipeDream, &longer.shape()?, &longer.wiring(true), 1 << 40)?;
        for m in [1, 5, 23] {
            prepare(Kind::PipeDream, &longer.shape()?, &longer.wiring(true), m)?;
        }
    }
    let plan = Plan::replicated(&g, &[cut], &[2, 1])?;
    let costs = Costs::uniform(&plan.wiring(true), 1.0, 1.0, 1.0);
    let late = predict::seconds_per_minibatch(Kind::PipeDream, &plan.clone().warmed_up(&[1, 5]), &costs, 1, 1.0);
    let error = late.unwrap_err().to_string();
    assert!(error.contains("deadlock") && error.contains("warm up with [1, 5]"), "{error}");
    let error = plan.warmed_up(&[usize::MAX, 0]).shape().unwrap_err().to_string();
    assert!(error.contains("stage 0: warm_up = 18446744073709551615, at most 65536"), "{error}");
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |result: Result<(), String>, words: &[&str]| {
        let error = result.unwrap_err();
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in {error:?}"));
    };
    let kind = Kind::PipeDreamVertical;
    let two_one = Wiring::replicated(&[2, 1]);
    let made = two_one.shape().and_then(|s| make_for(kind, &s, 4));
    refused(made.map(|_| ()).map_err(|e| e.to_string()), &["pipedream-vertical takes one worker a stage", "[2, 1]"]);
    let huge = Shape::new(&[63, 64, 65]);
    refused(huge.map(|_| ()).map_err(|e| e.to_string()), &["[63, 64, 65]", "262080 micro-batches"]);
    // What the rules say of sums, each broken by hand.
    let good = "weights stashed micro-batches 2 step-every 2 worker 0 0F0 0B0 0A1 0U worker 1 0F1 0B1 0A1 0U";
    let check = |text: &str| {
        let wiring = Wiring { stages: vec![vec![0, 1]], edges: Vec::new() };
        verify(&Programs::from_text(text).unwrap(), &wiring).map(|_| ()).map_err(|e| e.to_string())
    };
    check(good).unwrap();
    refused(check(&good.replacen("0B0 0A1 0U", "0B0 0U", 1)), &["rule reduce", "were not summed"]);
    refused(check(&good.replacen("0A1", "0A0", 1)), &["rule reduce", "up to 1"]);
    refused(check(&good.replacen("0A1", "0A1 0A1", 1)), &["rule reduce", "summed before"]);
    refused(check(&good.replacen("0B1 0A1", "0A1 0B1", 1)), &["rule step", "folds 1 gradients"]);
    refused(check(&good.replacen("0F1 0B1", "0F0 0B0", 1)), &["rule place", "micro-batch 0 belongs to replica 0 of 2"]);
    refused(check(&good.replacen("0F1 0B1 0A1 0U", "0F1 0B1", 1)), &["rule step"]);
    let crossed = "weights stashed micro-batches 2 step-every 2 \
        worker 0 0F0 0B0 1F0 1B0 0A1 0U 1A1 1U worker 1 0F1 0B1 1F1 1B1 1A1 1U 0A1 0U";
    let wiring = Wiring { stages: vec![vec![0, 1], vec![0, 1]], edges: Vec::new() };
    let deadlock = verify(&Programs::from_text(crossed).unwrap(), &wiring).map(|_| ()).map_err(|e| e.to_string());
    refused(
        deadlock,
        &["rule deadlock", "worker 0, instruction 4, 0A1, waits for worker 1", "1A1, waits for worker 0"],
    );
}

/// Chains of as many layers as stages, whose stages and links take these times.
fn chain(stages: &[f64], links: &[f64]) -> Result<(Plan, Costs)> {
    let mut g = Graph::new();
    let (x, target) = (g.input("x", [2]), g.input("target", [2]));
    let mut value = x;
    for _ in stages {
        value = g.add(Linear::new(2, 2), [value])?;
    }
    let loss = g.add(Mse, [value, target])?;
    let plan = Plan::even(&g.with_loss(loss)?, stages.len())?;
    let stage =
        |&t: &f64| StageCost { forward: t / 3.0, input_grad: t / 3.0, weight_grad: t / 3.0, ..StageCost::default() };
    let edge = |e: &Edge| {
        // The target that the loss reads is small.
        let t = if e.needs_grad { links[e.to - 1] } else { 0.0 };
        EdgeCost { forward: t, backward: t, latency: t / 10.0, ..EdgeCost::default() }
    };
    let edges = plan.edges().iter().map(edge).collect();
    Ok((plan, Costs { stages: stages.iter().map(stage).collect(), edges, ..Costs::default() }))
}

/// A link that takes as long as a stage each way leaves two thirds of the speed with the published warm-up, and all of it with as many
/// minibatches in flight as are on their way.
#[test]
fn a_longer_warm_up_hides_slow_links() -> Result<()> {
    for (link, published, warm_up) in [(0.0, 1.0, [1, 0]), (0.5, 1.55, [3, 0]), (0.95, 2.045, [4, 0])] {
        let (plan, costs) = chain(&[1.0, 1.0], &[link])?;
        let seconds = |plan: &Plan| predict::seconds_per_minibatch(Kind::PipeDream, plan, &costs, 1, 1.0);
        assert!((seconds(&plan)? - published).abs() < 1e-3, "{link}: {}", seconds(&plan)?);
        let longer = predict::warmed_up(Kind::PipeDream, plan.clone(), &costs, 1, 1.0)?;
        assert_eq!(longer.shape()?.warm_up(), warm_up, "{link}");
        assert!(seconds(&longer)? < 1.01, "{link}: {}", seconds(&longer)?);
        for m in [1, 2, 7, 1 << 40] {
            prepare(Kind::PipeDream, &longer.shape()?, &longer.wiring(true), m)?;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Of all warm-ups none is faster than the one that is found, and none as fast has fewer minibatches in flight.
    #[test]
    fn warm_ups_are_the_shortest_that_do_not_stall(
        stages in prop::collection::vec(0.2f64..1.0, 1..4),
        links in prop::collection::vec(0.0f64..1.0, 2),
    ) {
        let (plan, costs) = chain(&stages, &links).unwrap();
        let seconds = |plan: &Plan| predict::seconds_per_minibatch(Kind::PipeDream, plan, &costs, 1, 1.0).unwrap();
        let found = predict::warmed_up(Kind::PipeDream, plan.clone(), &costs, 1, 1.0).unwrap();
        let warm_up = found.shape().unwrap().warm_up().to_vec();
        let (took, flying) = (seconds(&found), warm_up.iter().sum::<usize>());
        for a in 1..8 {
            for b in 1..8 {
                let tried = [[a + b, b, 0], [0, a, 0], [0, 0, 0]][3 - stages.len()][3 - stages.len()..].to_vec();
                let other = seconds(&plan.clone().warmed_up(&tried));
                prop_assert!(other > took * 0.98, "{tried:?} takes {other}, {warm_up:?} {took}");
                prop_assert!(tried.iter().sum::<usize>() >= flying || other > took * 1.0001, "{tried:?} takes {other}, {warm_up:?} {took}");
            }
        }
    }
}
