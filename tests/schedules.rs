//! Schedules from outside: what they prove, predict and print.
use pipewright::pipeline::schedule::{
    Inst, Kind, Link, Program, Programs, Read, Wiring, evaluate, lower, make,
    verify::{Facts, verify},
};
use std::time::Instant;

/// A wiring of `stages` stages in a row and `skips` other edges, drawn from `seed`.
fn skipping(stages: usize, skips: usize, seed: u64) -> Wiring {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let mut wiring = Wiring::straight(stages);
    if stages < 2 {
        return wiring;
    }
    for _ in 0..skips {
        let from = draw(stages - 1);
        let to = from + 1 + draw(stages - 1 - from);
        wiring.edges.push(Link { from, to, grad: draw(3) > 0 });
    }
    wiring
}

fn lowered(kind: Kind, wiring: &Wiring, m: usize) -> Programs {
    lower(&make(kind, wiring.stages.len(), m).unwrap(), wiring).unwrap()
}

fn verified(kind: Kind, p: usize, m: usize) -> Facts {
    let wiring = Wiring::straight(p);
    verify(&lowered(kind, &wiring, m), &wiring).unwrap()
}

#[test]
fn every_schedule_is_proven_over_straight_and_skipping_wirings() {
    for kind in Kind::ALL {
        for p in 1..=8 {
            for m in 1..=32 {
                for wiring in [Wiring::straight(p), skipping(p, 1 + m % 5, (p * 100 + m) as u64)] {
                    let programs = lowered(kind, &wiring, m);
                    let facts =
                        verify(&programs, &wiring).unwrap_or_else(|e| panic!("{kind} p={p} m={m} {wiring:?}: {e}"));
                    assert_eq!(facts.workers.len(), p);
                    for (stage, s) in facts.stages.iter().enumerate() {
                        assert!((0..m).all(|mb| s.reads.get(mb).is_some()), "{kind} p={p} m={m} stage {stage}");
                    }
                }
            }
        }
    }
}

#[test]
fn evaluation_is_proven() {
    for p in 1..=8 {
        for m in [1, 2, 3, 31, 1 << 40] {
            let mut wiring = skipping(p, 3, m as u64);
            wiring.edges.iter_mut().for_each(|link| link.grad = false);
            let facts = verify(&lower(&evaluate(p, m).unwrap(), &wiring).unwrap(), &wiring).unwrap();
            assert!(facts.workers.iter().all(|w| w.peak_activations == 1));
            assert!(facts.stages.iter().all(|s| s.reads.get(m - 1).unwrap().forward == 0));
        }
    }
}

#[test]
fn versions_and_staleness_are_those_of_the_closed_forms() {
    for p in 1..=8 {
        let n = 40;
        for kind in Kind::ALL {
            let facts = verified(kind, p, n);
            for (r, s) in facts.stages.iter().enumerate() {
                let lag = p - 1 - r;
                let (versions, staleness) = match kind {
                    Kind::PipeDream => (lag + 1, lag),
                    Kind::PipeDreamVertical => (p, p - 1),
                    Kind::PipeDreamNoStash => (1, lag),
                    _ => (1, 0),
                };
                assert_eq!((s.weight_versions, s.staleness), (versions, staleness), "{kind} p={p} stage {r}");
                for j in 0..n {
                    let read = s.reads.get(j).unwrap();
                    let expected = match kind {
                        Kind::PipeDream => (j.saturating_sub(lag), j.saturating_sub(lag)),
                        Kind::PipeDreamVertical => (j.saturating_sub(p - 1), j.saturating_sub(p - 1)),
                        Kind::PipeDreamNoStash => (j.saturating_sub(lag), j),
                        _ => (0, 0),
                    };
                    assert_eq!((read.forward, read.backward.unwrap()), expected, "{kind} p={p} stage {r} mb {j}");
                }
                assert_eq!(s.reads.get(n), None);
            }
        }
    }
}

