//! Checkpoints from outside: a resumed run equals an unbroken one on any number of workers, and a damaged file is named.
mod small;

use pipewright::{
    Error, Result,
    layers::*,
    pipeline::{
        checkpoint::{self, Checkpoint, Position, Written},
        plan::Plan,
        schedule::Kind,
        transport::{
            Transport,
            threads::{self, Options},
        },
    },
    tensor::{DType, Device, Tensor},
    train::{Engine, Recipe, StepLoss},
};
use small::*;
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

const FOUR: &[&str] = &["relu1", "dropout1", "linear1"];
const TWO: &[&str] = &["conv2d2"];

/// With node state, dropout and a skip edge.
fn model() -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let a = g.add(Conv2d::new(2, 4, 3).padding(1), [x])?;
    let a = g.add(BatchNorm::new(4), [a])?;
    let skip = g.add(Relu, [a])?;
    let b = g.add(Conv2d::new(4, 4, 3).padding(1), [skip])?;
    let c = g.add(Add, [b, skip])?;
    let c = g.add(Dropout::new(0.3), [c])?;
    let d = g.add(Flatten, [c])?;
    let y = g.add(Linear::new(144, 3), [d])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

fn temporary() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|e| Error::io("a temporary folder", e))
}

/// Trains on the minibatches of `range`, from the newest checkpoint in `root` if there is one, and leaves one there.
fn part(recipe: &Recipe, plan: &Plan, range: Range<usize>, sizes: &[usize], root: &Path) -> Result<Outcome> {
    let results = threads::run(plan.workers(), Options::default(), |t| {
        let rank = t.rank();
        let device = Device::cpu(1)?;
        let mut engine = Engine::new(recipe.clone(), plan.clone(), device.clone(), t)?;
        if let Some(from) = checkpoint::latest(root)?.checkpoint {
            assert_eq!(from.position().minibatch, range.start as u64);
            for stage in engine.worker_mut().stages_mut() {
                checkpoint::load_stage(&from, stage, &*recipe.optimizer)?;
            }
            engine.resume_at(range.start as u64);
        }
        engine.gather(&())?;
        for i in range.clone() {
            let mut m = minibatch(i as u64, sizes[i], recipe.settings.dtype, &device)?;
            if !engine.reads_data() {
                m.batch = None;
            }
            engine.train(&m)?;
        }
        engine.drain()?;
        if rank == 0 {
            checkpoint::begin(root, range.end as u64)?;
        }
        engine.gather(&())?;
        let folder = root.join(format!("step-{:06}.tmp", range.end));
        let mut mine: Vec<Written> = Vec::new();
        for stage in engine.worker().stages() {
            let tensors = checkpoint::stage_tensors(stage, &*recipe.optimizer);
            mine.push(checkpoint::write_stage(&folder, stage.index(), stage.weights().minibatches(), &tensors)?);
        }
        let files: Vec<Written> = engine.gather(&mine)?.into_iter().flatten().collect();
        if rank == 0 {
            let position = Position { minibatch: range.end as u64, seed: recipe.settings.seed, ..Position::default() };
            checkpoint::commit(root, &files, &position, 2)?;
        }
        let sha = engine.weights_sha256()?;
        let versions: Vec<usize> = engine.worker().stages().map(|s| s.most_versions()).collect();
        Ok((engine.take_losses(), sha, versions))
    })?;
    let losses: Vec<StepLoss> = results.iter().flat_map(|r| r.0.clone()).collect();
    Ok(Outcome { losses, sha: results[0].1.clone(), versions: results.into_iter().flat_map(|r| r.2).collect() })
}

#[test]
fn a_resumed_run_equals_an_unbroken_one_on_any_number_of_workers() -> Result<()> {
    let g = model()?;
    let sizes = [12, 12, 7, 12, 5, 12];
    let recipe = recipe(g.clone(), sgd(), Kind::OneFOneB, 12, 4);
    let unbroken = train(&recipe, &cut(&g, &[])?, &sizes, &[], Options::default())?;
    let root = temporary()?;
    let mut losses = Vec::new();
    let mut sha = String::new();
    for (cuts, range) in [(FOUR, 0..3), (TWO, 3..4), (&[], 4..5), (FOUR, 5..6)] {
        let got = part(&recipe, &cut(&g, cuts)?, range, &sizes, root.path())?;
        losses.extend(got.losses);
        sha = got.sha;
    }
    assert_eq!((losses, sha), (unbroken.losses, unbroken.sha));
    Ok(())
}

