//! A run that does not keep what was predicted says so, and why.
use pipewright::{
    Result,
    autograd::{Cx, Outputs, Var},
    data::{Data, Dataset, Field, Sample},
    layers::*,
    optim::Sgd,
    tensor::DType,
    train::{PlanChoice, Report, Settings, Trainer},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

struct Ones([Field; 2]);

impl Dataset for Ones {
    fn name(&self) -> &str {
        "ones"
    }
    fn len(&self) -> usize {
        64
    }
    fn fields(&self) -> &[Field] {
        &self.0
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        out.put(0, &[1.0f32; 8])?;
        out.put(1, &[(index % 3) as i64])
    }
}

/// A `Relu` that sleeps once it is told to.
#[derive(Clone, Default)]
struct Sleepy(Arc<AtomicBool>);

impl Layer for Sleepy {
    fn kind(&self) -> &'static str {
        "sleepy"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        if self.0.load(Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
        Relu.forward(cx, x)
    }
    fn examples() -> Vec<Example> {
        vec![Example::new("awake", Sleepy::default(), &[&[2, 3]])]
    }
}

/// Two stages, the second of which sleeps from when the profile was taken.
fn run(deterministic: bool) -> Result<Report> {
    let (mut g, sleepy) = (Graph::new(), Sleepy::default());
    let (x, label) = (g.input("x", [8]), g.label("label"));
    let a = g.add(Linear::new(8, 8), [x])?;
    let a = g.add(Tanh, [a])?;
    let b = g.add(Linear::new(8, 3), [a])?;
    let b = g.add(sleepy.clone(), [b])?;
    let loss = g.add(CrossEntropy::new(), [b, label])?;
    let g = g.with_loss(loss)?;
    let data = Data::new(Ones([Field::new("x", [8], DType::F32), Field::new("label", [], DType::I64)]));
    let settings = Settings { batch: 4, deterministic, ..Settings::default() };
    let trainer = Trainer::new(g, loss, data).optimizer(Sgd::new(0.1)).settings(settings).workers(2).quiet(true);
    trainer.plan(PlanChoice::Cuts(vec!["linear2".into()])).run_with(|session| {
        sleepy.0.store(true, Relaxed);
        while let Some(minibatch) = session.next_batch()? {
            session.step(&minibatch)?;
        }
        session.report()
    })
}

#[test]
fn a_worker_that_computes_longer_than_profiled_is_named() -> Result<()> {
    let report = run(false)?;
    let warning = report.warning.clone().unwrap_or_default();
    let last = report.workers - 1;
    assert!(warning.contains(&format!("worker {last}'s compute took")), "{warning}");
    assert!(report.summary().contains(&warning));
    let [predicted, measured] = [&report.comparison.predicted, &report.comparison.measured];
    assert_eq!([predicted.len(), measured.len()], [2, 2]);
    assert!(measured[last].compute >= 0.02 && predicted[last].compute < measured[last].compute, "{report:?}");
    // The other one waits for it.
    assert!(measured[0].waiting > 0.005 && measured[0].waiting > measured[last].waiting, "{report:?}");
    assert_eq!(report.summary().matches("ms a minibatch measured").count(), 2);
    // Estimates promise nothing in seconds.
    assert_eq!(run(true)?.warning, None);
    Ok(())
}
