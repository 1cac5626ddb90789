//! `pipewright train`
use super::print_json;
use crate::{
    Error, Result,
    data::{self, Data},
    models::{self, ModelConfig},
    optim::{Adam, Optimizer, Rate, Sgd},
    pipeline::{faults, schedule::Kind},
    tensor::DType,
    train::{PlanChoice, Settings, Trainer},
};
use serde::Deserialize;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Every flag is also a key of the TOML file that `--config` names (with `_` for `-`); a flag wins over the file.
#[derive(clap::Args, Deserialize, Default, Clone, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Args {
    /// A TOML file with any of these settings.
    #[arg(long)]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// The model: mlp, lenet or vgg16 [default: lenet]
    #[arg(long)]
    model: Option<String>,
    /// Width of the model's hidden fully connected layers [default: the model's own]
    #[arg(long)]
    width: Option<usize>,
    /// The data: fashion-mnist, cifar10, cifar100, synthetic:… [default: fashion-mnist]
    #[arg(long)]
    data: Option<String>,
    /// The schedule: sequential, gpipe, 1f1b, pipedream, pipedream-vertical, pipedream-nostash [default: pipedream]
    #[arg(long)]
    schedule: Option<String>,
    /// A plan file; without it the model is profiled and partitioned
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Micro-batches of a minibatch under a synchronous schedule [default: 8]
    #[arg(long)]
    micro_batches: Option<usize>,
    /// Samples of a minibatch [default: 128]
    #[arg(long)]
    batch: Option<usize>,
    /// Passes over the data [default: 1, or as many as --steps needs]
    #[arg(long)]
    epochs: Option<u64>,
    /// Ends after this many minibatches
    #[arg(long)]
    steps: Option<u64>,
    /// Ends after an epoch with at least this test accuracy, 0 to 1
    #[arg(long)]
    until: Option<f64>,
    /// The optimizer: sgd, adam or adamw [default: sgd]
    #[arg(long)]
    optimizer: Option<String>,
    /// The learning rate [default: 0.01, with adam and adamw 0.001]
    #[arg(long)]
    lr: Option<f64>,
    /// Momentum of sgd [default: 0.9]
    #[arg(long)]
    momentum: Option<f64>,
    /// Weight decay [default: 0]
    #[arg(long)]
    decay: Option<f64>,
    /// Updates over which the learning rate rises to its value [default: 0]
    #[arg(long)]
    warmup: Option<u64>,
    /// Ends the learning rate along half a cosine over this many updates
    #[arg(long)]
    cosine: Option<u64>,
    /// The seed of everything random [default: 1]
    #[arg(long)]
    seed: Option<u64>,
    /// f32 or f64 [default: f32]
    #[arg(long)]
    dtype: Option<String>,
    /// In-process workers; under mpirun the ranks are the workers [default: 1]
    #[arg(long)]
    workers: Option<usize>,
    /// Threads of each worker's kernels [default: 1]
    #[arg(long)]
    threads: Option<usize>,
    /// Plans from operation counts instead of the clock, so that a run can be repeated bit for bit
    #[arg(long)]
    deterministic: bool,
    /// Seconds that a worker waits for others before the job ends and says who waits for whom; 0 for ever [default: 300]
    #[arg(long)]
    watchdog: Option<u64>,
    /// The folder of the run: plan, profile, metrics and report
    #[arg(long)]
    out: Option<PathBuf>,
    /// Prints the report as one JSON object, last
    #[arg(long)]
    json: bool,
    /// Prints no progress
    #[arg(long)]
    quiet: bool,
}

impl Args {
    /// These settings over those of the file.
    fn over(self, file: Args) -> Args {
        Args {
            config: self.config,
            model: self.model.or(file.model),
            width: self.width.or(file.width),
            data: self.data.or(file.data),
            schedule: self.schedule.or(file.schedule),
            plan: self.plan.or(file.plan),
            micro_batches: self.micro_batches.or(file.micro_batches),
            batch: self.batch.or(file.batch),
            epochs: self.epochs.or(file.epochs),
            steps: self.steps.or(file.steps),
            until: self.until.or(file.until),
            optimizer: self.optimizer.or(file.optimizer),
            lr: self.lr.or(file.lr),
            momentum: self.momentum.or(file.momentum),
            decay: self.decay.or(file.decay),
            warmup: self.warmup.or(file.warmup),
            cosine: self.cosine.or(file.cosine),
            seed: self.seed.or(file.seed),
            dtype: self.dtype.or(file.dtype),
            workers: self.workers.or(file.workers),
            threads: self.threads.or(file.threads),
            deterministic: self.deterministic || file.deterministic,
            watchdog: self.watchdog.or(file.watchdog),
            out: self.out.or(file.out),
            json: self.json || file.json,
            quiet: self.quiet || file.quiet,
        }
    }

