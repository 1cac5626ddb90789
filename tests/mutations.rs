//! The verdicts of `verify` against those of a brute-force executor, on programs that are right and on thousands that may not be.
mod brute;
mod mutate;

use brute::{Fault, Machine, Report, written_out};
use mutate::{Base, Draw, base, gather, long, mutant, rewritten};
use pipewright::pipeline::schedule::{
    Inst, Kind, Link, Programs, Wiring, lower, make,
    verify::{Facts, Rule, Sends, verify},
};
use std::collections::BTreeMap;

/// The rule that an error of `verify` names, and the worker and the position unless it is the end of the program.
fn named(error: &str) -> (Rule, Option<(usize, usize)>) {
    let rule = Rule::ALL.into_iter().find(|rule| error.contains(&format!("rule {rule} broken: worker ")));
    let rule = rule.unwrap_or_else(|| panic!("no rule is named: {error}"));
    let mut words = error.split("broken: worker ").nth(1).unwrap_or_default().split(", ");
    let worker = words.next().and_then(|w| w.parse().ok());
    let at = words.next().and_then(|w| w.strip_prefix("instruction ")?.parse().ok());
    (rule, worker.zip(at))
}

/// That a proof found out what the executor counted.
fn compare_facts(facts: &Facts, report: &Report, micro_batches: usize, context: &str) {
    assert_eq!(facts.workers, report.workers, "{context}");
    assert_eq!(facts.stages.len(), report.stages.len(), "{context}");
    for (stage, (proven, counted)) in facts.stages.iter().zip(&report.stages).enumerate() {
        let proven_facts = (proven.stage, proven.worker, proven.weight_versions, proven.staleness);
        let counted_facts = (counted.stage, counted.worker, counted.weight_versions, counted.staleness);
        assert_eq!(proven_facts, counted_facts, "stage {stage}: {context}");
        for reading in &counted.reads {
            assert_eq!(proven.reads.get(reading.mb), Some(*reading), "stage {stage}: {context}");
        }
        assert_eq!(proven.reads.get(micro_batches), None, "stage {stage}: {context}");
    }
}

/// Compares the two verdicts, and what they say of the programs; the broken rule, if one is, and the sends that show it.
fn compare(programs: &Programs, wiring: &Wiring, what: &str) -> Option<(Rule, Sends)> {
    let context = || format!("{what}\n{wiring:?}\n{}", programs.to_text());
    let list = |faults: &[Fault]| faults.iter().map(|f| format!("  {f}\n")).collect::<String>();
    match (verify(programs, wiring), brute::run(programs, wiring)) {
        (Ok(facts), Ok(report)) => {
            compare_facts(&facts, &report, programs.micro_batches, &context());
            None
        }
        (Err(error), Err((sends, faults))) => {
            let error = error.to_string();
            let (rule, place) = named(&error);
            let here: Vec<&Fault> = faults.iter().filter(|f| Some((f.worker, f.at)) == place).collect();
            // A sum in the wrong place may find no others.
            let is_sum = |f: &Fault| {
                matches!(programs.workers[f.worker].get(f.at), Some(Inst::Reduce { .. })) && f.rule == Rule::Deadlock
            };
            // The proof knows all numbers before it begins, and may find one too large where something else is wrong as well.
            let same = here.is_empty() || rule == Rule::Length || here.iter().any(|f| f.rule == rule || is_sum(f));
            assert!(same, "verify: {error}\nthe executor:\n{}{}", list(&faults), context());
            if sends != Sends::Buffered {
                let found = rule == Rule::Deadlock && error.contains(&format!("with {sends} sends"));
                assert!(found, "the executor: a deadlock with {sends} sends; verify: {error}\n{}", context());
            }
            Some((rule, sends))
        }
        (Ok(_), Err((sends, faults))) => {
            panic!("verify finds no fault; with {sends} sends the executor finds\n{}{}", list(&faults), context())
        }
        (Err(error), Ok(_)) => panic!("verify finds {error}\nthe executor finds no fault\n{}", context()),
    }
}

/// Some change to some programs.
fn draw_mutant(draw: &mut Draw, base: fn(&mut Draw) -> Base) -> (String, Programs, Wiring) {
    loop {
        let base = base(draw);
        if let Some(mutant) = mutant(draw, &base) {
            return mutant;
        }
    }
}

