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
fn missing_costs_are_refused() {
    let wiring = Wiring::straight(2);
    let programs = make(Kind::GPipe, 2, 2).unwrap();
    let error = simulate(&programs, &wiring, &Costs::default()).unwrap_err();
    assert!(error.to_string().contains("costs of 0 stages"), "{error}");
}