    fn settings(&self) -> Result<Settings> {
        let d = Settings::default();
        let dtype = match self.dtype.as_deref() {
            None | Some("f32") => DType::F32,
            Some("f64") => DType::F64,
            Some(other) => return Err(Error::config(format!("dtype: f32 or f64 expected, got {other:?}"))),
        };
        Ok(Settings {
            schedule: self.schedule.as_deref().map_or(Ok(d.schedule), str::parse::<Kind>)?,
            batch: self.batch.unwrap_or(d.batch),
            micro_batches: self.micro_batches.unwrap_or(d.micro_batches),
            seed: self.seed.unwrap_or(d.seed),
            dtype,
            threads: self.threads.unwrap_or(d.threads),
            deterministic: self.deterministic,
            plan: self.plan.clone().map_or(PlanChoice::Auto, PlanChoice::File),
        })
    }

    fn optimizer(&self) -> Result<Arc<dyn Optimizer>> {
        let name = self.optimizer.as_deref().unwrap_or("sgd");
        let base = self.lr.unwrap_or(if name == "sgd" { 0.01 } else { 0.001 });
        let fraction = |name: &str, v: Option<f64>, default: f64, below: f64| match v.unwrap_or(default) {
            v if v.is_finite() && v >= 0.0 && v < below => Ok(v),
            v => Err(Error::config(format!("{name}: 0 ≤ {name} < {below} expected, got {v}"))),
        };
        fraction("lr", Some(base), base, f64::INFINITY)?;
        let momentum = fraction("momentum", self.momentum, 0.9, 1.0)?;
        let rate = self.cosine.map_or(Rate::constant(base), |steps| Rate::cosine(base, 0.0, steps));
        let rate = rate.warmup(self.warmup.unwrap_or(0));
        let decay = self.decay.map(|d| fraction("decay", Some(d), d, f64::INFINITY)).transpose()?;
        Ok(match name {
            "sgd" => Arc::new(Sgd::new(rate).momentum(momentum).decay(decay.unwrap_or(0.0))),
            "adam" => Arc::new(Adam::new(rate).decay(decay.unwrap_or(0.0))),
            "adamw" => Arc::new(Adam::adamw(rate).decay(decay.unwrap_or(0.01))),
            other => return Err(Error::config(format!("optimizer {other:?}: one of sgd, adam, adamw expected"))),
        })
    }
}

/// The model that fits the data's images and classes.
pub(super) fn model_for(name: &str, width: Option<usize>, data: &Data) -> Result<models::Model> {
    let field = data.train.fields().iter().find(|f| f.name == "image");
    let shape = field.map(|f| f.shape.clone()).unwrap_or_default();
    let image = <[usize; 3]>::try_from(shape)
        .map_err(|shape| Error::config(format!("model {name:?} needs images [h,w,c], the data has {shape:?}")))?;
    let classes = data.train.classes().ok_or_else(|| Error::config("the data has no classes"))?;
    models::by_name(name, &ModelConfig { image, classes, width })
}

pub(super) fn run(args: Args) -> Result<()> {
    let args = match &args.config {
        None => args,
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
            let file = toml::from_str(&text).map_err(|e| Error::config(format!("{}: {e}", path.display())))?;
            args.over(file)
        }
    };
    if args.until.is_some_and(|u| !(0.0..=1.0).contains(&u)) {
        return Err(Error::config(format!("until: 0 to 1 expected, got {:?}", args.until.unwrap_or_default())));
    }
    let (settings, optimizer) = (args.settings()?, args.optimizer()?);
    if let Some(seconds) = args.watchdog {
        faults::set_watchdog(Duration::from_secs(seconds));
    }
    let data = data::by_name(args.data.as_deref().unwrap_or("fashion-mnist"))?;
    let model = model_for(args.model.as_deref().unwrap_or("lenet"), args.width, &data)?;
    let epochs = args.epochs.unwrap_or(if args.steps.is_some() { u64::MAX / 2 } else { 1 });
    let mut trainer = Trainer::new(model.graph, model.loss, data)
        .settings(settings)
        .shared_optimizer(optimizer)
        .epochs(epochs)
        .workers(args.workers.unwrap_or(1))
        .quiet(args.quiet);
    if let Some(steps) = args.steps {
        trainer = trainer.steps(steps);
    }
    if let Some(accuracy) = args.until {
        trainer = trainer.until(accuracy);
    }
    if let Some(out) = args.out {
        trainer = trainer.out(out);
    }
    let report = trainer.run()?;
    report.print();
    if args.json && report.worker == 0 {
        print_json(&report)?;
    }
    Ok(())
}