/// Compares the verdicts on so many mutants; how many there were of each.
fn compare_mutants(seed: u64, count: usize, base: fn(&mut Draw) -> Base) -> BTreeMap<String, usize> {
    let mut draw = Draw::new(seed);
    let mut verdicts = BTreeMap::new();
    for _ in 0..count {
        let (what, programs, wiring) = draw_mutant(&mut draw, base);
        let verdict = match compare(&programs, &wiring, &what) {
            None => "sound".to_string(),
            Some((Rule::Deadlock, sends)) => format!("deadlock with {sends} sends"),
            Some((rule, _)) => rule.to_string(),
        };
        *verdicts.entry(verdict).or_default() += 1;
    }
    verdicts
}

#[test]
fn verdicts_on_mutants_are_those_of_the_executor() {
    let count = 10_000;
    let verdicts = compare_mutants(1, count, base);
    println!("{verdicts:?}");
    let of = |name: &str| verdicts.get(name).copied().unwrap_or(0);
    assert!((count / 10..count / 2).contains(&of("sound")), "{verdicts:?}");
    for rule in Rule::ALL.into_iter().filter(|&rule| rule != Rule::Deadlock) {
        assert!(of(rule.name()) >= 10, "{rule}: {verdicts:?}");
    }
    for sends in Sends::ALL {
        assert!(of(&format!("deadlock with {sends} sends")) >= 10, "{sends}: {verdicts:?}");
    }
}

/// Of long programs `verify` skips the most repeats, so that it could miss what they do.
#[test]
fn verdicts_on_long_mutants_are_those_of_the_executor() {
    let count = 1500;
    let verdicts = compare_mutants(2, count, long);
    println!("{verdicts:?}");
    let sound = verdicts.get("sound").copied().unwrap_or(0);
    assert!((count / 10..count / 2).contains(&sound), "{verdicts:?}");
}

#[test]
fn facts_are_what_the_executor_counts() {
    let sound = |programs: &Programs, wiring: &Wiring, what: &str| {
        let broken = compare(programs, wiring, what);
        assert_eq!(broken, None, "{what}\n{wiring:?}\n{}", programs.to_text());
    };
    for kind in Kind::ALL {
        for (p, m) in (1..=5).flat_map(|p| (1..=9).map(move |m| (p, m))) {
            let mut wiring = Wiring::straight(p);
            wiring.edges.extend((2..p).map(|to| Link { from: 0, to, grad: m % 2 == 0 }));
            sound(&lower(&make(kind, p, m).unwrap(), &wiring).unwrap(), &wiring, &format!("{kind} p={p} m={m}"));
        }
    }
    let mut draw = Draw::new(3);
    for n in 0..600 {
        let Base { name, programs, wiring } = if n % 3 == 0 { long(&mut draw) } else { base(&mut draw) };
        let mut programs = lower(&programs, &wiring).unwrap();
        sound(&programs, &wiring, &name);
        programs.workers.iter_mut().for_each(|program| *program = rewritten(&mut draw, program));
        sound(&programs, &wiring, &format!("{name}, rewritten"));
        // More sends together may not suit those who receive them.
        gather(&mut programs);
        programs.workers.iter_mut().for_each(|program| *program = rewritten(&mut draw, program));
        let found = compare(&programs, &wiring, &format!("{name}, gathered"));
        assert!(found.is_none_or(|found| found == (Rule::Deadlock, Sends::Batched)), "{name}: {found:?}");
    }
}

/// Goes through all orders of execution: whatever the way to a state in which each worker stands at some instruction, it is the
/// same state, so that all of them end in one.
fn all_orders_agree(programs: &Programs, wiring: &Wiring, sends: Sends, what: &str) {
    let insts: Vec<Vec<Inst>> = programs.workers.iter().map(|p| written_out(0, p).unwrap()).collect();
    let mut seen: BTreeMap<Vec<(usize, bool)>, Machine> = BTreeMap::new();
    let mut ends = 0;
    let mut open = vec![Machine::new(programs, &insts, wiring, sends)];
    while let Some(machine) = open.pop() {
        let next: Vec<Machine> = (0..insts.len())
            .filter_map(|worker| {
                let mut next = machine.clone();
                next.go_on(worker).then_some(next)
            })
            .collect();
        ends += usize::from(next.is_empty());
        for next in next {
            let key: Vec<(usize, bool)> = next.workers.iter().map(|w| (w.at, w.fault.is_some())).collect();
            match seen.get(&key) {
                Some(same) => assert!(
                    same.workers == next.workers && same.channels == next.channels,
                    "{what}\n{}",
                    programs.to_text()
                ),
                None => {
                    seen.insert(key, next.clone());
                    open.push(next);
                }
            }
        }
    }
    assert_eq!(ends, 1, "{what}\n{}", programs.to_text());
}