#[test]
fn pipedream_resumed_equals_the_run_that_drained_there() -> Result<()> {
    let g = model()?;
    let sizes = [6; 8];
    let recipe = recipe(g.clone(), sgd(), Kind::PipeDream, 6, 1);
    let plan = cut(&g, FOUR)?;
    let unbroken = train(&recipe, &plan, &sizes, &[4], Options::default())?;
    let root = temporary()?;
    let first = part(&recipe, &plan, 0..5, &sizes, root.path())?;
    let second = part(&recipe, &plan, 5..8, &sizes, root.path())?;
    assert_eq!([first.losses, second.losses].concat(), unbroken.losses);
    assert_eq!(second.sha, unbroken.sha);
    Ok(())
}

#[test]
fn a_stage_keeps_what_it_has_if_the_checkpoint_does_not_fit() -> Result<()> {
    let g = model()?;
    let root = temporary()?;
    let plain = recipe(g.clone(), pipewright::optim::Sgd::new(0.1), Kind::GPipe, 12, 4);
    part(&plain, &cut(&g, TWO)?, 0..1, &[12], root.path())?;
    let with_momentum = recipe(g.clone(), sgd(), Kind::GPipe, 12, 4);
    let error = part(&with_momentum, &cut(&g, &[])?, 1..2, &[12, 12], root.path()).unwrap_err().to_string();
    for word in ["conv2d1.weight/momentum", "step-000001", "stage 0"] {
        assert!(error.contains(word), "{word:?} is not in {error}");
    }
    Ok(())
}

/// Every element type, in two files.
fn everything(root: &Path, step: u64, updates: [u64; 2]) -> Result<PathBuf> {
    let folder = checkpoint::begin(root, step)?;
    let device = Device::reference();
    let mut files = Vec::new();
    for (stage, &updates) in updates.iter().enumerate() {
        let tensor = |d: &DType| {
            let t = Tensor::full(stage as f64 + 2.0, &[3, 2], *d, &device)?;
            // Not contiguous: files hold row-major elements.
            Ok((format!("s{stage}.{d}"), t.transpose()?))
        };
        let mut tensors = DType::ALL.iter().map(tensor).collect::<Result<Vec<_>>>()?;
        tensors.push((format!("s{stage}.empty"), Tensor::zeros(&[0, 4], DType::F32, &device)?));
        files.push(checkpoint::write_stage(&folder, stage, updates, &tensors)?);
    }
    checkpoint::commit(root, &files, &Position { minibatch: step, ..Position::default() }, 3)
}

#[test]
fn every_type_comes_back() -> Result<()> {
    let root = temporary()?;
    let c = checkpoint::open(&everything(root.path(), 9, [9, 9])?)?;
    let device = Device::reference();
    for d in DType::ALL {
        assert_eq!(c.read(&format!("s1.{d}"), d, &[2, 3], &device)?.to_f64()?, [3.0; 6]);
    }
    assert!(c.read("s0.empty", DType::F32, &[0, 4], &device)?.is_empty());
    assert_eq!(c.names().len(), 2 * (DType::ALL.len() + 1));
    Ok(())
}

/// What reading everything says after `damage` was done to a checkpoint.
fn complaint(damage: impl FnOnce(&Path)) -> Result<String> {
    let root = temporary()?;
    everything(root.path(), 3, [3, 3])?;
    let folder = everything(root.path(), 4, [4, 4])?;
    damage(&folder);
    let error = checkpoint::open(&folder).and_then(|c: Checkpoint| c.verify()).expect_err("a complaint").to_string();
    // The one before is taken instead, and the reason told.
    let found = checkpoint::latest(root.path())?;
    assert_eq!(found.checkpoint.map(|c| c.position().minibatch), Some(3), "{error}");
    assert_eq!(found.ignored.iter().map(Error::to_string).collect::<Vec<_>>(), [error.as_str()]);
    Ok(error)
}

fn edit(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).expect("the file");
    change(&mut bytes);
    fs::write(file, bytes).expect("a folder that can be written");
}

/// Changes a stage's file and lists it in `COMMIT` as it is then, as a faulty writer would.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    use sha2::{Digest, Sha256};
    let file = folder.join("stage-1.safetensors");
    edit(&file, change);
    let bytes = fs::read(&file).expect("the file");
    edit(&folder.join("COMMIT"), |text| {
        let mut commit: serde_json::Value = serde_json::from_slice(text).expect("JSON");
        let files = commit["files"].as_array_mut().expect("files");
        let entry = files.iter_mut().find(|f| f["name"] == "stage-1.safetensors").expect("the file");
        entry["bytes"] = bytes.len().into();
        entry["sha256"] = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect::<String>().into();
        *text = commit.to_string().into_bytes();
    });
}

