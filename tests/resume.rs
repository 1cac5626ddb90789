//! A run that is cut off and goes on, on as many workers as there are then, ends as if nothing had happened.
mod demanding;

use pipewright::{
    Error, Result,
    data::{Data, Dataset, Field, Sample},
    layers::*,
    optim::{Adam, Sgd},
    pipeline::{
        checkpoint::{self, Position, Written},
        schedule::Kind,
    },
    tensor::{DType, Philox},
    train::{Control, Every, PlanChoice, Report, Session, Settings, Trainer},
};
use std::{path::Path, sync::Mutex};

/// Noise with labels.
struct Noise {
    name: &'static str,
    len: usize,
    fields: [Field; 2],
}

impl Noise {
    fn new(name: &'static str, len: usize) -> Noise {
        Noise { name, len, fields: [Field::new("x", [6, 6, 2], DType::F32), Field::new("label", [], DType::I64)] }
    }
}

impl Dataset for Noise {
    fn name(&self) -> &str {
        self.name
    }
    fn len(&self) -> usize {
        self.len
    }
    fn fields(&self) -> &[Field] {
        &self.fields
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        let rng = Philox::new(5, 0, self.name);
        let x: Vec<f32> = (0..72).map(|i| rng.below(index as u64 + 1, i, 1000) as f32 / 500.0 - 1.0).collect();
        out.put(0, &x)?;
        out.put(1, &[rng.below(0, index as u64, 3) as i64])
    }
}

/// Minibatches of an epoch: three whole ones and a ragged one.
const PER_EPOCH: u64 = 4;
/// Of a whole run: two epochs and a half.
const STEPS: u64 = 10;

fn trainer(kind: Kind, workers: usize, steps: u64, out: &Path) -> Result<Trainer> {
    trainer_on(kind, PlanChoice::Auto, workers, steps, out)
}

/// With so many workers for each stage.
fn replicated(kind: Kind, replicas: &[usize], steps: u64, out: &Path) -> Result<Trainer> {
    trainer_on(kind, PlanChoice::Replicas(replicas.to_vec()), replicas.iter().sum(), steps, out)
}

fn trainer_on(kind: Kind, plan: PlanChoice, workers: usize, steps: u64, out: &Path) -> Result<Trainer> {
    let data = Data::new(Noise::new("noise", 40)).with_test(Noise::new("other noise", 20));
    let d = Settings::default();
    let settings = Settings { schedule: kind, batch: 12, micro_batches: 4, deterministic: true, plan, ..d };
    let g = demanding::model()?;
    let loss = Value { node: g.loss_node().expect("the model has one"), output: 0 };
    Ok(Trainer::new(g, loss, data)
        .settings(settings)
        .optimizer(Sgd::new(0.05).momentum(0.9).decay(0.01))
        .epochs(9)
        .steps(steps)
        .workers(workers)
        .quiet(true)
        .out(out))
}