#[test]
fn one_order_of_execution_decides_for_all() {
    let mut draw = Draw::new(4);
    let mut faulty = 0;
    for _ in 0..150 {
        let (what, programs, wiring) = loop {
            let (what, programs, wiring) = draw_mutant(&mut draw, base);
            let states = programs.workers.iter().map(|p| p.len() + 1).fold(1, usize::saturating_mul);
            let countable = programs.workers.iter().all(|p| written_out(0, p).is_ok());
            if countable && programs.workers.len() > 1 && states < 2000 {
                break (what, programs, wiring);
            }
        };
        faulty += usize::from(brute::run(&programs, &wiring).is_err());
        Sends::ALL.into_iter().for_each(|sends| all_orders_agree(&programs, &wiring, sends, &what));
    }
    assert!((75..140).contains(&faulty), "{faulty}");
}

#[test]
fn each_kind_of_sends_shows_deadlocks_of_its_own() {
    let edges = [true, false, false].map(|grad| Link { from: 0, to: 1, grad }).to_vec();
    let wiring = Wiring { edges, ..Wiring::straight(2) };
    let found = |first: &str, second: &str| {
        let text = format!("weights stashed micro-batches 1 step-every 1 worker 0 0F0 {first} worker 1 {second}");
        compare(&Programs::from_text(&text).unwrap(), &wiring, "by hand")
    };
    let together = "S0>0 S1>0 S2>0 P0<0 R0<0 0B0 0U W0>0 W1>0 W2>0";
    assert_eq!(found(together, "P0>0 P1>0 P2>0 R0>0 R1>0 R2>0 1F0 1B0 S0<0 1U W0<0"), None);
    let waits = |sends| Some((Rule::Deadlock, sends));
    // The second message is posted when the first is here, which comes with the second.
    let second = "P0>0 R0>0 P1>0 P2>0 R1>0 R2>0 1F0 1B0 S0<0 1U W0<0";
    assert_eq!(found(together, second), waits(Sends::Batched));
    // The same, but that it is the wait that does not end: the third message is sent behind it.
    let apart = "S0>0 S1>0 W0>0 S2>0 P0<0 R0<0 0B0 0U W1>0 W2>0";
    assert_eq!(found(apart, "P0>0 P2>0 R2>0 P1>0 R0>0 R1>0 1F0 1B0 S0<0 1U W0<0"), waits(Sends::Batched));
    // The first send ends when it is posted, which is when the second message is here.
    let one_by_one = "S0>0 W0>0 S1>0 W1>0 S2>0 W2>0 P0<0 R0<0 0B0 0U";
    assert_eq!(found(one_by_one, "P1>0 R1>0 P0>0 P2>0 R0>0 R2>0 1F0 1B0 S0<0 1U W0<0"), waits(Sends::Rendezvous));
    // The gradient is waited for before the value leaves.
    let late = "P0<0 R0<0 S0>0 S1>0 S2>0 0B0 0U W0>0 W1>0 W2>0";
    assert_eq!(found(late, "P0>0 P1>0 P2>0 R0>0 R1>0 R2>0 1F0 1B0 S0<0 1U W0<0"), waits(Sends::Buffered));
}

#[test]
fn long_programs_must_repeat_a_state() {
    let wiring = |stages: usize| Wiring { stages: vec![vec![0]; stages], edges: Vec::new() };
    let rule = |stages: usize, repeat: &str| {
        let text = format!("weights stashed micro-batches 1000000000000 step-every 0 worker 0 repeat {repeat}");
        let programs = Programs::from_text(&text).unwrap();
        verify(&programs, &wiring(stages)).map_err(|e| named(&e.to_string()).0)
    };
    let endless = "1000000000000 shift 1 version-shift 0 { 0F0 }";
    assert!(rule(1, endless).is_ok());
    // With every repeat the first stage is one micro-batch further ahead of the second.
    assert_eq!(rule(2, endless).unwrap_err(), Rule::Length);
    assert_eq!(rule(1, "4611686018427387904 shift 4 version-shift 0 { 0F0 }").unwrap_err(), Rule::Length);
}
