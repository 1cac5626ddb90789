//! `pipewright train`
use super::{print, print_json};
use crate::{
    Error, Result,
    data::{self, Data},
    models::{self, Input, ModelConfig},
    optim::{Adam, Optimizer, Rate, Sgd},
    pipeline::{faults, planner::replicas_of_shape, schedule::Kind},
    tensor::DType,
    train::{Control, EpochReport, Every, Files, PlanChoice, Settings, Trainer},
};
use serde::{Deserialize, Deserializer, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// Every flag is also a key of the TOML file that `--config` names (with `-`, or `_` for it); a flag wins over the file.
#[derive(clap::Args, Deserialize, Serialize, Default, Clone, Debug)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Args {
    /// A TOML file with any of these settings.
    #[arg(long)]
    #[serde(skip)]
    config: Option<PathBuf>,
    /// The model: mlp, lenet, vgg16, resnet18, gpt or lstm [default: lenet]
    #[arg(long)]
    model: Option<String>,
    /// Width of the model's hidden layers [default: the model's own]
    #[arg(long)]
    width: Option<usize>,
    /// The data: fashion-mnist, cifar10, cifar100, synthetic:…, synthetic-tokens:… [default: fashion-mnist]
    #[arg(long)]
    data: Option<String>,
    /// The schedule: sequential, gpipe, 1f1b, pipedream, pipedream-vertical, pipedream-nostash [default: pipedream]
    #[arg(long)]
    schedule: Option<String>,
    /// A plan file, or the workers of each stage, as in 2-1-1, or `auto`, where the planner chooses these too; without it as many
    /// stages as there are workers
    #[arg(long)]
    pub(super) plan: Option<String>,
    /// Micro-batches of a minibatch under a synchronous schedule [default: 8]
    #[arg(long)]
    #[serde(alias = "micro-batches")]
    micro_batches: Option<usize>,
    /// Samples of a minibatch [default: 128]
    #[arg(long)]
    batch: Option<usize>,
    /// Passes over the data [default: 1, or as many as --steps needs]
    #[arg(long)]
    epochs: Option<u64>,
    /// Ends after this many minibatches
    #[arg(long)]
    pub(super) steps: Option<u64>,
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
    pub(super) workers: Option<usize>,
    /// Threads of each worker's kernels [default: 1]
    #[arg(long)]
    pub(super) threads: Option<usize>,
    /// Plans from operation counts instead of the clock, so that a run can be repeated bit for bit
    #[arg(long)]
    deterministic: bool,
    /// The learning rate as it is at every stage, also where a stage on R workers updates once for R minibatches; without this it
    /// is multiplied by R / the workers of the first stage there
    #[arg(long)]
    #[serde(alias = "no-rate-scaling")]
    no_rate_scaling: bool,
    /// How workers of a stage add up gradients: direct (each part at one worker, 2 steps), halving (2·log R steps), two-level (within
    /// hosts, then across) or auto: two-level where it sends less across, else direct [default: auto]
    #[arg(long)]
    #[serde(alias = "all-reduce")]
    all_reduce: Option<String>,
    /// What they send of gradients: none (all of them), bf16 (rounded), or powersgd:RANK (matrices of
    /// low rank, and what they leave out with the next ones) [default: none]
    #[arg(long)]
    #[serde(alias = "compress-gradients")]
    compress_gradients: Option<String>,
    /// Values and their gradients travel between stages rounded to bf16
    #[arg(long)]
    #[serde(alias = "compress-edges")]
    compress_edges: bool,
    /// Asynchronous data parallelism: the gradient of each worker makes an update of its own, without waiting for those of the others;
    /// for comparison
    #[arg(long)]
    asp: bool,
    /// All nine products of every 3×3 convolution, where four would do with a rounding error up to four times as large
    #[arg(long)]
    #[serde(alias = "no-winograd")]
    pub(super) no_winograd: bool,
    /// Seconds that a worker waits for others before the job ends and says who waits for whom; 0 for ever [default: 300]
    #[arg(long)]
    pub(super) watchdog: Option<u64>,
    /// The folder of the run: settings, plan, profile, metrics, logs, checkpoints and report
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// When checkpoints are written there: epoch, never, or after so many minibatches [default: epoch]
    #[arg(long)]
    checkpoints: Option<Every>,
    /// How many checkpoints stay [default: 2]
    #[arg(long)]
    keep: Option<usize>,
    /// Keeps the weights of the epoch with the best test accuracy in the folder `best` of the run
    #[arg(long)]
    #[serde(alias = "keep-best")]
    pub(super) keep_best: bool,
    /// Goes on from the newest checkpoint of the run in this folder [default: that of --out], or from this checkpoint, on any
    /// number of workers
    #[arg(long, value_name = "FOLDER")]
    #[serde(skip_serializing, deserialize_with = "resume")]
    resume: Option<Option<PathBuf>>,
    /// Prints the report as one JSON object, last
    #[arg(long)]
    pub(super) json: bool,
    /// Prints no progress
    #[arg(long)]
    pub(super) quiet: bool,
}