/// What must not depend on interruptions.
fn outcome(r: &Report) -> (String, Vec<u64>, Vec<Option<f64>>, u64) {
    let losses = r.train_loss.iter().map(|l| l.to_bits()).collect();
    (r.weights_sha256.clone(), losses, r.epochs.iter().map(|e| e.test_loss).collect(), r.steps)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The minibatches in the metrics.
fn metrics(out: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(out.join("steps.jsonl")).expect("metrics");
    let number = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["minibatch"].as_u64();
    text.lines().map(|l| number(l).expect("a number")).collect()
}

#[test]
fn interrupted_equals_uninterrupted_on_any_number_of_workers() -> Result<()> {
    let whole = folder();
    let expected = outcome(&trainer(Kind::GPipe, 1, STEPS, whole.path())?.run()?);
    for (stop, before, after) in [(1, 4, 2), (3, 2, 4), (4, 1, 3), (5, 4, 2), (7, 3, 1), (8, 2, 2), (9, 4, 2)] {
        let out = folder();
        let first = trainer(Kind::OneFOneB, before, stop, out.path())?.run()?;
        assert_eq!(first.steps, stop);
        let second = trainer(Kind::OneFOneB, after, STEPS, out.path())?.resume(out.path()).run()?;
        let place = format!("stopped after {stop} on {before} workers, resumed on {after}");
        assert_eq!(outcome(&second), expected, "{place}");
        assert_eq!(metrics(out.path()), (0..STEPS).collect::<Vec<_>>(), "{place}");
    }
    Ok(())
}

/// Replicas write one copy of their stage, read their own minibatches again, and know all losses.
#[test]
fn replicated_stages_go_on_as_one_worker_does() -> Result<()> {
    let whole = folder();
    let expected = outcome(&trainer(Kind::GPipe, 1, STEPS, whole.path())?.run()?);
    let shapes: [&[usize]; 5] = [&[2, 1], &[1], &[3], &[1, 2], &[2, 1, 1]];
    for (stop, (before, after)) in [1, 3, 4, 7, 9].into_iter().zip(shapes.iter().zip(shapes.iter().cycle().skip(1))) {
        let out = folder();
        replicated(Kind::OneFOneB, before, stop, out.path())?.run()?;
        let second = replicated(Kind::OneFOneB, after, STEPS, out.path())?.resume(out.path()).run()?;
        let place = format!("stopped after {stop} on {before:?}, resumed on {after:?}");
        assert_eq!(outcome(&second), expected, "{place}");
        assert_eq!(metrics(out.path()), (0..STEPS).collect::<Vec<_>>(), "{place}");
    }
    // Without flush, with drains within rounds.
    for shape in [&[2][..], &[2, 1], &[1, 2], &[3, 1]] {
        let (whole, every) = (folder(), Every::Minibatches(3));
        let run =
            |steps, out: &Path| Ok::<_, Error>(replicated(Kind::PipeDream, shape, steps, out)?.checkpoints(every, 9));
        let expected = outcome(&run(STEPS, whole.path())?.run()?);
        for stop in [3, 6, 9] {
            let out = folder();
            run(stop, out.path())?.run()?;
            let second = run(STEPS, out.path())?.resume(out.path()).run()?;
            assert_eq!(outcome(&second), expected, "{shape:?} stopped after {stop}");
            assert_eq!(metrics(out.path()), (0..STEPS).collect::<Vec<_>>(), "{shape:?} stopped after {stop}");
        }
    }
    Ok(())
}

#[test]
fn a_crash_after_a_checkpoint_loses_only_what_came_after_it() -> Result<()> {
    let (out, whole) = (folder(), folder());
    let expected = outcome(&trainer(Kind::OneFOneB, 2, STEPS, whole.path())?.run()?);
    let crashed = trainer(Kind::OneFOneB, 4, STEPS, out.path())?.checkpoints(Every::Minibatches(3), 1);
    let failed = crashed.run_with(|session| {
        session.stop_at(STEPS);
        for _ in 0..2 {
            while let Some(batch) = session.next_batch()? {
                if session.next_minibatch() == 7 {
                    return Err(Error::data("a crash"));
                }
                session.step(&batch)?;
            }
            session.end_epoch()?;
        }
        Ok(())
    });
    assert!(failed.is_err());
    assert_eq!(metrics(out.path()), (0..7).collect::<Vec<_>>());
    // The newest checkpoint stands before minibatch 6, in the middle of the second epoch.
    let kept: Vec<_> = std::fs::read_dir(out.path().join("checkpoints")).unwrap().flatten().collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert_eq!(kept[0].file_name(), "step-000006");
    let resumed = trainer(Kind::OneFOneB, 3, STEPS, out.path())?.resume(out.path()).run()?;
    assert_eq!(outcome(&resumed), expected);
    assert_eq!(metrics(out.path()), (0..STEPS).collect::<Vec<_>>());
    Ok(())
}

#[test]
fn an_epoch_that_was_not_reported_is_made_up_for() -> Result<()> {
    let whole = folder();
    let expected = outcome(&trainer(Kind::OneFOneB, 1, STEPS, whole.path())?.run()?);
    let out = folder();
    // Cut off during the evaluation, after its last minibatch was saved.
    trainer(Kind::OneFOneB, 2, STEPS, out.path())?.run_with(|session| {
        while let Some(batch) = session.next_batch()? {
            session.step(&batch)?;
        }
        assert!(session.is_epoch_over() && session.epochs().is_empty());
        session.save()
    })?;
    let resumed = trainer(Kind::OneFOneB, 3, STEPS, out.path())?.resume(out.path()).run()?;
    assert_eq!(outcome(&resumed), expected);
    Ok(())
}

#[test]
fn a_checkpoint_at_the_end_of_an_epoch_has_its_report() -> Result<()> {
    for kind in [Kind::OneFOneB, Kind::PipeDream] {
        let (whole, out) = (folder(), folder());
        let every =
            |steps, out: &Path| Ok::<_, Error>(trainer(kind, 2, steps, out)?.checkpoints(Every::Minibatches(2), 9));
        let expected = outcome(&every(STEPS, whole.path())?.run()?);
        for folder in ["step-000002", "step-000004", "step-000006", "step-000008"] {
            let from = whole.path().join("checkpoints").join(folder);
            let again = every(STEPS, out.path().join(folder).as_path())?.resume(from).run()?;
            assert_eq!(outcome(&again), expected, "{kind} from {folder}");
        }
        // A run that has ended ends again, where it did.
        let again = every(PER_EPOCH, &out.path().join("two"))?.run()?;
        let ended = every(PER_EPOCH, &out.path().join("two"))?.resume(out.path().join("two")).run()?;
        assert_eq!(outcome(&ended), outcome(&again));
        assert_eq!(ended.epochs, again.epochs);
    }
    Ok(())
}

#[test]
fn a_run_that_reached_its_goal_has_ended() -> Result<()> {
    let out = folder();
    let run = || Ok::<_, Error>(trainer(Kind::OneFOneB, 2, 99, out.path())?.until(0.01));
    let first = run()?.run()?;
    assert_eq!(first.steps, PER_EPOCH);
    assert_eq!(outcome(&run()?.resume(out.path()).run()?), outcome(&first));
    // The hook hears of the epochs before, and what it says of the last one counts.
    let heard = std::sync::Arc::new(Mutex::new(Vec::new()));
    let hook = |stop: u64| {
        let heard = heard.clone();
        move |r: &pipewright::train::EpochReport| {
            heard.lock().expect("no panic").push(r.epoch);
            match r.epoch {
                e if e == stop => Control::Stop,
                0 => Control::Keep,
                _ => Control::Continue,
            }
        }
    };
    let hooked =
        |stop| Ok::<_, Error>(trainer(Kind::OneFOneB, 2, 99, out.path())?.on_epoch(hook(stop)).resume(out.path()));
    assert_eq!(hooked(2)?.run()?.steps, 3 * PER_EPOCH);
    assert_eq!(hooked(2)?.run()?.steps, 3 * PER_EPOCH);
    assert_eq!(*heard.lock().expect("no panic"), [0, 1, 2, 0, 1, 2]);
    // Its weights were kept though the run before knew no hook.
    assert!(out.path().join("best/step-000004").is_dir());
    Ok(())
}

#[test]
fn a_folder_belongs_to_one_run_at_a_time() -> Result<()> {
    let out = folder();
    let second = || trainer(Kind::GPipe, 2, STEPS, out.path())?.run();
    trainer(Kind::OneFOneB, 1, STEPS, out.path())?.run_with(|_| {
        let error = second().expect_err("the folder is taken").to_string();
        assert!(error.contains("another run is writing there"), "{error}");
        Ok(())
    })?;
    second().map(|_| ())
}

#[test]
fn an_asynchronous_run_goes_on_from_where_it_was_drained() -> Result<()> {
    for kind in [Kind::PipeDream, Kind::PipeDreamVertical] {
        let whole = folder();
        let every = Every::Minibatches(3);
        let expected = outcome(&trainer(kind, 3, STEPS, whole.path())?.checkpoints(every, 9).run()?);
        for stop in [3, 6, 9] {
            let out = folder();
            trainer(kind, 3, stop, out.path())?.checkpoints(every, 1).run()?;
            let second = trainer(kind, 3, STEPS, out.path())?.checkpoints(every, 1).resume(out.path()).run()?;
            assert_eq!(outcome(&second), expected, "{kind} stopped after {stop}");
        }
        // From one of the checkpoints of the run itself.
        let from = whole.path().join("checkpoints/step-000003");
        let again = trainer(kind, 3, STEPS, folder().path())?.checkpoints(every, 1).resume(from).run()?;
        assert_eq!(outcome(&again), expected, "{kind} from the third");
    }
    Ok(())
}

#[test]
fn another_run_is_not_gone_on_with() -> Result<()> {
    let out = folder();
    trainer(Kind::OneFOneB, 2, 2, out.path())?.run()?;
    let fails = |t: Trainer, words: &[&str]| {
        let e = t.run().expect_err("not the same run").to_string();
        words.iter().for_each(|w| assert!(e.contains(w), "{w:?} expected in {e:?}"));
    };
    let again = |kind| Ok::<_, Error>(trainer(kind, 2, STEPS, out.path())?.resume(out.path()));
    fails(again(Kind::OneFOneB)?.seed(9), &["\"seed: 1\"", "\"seed: 9\""]);
    fails(again(Kind::OneFOneB)?.batch_size(8), &["\"batch: 12\"", "\"batch: 8\""]);
    fails(again(Kind::OneFOneB)?.micro_batches(3), &["\"micro-batches: 4\"", "\"micro-batches: 3\""]);
    fails(again(Kind::OneFOneB)?.optimizer(Adam::new(0.1)), &["optimizer: "]);
    fails(again(Kind::PipeDream)?, &["schedule: synchronous", "schedule: pipedream"]);
    let log = || std::fs::read_to_string(out.path().join("logs/rank-0.log")).expect("a log");
    assert!(log().contains("ended by an error") && log().contains("schedule: pipedream"), "{}", log());
    let before = log();
    fails(trainer(Kind::OneFOneB, 2, 5, out.path())?, &["checkpoints holds checkpoints of an earlier run"]);
    assert_eq!(log(), before, "a run that is refused leaves the earlier one's log alone");
    let empty = folder();
    let nothing = trainer(Kind::OneFOneB, 2, 5, empty.path())?.resume(empty.path());
    fails(nothing, &["there is no complete checkpoint to go on from"]);
    // None of these has touched the run.
    let whole = folder();
    let expected = outcome(&trainer(Kind::GPipe, 1, STEPS, whole.path())?.run()?);
    assert_eq!(outcome(&again(Kind::OneFOneB)?.run()?), expected);
    Ok(())
}

#[test]
fn the_best_weights_can_be_kept_and_evaluated() -> Result<()> {
    let out = folder();
    let seen = std::sync::Arc::new(Mutex::new(Vec::new()));
    let hook = {
        let seen = seen.clone();
        move |r: &pipewright::train::EpochReport| {
            seen.lock().expect("no panic").push(r.test_loss);
            // The weights after the second epoch are to be kept, and the third is the last.
            [Control::Continue, Control::Keep, Control::Stop][r.epoch as usize]
        }
    };
    let report = trainer(Kind::OneFOneB, 2, 99, out.path())?.on_epoch(hook).run()?;
    assert_eq!(report.epochs.len(), 3);
    let seen = seen.lock().expect("no panic").clone();
    let best = trainer(Kind::OneFOneB, 3, 99, folder().path())?.resume(out.path().join("best"));
    let found = best.run_with(|session| Ok((session.next_minibatch(), session.evaluate()?)))?;
    assert_eq!(found.0, 2 * PER_EPOCH);
    assert_eq!(Some(found.1.loss), seen[1]);
    assert_ne!(seen[1], seen[2]);
    Ok(())
}

#[test]
fn predictions_come_through_the_pipeline_without_labels() -> Result<()> {
    let g = demanding::model()?;
    let logits = Value { node: g.find("linear3").expect("the last layer"), output: 0 };
    let predict = |workers: usize, n: u64| {
        let run = trainer(Kind::OneFOneB, workers, 99, folder().path())?;
        run.run_with(|session: &mut Session| {
            for _ in 0..3 {
                let batch = session.next_batch()?.expect("there are four");
                session.step(&batch)?;
            }
            let ids: Vec<u64> = (0..n).collect();
            let mut batch = session.test_samples(&ids)?;
            batch.fields.retain(|(name, _)| name == "x");
            let found = session.predict(&batch, logits)?;
            assert_eq!(found.shape(), [n as usize, 3]);
            // Training goes on as if nothing had happened.
            let next = session.next_batch()?.expect("there are four");
            session.step(&next)?;
            let loss = Value { node: demanding::model()?.loss_node().expect("a loss"), output: 0 };
            assert!(session.predict(&batch, loss).is_err());
            Ok((found.to_f64()?, session.report()?.weights_sha256))
        })
    };
    for n in [1, 2, 7, 20] {
        let one = predict(1, n)?;
        assert!(one.0.iter().any(|v| *v != one.0[0]));
        for workers in [2, 4] {
            assert_eq!(predict(workers, n)?, one, "{n} samples on {workers} workers");
        }
    }
    Ok(())
}

#[test]
fn a_checkpoint_whose_position_contradicts_itself_is_refused() -> Result<()> {
    let (run, forged) = (folder(), folder());
    trainer(Kind::GPipe, 1, 6, run.path())?.run()?;
    let whole = checkpoint::latest(&run.path().join("checkpoints"))?.checkpoint.expect("one");
    let text = std::fs::read_to_string(whole.folder().join("COMMIT")).expect("a file");
    let listed: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let mut files: Vec<Written> = serde_json::from_value(listed["files"].clone()).expect("files");
    files.retain(|f| f.name != "position.json");
    let changes: [fn(&mut Position); 4] = [|_| (), |p| p.samples += 1, |p| p.epoch += 1, |p| p.epoch = u64::MAX];
    for (i, change) in changes.into_iter().enumerate() {
        let mut position = whole.position().clone();
        change(&mut position);
        let root = forged.path().join(i.to_string());
        let aside = checkpoint::begin(&root, position.minibatch)?;
        for file in &files {
            std::fs::copy(whole.folder().join(&file.name), aside.join(&file.name)).expect("a copy");
        }
        checkpoint::commit(&root, &files, &position, 1)?;
        let resumed = trainer(Kind::GPipe, 1, 7, &forged.path().join(format!("run{i}")))?.resume(&root).run();
        match resumed {
            Ok(report) => assert_eq!((i, report.steps), (0, 7)),
            Err(e) => assert!(i > 0 && e.to_string().contains("(1, 64) epochs and samples expected"), "{i}: {e}"),
        }
    }
    Ok(())
}
