//! The simulator against the golden numbers and closed forms of the published schedules.
use pipewright::pipeline::schedule::{Kind, Wiring, lower, make, simulate, simulate::Costs};

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

#[test]
fn missing_costs_are_refused() {
    let wiring = Wiring::straight(2);
    let programs = make(Kind::GPipe, 2, 2).unwrap();
    let error = simulate(&programs, &wiring, &Costs::default()).unwrap_err();
    assert!(error.to_string().contains("costs of 0 stages"), "{error}");
}