#[test]
fn damage_is_named() -> Result<()> {
    let replace = |file: &'static str, from: &'static str, to: &'static str| {
        move |folder: &Path| {
            edit(&folder.join(file), |bytes| {
                let text = String::from_utf8(bytes.clone()).expect("text");
                assert!(text.contains(from), "{text}");
                *bytes = text.replacen(from, to, 1).into_bytes();
            })
        }
    };
    type Damage = Box<dyn FnOnce(&Path)>;
    let cases: Vec<(Damage, &[&str])> = vec![
        (Box::new(|f| edit(&f.join("stage-1.safetensors"), |b| b.truncate(100))), &["stage-1.safetensors", "100"]),
        (
            Box::new(|f| edit(&f.join("stage-0.safetensors"), |b| *b.last_mut().expect("bytes") ^= 1)),
            &["stage-0.safetensors", "SHA-256", "damaged"],
        ),
        (Box::new(|f| fs::remove_file(f.join("stage-0.safetensors")).expect("the file")), &["stage-0.safetensors"]),
        (Box::new(|f| fs::remove_file(f.join("COMMIT")).expect("the file")), &["not complete", "COMMIT"]),
        (Box::new(|f| edit(&f.join("COMMIT"), |b| b.truncate(20))), &["COMMIT", "EOF"]),
        (Box::new(replace("COMMIT", "\"format\": 1", "\"format\": 7")), &["COMMIT", "format 1 expected, got 7"]),
        (Box::new(replace("COMMIT", "\"format\"", "\"colour\"")), &["COMMIT", "colour"]),
        (Box::new(replace("COMMIT", "stage-1.safetensors", "../secret")), &["COMMIT", "../secret", "no file name"]),
        (Box::new(replace("COMMIT", "stage-1.safetensors", "stage-0.safetensors")), &["stage-0.safetensors"]),
        (Box::new(replace("position.json", "\"epoch\": 0", "\"epoch\": 1")), &["position.json", "SHA-256"]),
        (Box::new(|f| rewrite(f, |b| b.truncate(5))), &["stage-1.safetensors", "5 bytes"]),
        (Box::new(|f| rewrite(f, |b| b[..8].fill(0xff))), &["stage-1.safetensors", "header of 18446744073709551615"]),
        (Box::new(|f| rewrite(f, |b| b[9] = b'!')), &["stage-1.safetensors", "not a safetensors file"]),
        (Box::new(|f| rewrite(f, |b| b.push(0))), &["stage-1.safetensors", "bytes of tensors"]),
    ];
    for (damage, words) in cases {
        let error = complaint(damage)?;
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error}");
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let root = temporary()?;
    let c = checkpoint::open(&everything(root.path(), 9, [9, 9])?)?;
    let device = Device::reference();
    let say = |name, dtype, shape: &[usize]| c.read(name, dtype, shape, &device).expect_err("a complaint").to_string();
    let cases = [
        (say("s9.f32", DType::F32, &[2, 3]), ["s9.f32", "no tensor", "step-000009"]),
        (say("s0.f32", DType::F32, &[3, 2]), ["f32[3, 2] expected", "f32[2, 3]", "stage-0.safetensors"]),
        (say("s1.bf16", DType::F32, &[2, 3]), ["f32[2, 3] expected", "bf16[2, 3]", "stage-1.safetensors"]),
    ];
    for (error, words) in cases {
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error}");
        }
    }
    // Stages that are not of one moment, or of another than the position's.
    for (updates, file) in [([9, 8], "stage-1.safetensors"), ([8, 9], "stage-0"), ([8, 8], "stage-0")] {
        let error = everything(root.path(), 9, updates).and_then(|f| checkpoint::open(&f)).err().map(|e| e.to_string());
        let error = error.unwrap_or_default();
        assert!(error.contains(file) && error.contains("9 updates expected") && error.contains("seen 8"), "{error}");
    }
    // No file, no folder, no name twice.
    assert!(checkpoint::latest(&root.path().join("nothing"))?.checkpoint.is_none());
    let folder = checkpoint::begin(root.path(), 10)?;
    let t = Tensor::zeros(&[1], DType::F32, &device)?;
    let twice = checkpoint::write_stage(&folder, 0, 0, &[("a".into(), t.clone()), ("a".into(), t)]);
    assert!(twice.expect_err("a complaint").to_string().contains("twice"));
    assert!(checkpoint::commit(root.path(), &[], &Position::default(), 1).is_err());
    Ok(())
}