/// `resume = true` in a file is `--resume` without a folder.
fn resume<'de, D: Deserializer<'de>>(file: D) -> Result<Option<Option<PathBuf>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "resume: true, false or a folder expected")]
    enum Resume {
        Wanted(bool),
        From(PathBuf),
    }
    Ok(match Resume::deserialize(file)? {
        Resume::Wanted(wanted) => wanted.then_some(None),
        Resume::From(folder) => Some(Some(folder)),
    })
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
            no_rate_scaling: self.no_rate_scaling || file.no_rate_scaling,
            all_reduce: self.all_reduce.or(file.all_reduce),
            compress_gradients: self.compress_gradients.or(file.compress_gradients),
            compress_edges: self.compress_edges || file.compress_edges,
            asp: self.asp || file.asp,
            no_winograd: self.no_winograd || file.no_winograd,
            watchdog: self.watchdog.or(file.watchdog),
            out: self.out.or(file.out),
            checkpoints: self.checkpoints.or(file.checkpoints),
            keep: self.keep.or(file.keep),
            keep_best: self.keep_best || file.keep_best,
            resume: self.resume.or(file.resume),
            json: self.json || file.json,
            quiet: self.quiet || file.quiet,
        }
    }

    /// Samples of a minibatch.
    pub(super) fn batch(&self) -> usize {
        self.batch.unwrap_or(Settings::default().batch)
    }

    /// The floating-point type.
    pub(super) fn dtype(&self) -> Result<DType> {
        match self.dtype.as_deref() {
            None | Some("f32") => Ok(DType::F32),
            Some("f64") => Ok(DType::F64),
            Some(other) => Err(Error::config(format!("dtype: f32 or f64 expected, got {other:?}"))),
        }
    }

    fn settings(&self) -> Result<Settings> {
        let d = Settings::default();
        Ok(Settings {
            schedule: self.schedule.as_deref().map_or(Ok(d.schedule), str::parse::<Kind>)?,
            batch: self.batch(),
            micro_batches: self.micro_batches.unwrap_or(d.micro_batches),
            seed: self.seed.unwrap_or(d.seed),
            dtype: self.dtype()?,
            threads: self.threads.unwrap_or(d.threads),
            deterministic: self.deterministic,
            scale_rate: !self.no_rate_scaling,
            all_reduce: self.all_reduce.as_deref().map_or(Ok(d.all_reduce), str::parse)?,
            compress_gradients: self.compress_gradients.as_deref().map_or(Ok(d.compress_gradients), str::parse)?,
            compress_edges: self.compress_edges,
            asp: self.asp,
            winograd: !self.no_winograd,
            plan: match &self.plan {
                None => PlanChoice::Auto,
                Some(text) if text == "auto" => PlanChoice::Best,
                Some(text) => match replicas_of_shape(text) {
                    Some(replicas) => PlanChoice::Replicas(replicas?),
                    None => PlanChoice::File(text.into()),
                },
            },
        })
    }

    fn files(&self) -> Result<Files> {
        let d = Files::default();
        let resume = match (&self.resume, &self.out) {
            (Some(Some(folder)), _) => Some(folder.clone()),
            (Some(None), Some(out)) => Some(out.clone()),
            (Some(None), None) => {
                return Err(Error::config("resume: of which run? Name its folder, or give --out"));
            }
            (None, _) => None,
        };
        let text = toml::to_string(self).map_err(|e| Error::config(format!("settings: {e}")))?;
        let (every, keep) = (self.checkpoints.unwrap_or(d.every), self.keep.unwrap_or(d.keep));
        Ok(Files { out: self.out.clone(), resume, every, keep, config: Some(text), ..d })
    }

    /// With the settings of the file that `--config` names.
    pub(super) fn with_config(self) -> Result<Args> {
        match &self.config {
            None => Ok(self),
            Some(path) => {
                let file = Args::load(path)?;
                Ok(self.over(file))
            }
        }
    }

    /// Reads a file of settings.
    pub(super) fn load(path: &Path) -> Result<Args> {
        let text = Error::read_text(path)?;
        toml::from_str(&text).map_err(|e| Error::config(format!("{}: {e}", path.display())))
    }

    /// The model and the data.
    pub(super) fn task(&self) -> Result<(Data, models::Model)> {
        let data = data::by_name(self.data.as_deref().unwrap_or("fashion-mnist"))?;
        let model = model_for(self.model.as_deref().unwrap_or("lenet"), self.width, &data)?;
        Ok((data, model))
    }

    /// A trainer with all of these settings.
    pub(super) fn trainer(&self) -> Result<Trainer> {
        if self.until.is_some_and(|u| !(0.0..=1.0).contains(&u)) {
            return Err(Error::config(format!("until: 0 to 1 expected, got {:?}", self.until.unwrap_or_default())));
        }
        let (settings, optimizer, files) = (self.settings()?, self.optimizer()?, self.files()?);
        if self.keep_best && files.out.is_none() {
            return Err(Error::config("keep_best: needs a folder to keep the weights in: give --out"));
        }
        if let Some(seconds) = self.watchdog {
            faults::set_watchdog(Duration::from_secs(seconds));
        }
        let (data, model) = self.task()?;
        let epochs = self.epochs.unwrap_or(if self.steps.is_some() { u64::MAX / 2 } else { 1 });
        let mut trainer = Trainer::new(model.graph, model.loss, data)
            .settings(settings)
            .shared_optimizer(optimizer)
            .files(files)
            .epochs(epochs)
            .workers(self.workers.unwrap_or(1))
            .quiet(self.quiet);
        if let Some(steps) = self.steps {
            trainer = trainer.steps(steps);
        }
        if let Some(accuracy) = self.until {
            trainer = trainer.until(accuracy);
        }
        if self.keep_best {
            trainer = trainer.on_epoch(keep_best());
        }
        Ok(trainer)
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
        if self.momentum.is_some() && name != "sgd" {
            return Err(Error::config(format!("momentum: belongs to sgd, the optimizer is {name:?}")));
        }
        if self.cosine == Some(0) {
            return Err(Error::config("cosine: 1 or more updates expected, got 0"));
        }
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

/// The model that fits the data's images or tokens and its classes.
pub(super) fn model_for(name: &str, width: Option<usize>, data: &Data) -> Result<models::Model> {
    let fields = data.train.fields();
    let input = fields.iter().find_map(|f| match (f.name.as_str(), &f.shape[..]) {
        ("image", &[h, w, c]) => Some(Input::Image([h, w, c])),
        ("tokens", &[length]) => Some(Input::Tokens(length)),
        _ => None,
    });
    let input = input.ok_or_else(|| {
        Error::config(format!("a field image [h,w,c] or tokens [t] expected, the data has {fields:?}"))
    })?;
    let classes = data.train.classes().ok_or_else(|| Error::config("the data has no classes"))?;
    models::by_name(name, &ModelConfig { input, classes, width })
}

/// A hook that keeps the weights of the best epoch so far.
fn keep_best() -> impl Fn(&EpochReport) -> Control + Send + Sync {
    let best = Mutex::new(None);
    move |report| {
        let mut best = best.lock().unwrap_or_else(PoisonError::into_inner);
        let is_best = report.test_accuracy.is_some_and(|a| best.is_none_or(|b| a > b));
        if is_best {
            *best = report.test_accuracy;
        }
        if is_best { Control::Keep } else { Control::Continue }
    }
}

pub(super) fn run(args: Args) -> Result<()> {
    let args = args.with_config()?;
    let report = args.trainer()?.run()?;
    if report.worker > 0 {
        return Ok(());
    }
    print(&format!("{}\n", report.summary()))?;
    if args.json { print_json(&report) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[derive(clap::Parser)]
    struct Whole {
        #[command(flatten)]
        args: Args,
    }

    /// What a file that holds `line` is refused for.
    fn refused(line: &str) -> String {
        toml::from_str::<Args>(line).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn every_flag_is_a_key_with_dashes_and_with_underscores() {
        for flag in Whole::command().get_arguments().filter_map(|a| a.get_long()).filter(|f| *f != "config") {
            for key in [flag.to_string(), flag.replace('-', "_")] {
                // No setting takes a list: the message is of the value, unless the key is unknown.
                let said = refused(&format!("{key} = []"));
                assert!(!said.contains("unknown field") && !said.is_empty(), "{key}: {said:?}");
            }
        }
    }

    #[test]
    fn resume_in_a_file_is_as_on_the_command_line() {
        let read = |line: &str| toml::from_str::<Args>(line).expect("settings").resume;
        assert_eq!(read("resume = true"), Some(None));
        assert_eq!(read("resume = false"), None);
        assert_eq!(read("resume = 'runs/x'"), Some(Some("runs/x".into())));
        assert_eq!(read(""), None);
        assert!(refused("resume = 7").contains("true, false or a folder expected"));
    }

    #[test]
    fn wrong_values_in_a_file_say_what_is_expected() {
        for value in ["-5", "0", "2.5", "true", "[1]", "'often'"] {
            let said = refused(&format!("checkpoints = {value}"));
            assert!(said.contains("checkpoints: epoch, never or a number of minibatches expected"), "{value}: {said}");
        }
    }
}