#[test]
fn an_endless_program_is_proven_at_once() {
    let n = 1 << 40;
    for kind in [Kind::PipeDream, Kind::PipeDreamVertical, Kind::PipeDreamNoStash] {
        for p in 1..=8 {
            for wiring in [Wiring::straight(p), skipping(p, 5, p as u64)] {
                let start = Instant::now();
                let endless = verify(&lowered(kind, &wiring, n), &wiring).unwrap();
                assert!(start.elapsed().as_millis() < 500, "{kind} p={p}: {:?}", start.elapsed());
                let short = verify(&lowered(kind, &wiring, 100), &wiring).unwrap();
                assert_eq!(endless.workers, short.workers, "{kind} p={p}");
                for (a, b) in endless.stages.iter().zip(&short.stages) {
                    assert_eq!((a.weight_versions, a.staleness), (b.weight_versions, b.staleness));
                    assert_eq!(a.reads.get(50), b.reads.get(50));
                    let (late, early) = (a.reads.get(n - 1).unwrap(), b.reads.get(99).unwrap());
                    assert_eq!(late.forward - early.forward, n - 100, "{kind} p={p}");
                    let middle = a.reads.get(n / 2).unwrap();
                    assert_eq!(middle.forward, n / 2 + early.forward - 99, "{kind} p={p}");
                }
            }
        }
    }
}

#[test]
fn a_period_is_proven_as_if_it_were_written_out() {
    for kind in Kind::ALL {
        for p in 1..=6 {
            let m = 50;
            let wiring = skipping(p, 2, p as u64);
            let periodic = lowered(kind, &wiring, m);
            let unrolled = Programs {
                workers: periodic.workers.iter().map(|p| Program::once(p.iter().collect())).collect(),
                ..periodic.clone()
            };
            let (a, b) = (verify(&periodic, &wiring).unwrap(), verify(&unrolled, &wiring).unwrap());
            assert_eq!(a.workers, b.workers);
            for (a, b) in a.stages.iter().zip(&b.stages) {
                assert_eq!((a.weight_versions, a.staleness), (b.weight_versions, b.staleness));
                assert!((0..m + 2).all(|mb| a.reads.get(mb) == b.reads.get(mb)));
            }
        }
    }
}

#[test]
fn the_peaks_are_those_of_the_published_schedules() {
    let activations = |kind| verified(kind, 4, 8).workers.iter().map(|w| w.peak_activations).collect::<Vec<_>>();
    assert_eq!(activations(Kind::GPipe), [8, 8, 8, 8]);
    assert_eq!(activations(Kind::OneFOneB), [4, 3, 2, 1]);
    assert_eq!(activations(Kind::Sequential), [1, 1, 1, 1]);
    assert_eq!(activations(Kind::PipeDream), [4, 3, 2, 1]);
}

#[test]
fn a_run_may_start_before_its_end_is_known() {
    let reaches = |inst: &Inst, n: usize| inst.mb().is_some_and(|mb| mb >= n);
    for kind in Kind::ALL.into_iter().filter(|k| !k.is_synchronous()) {
        for p in 1..=6 {
            let wiring = skipping(p, 3, p as u64);
            for n in 1..=20 {
                let (short, long) = (lowered(kind, &wiring, n), lowered(kind, &wiring, n + 30));
                for worker in 0..p {
                    let before: Vec<Inst> = long.stream(worker).take_while(|i| !reaches(i, n)).collect();
                    let same: Vec<Inst> = short.stream(worker).take(before.len()).collect();
                    assert_eq!(before, same, "{kind} p={p} n={n} worker {worker}");
                }
            }
        }
    }
    assert!(matches!(
        make(Kind::PipeDream, 1, 1).unwrap().workers[0].get(0),
        Some(Inst::F { read: Read::Current, .. })
    ));
}

/// The rule that the programs break once `change` was made to worker 1's instructions.
fn broken(kind: Kind, change: impl Fn(&mut Vec<Inst>)) -> String {
    let wiring = Wiring::straight(3);
    let mut programs = lowered(kind, &wiring, 4);
    let mut insts: Vec<Inst> = programs.stream(1).collect();
    change(&mut insts);
    programs.workers[1] = Program::once(insts);
    verify(&programs, &wiring).unwrap_err().to_string()
}

#[test]
fn each_rule_broken_by_hand_is_named() {
    let inst = |text: &str| text.parse::<Inst>().unwrap();
    let at =
        |insts: &[Inst], text: &str| insts.iter().position(|&i| i == inst(text)).unwrap_or_else(|| panic!("{text}"));
    let swap = |a: &'static str, b: &'static str| {
        move |insts: &mut Vec<Inst>| {
            let (a, b) = (at(insts, a), at(insts, b));
            insts.swap(a, b);
        }
    };
    let replace = |a: &'static str, b: &'static str| move |insts: &mut Vec<Inst>| *at_mut(insts, inst(a)) = inst(b);
    let drop = |a: &'static str| move |insts: &mut Vec<Inst>| insts.retain(|&i| i != inst(a));
    let f1b = Kind::OneFOneB;
    let cases = [
        (broken(f1b, replace("1B2", "2B2")), "place", "stage 2 is on worker 2"),
        (broken(f1b, replace("1F2", "1F1")), "once", "done before"),
        (broken(f1b, swap("1F2", "R0>2")), "order", "was not received"),
        (broken(f1b, swap("1F2", "S1>2")), "order", "not made before"),
        (broken(f1b, drop("P0>1")), "message", "was not posted before"),
        (broken(f1b, drop("W1>1")), "message", "never waited for"),
        (broken(f1b, drop("S1>1")), "message", "no send of it"),
        (broken(f1b, drop("1B3")), "order", "not made before"),
        (broken(Kind::GPipe, swap("P1<1", "P1<2")), "channel", "is posted"),
        (broken(f1b, swap("1U", "1B3")), "step", "are done"),
        (broken(Kind::PipeDream, drop("1U")), "step", "belongs to update"),
        (broken(Kind::PipeDreamVertical, replace("1F3@1", "1F3@0")), "version", "version 0 is not held"),
        (broken(Kind::PipeDreamVertical, drop("1D1")), "version", "never freed"),
    ];
    for (error, rule, what) in cases {
        assert!(error.contains(&format!("rule {rule} broken: worker")), "{rule}: {error}");
        assert!(error.contains(what), "{what}: {error}");
    }
}

fn at_mut(insts: &mut [Inst], inst: Inst) -> &mut Inst {
    insts.iter_mut().find(|i| **i == inst).unwrap_or_else(|| panic!("no {inst}"))
}

#[test]
fn workers_that_wait_for_each_other_are_named() {
    let wiring = Wiring::straight(2);
    let programs = |first: &str, second: &str| {
        let program = |text: &str| Program::once(text.split(' ').map(|i| i.parse().unwrap()).collect());
        Programs { workers: vec![program(first), program(second)], ..make(Kind::OneFOneB, 2, 1).unwrap() }
    };
    // The first worker posts its receive only when its send is done, which is when the second one has posted.
    let good = programs("0F0 S0>0 P0<0 R0<0 0B0 0U W0>0", "P0>0 R0>0 1F0 1B0 S0<0 1U W0<0");
    verify(&good, &wiring).unwrap();
    // With a rendezvous, neither wait ends: each post stands behind the other.
    let wiring =
        Wiring { edges: vec![Link { from: 0, to: 1, grad: true }, Link { from: 0, to: 1, grad: false }], ..wiring };
    let bad = programs("0F0 S0>0 W0>0 S1>0 W1>0 P0<0 R0<0 0B0 0U", "P1>0 R1>0 P0>0 R0>0 1F0 1B0 S0<0 1U W0<0");
    let error = verify(&bad, &wiring).unwrap_err().to_string();
    assert!(error.contains("rule deadlock broken: worker 0, instruction 2, W0>0: with rendezvous sends"), "{error}");
    assert!(error.contains("worker 1, instruction 1, R1>0, waits for worker 0"), "{error}");
}

#[test]
fn proving_is_linear() {
    let start = Instant::now();
    verified(Kind::OneFOneB, 64, 1024);
    println!("64 workers, 1024 micro-batches: {:?}", start.elapsed());
    assert!(start.elapsed().as_secs() < 20);
}
