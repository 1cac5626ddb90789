//! `pipewright profile`
use super::{print_json, profiled::check_micro_batch};
use crate::{
    Result, data,
    optim::Sgd,
    pipeline::profile::Profile,
    tensor::{DType, Device},
};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The model: mlp, lenet, vgg16 or resnet18
    #[arg(long, default_value = "lenet")]
    model: String,
    /// Width of the model's hidden fully connected layers
    #[arg(long)]
    width: Option<usize>,
    /// The data that it is for
    #[arg(long, default_value = "fashion-mnist")]
    data: String,
    /// Samples of a micro-batch: one size, or several, joined by commas
    #[arg(long, default_value = "128", value_delimiter = ',')]
    micro_batch: Vec<usize>,
    /// Threads of the kernels
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Estimates from operation counts instead of measuring
    #[arg(long)]
    deterministic: bool,
    /// Writes the profile here
    #[arg(long)]
    save: Option<PathBuf>,
    /// Prints the profile as one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    args.micro_batch.iter().try_for_each(|&size| check_micro_batch(size))?;
    let data = data::by_name(&args.data)?;
    let graph = super::train::model_for(&args.model, args.width, &data)?.graph;
    let (dtype, sizes) = (DType::F32, &args.micro_batch);
    // As `train` has it by default: only the time of an update depends on it.
    let optimizer = Sgd::new(0.01).momentum(0.9);
    let profile = match args.deterministic {
        true => Profile::estimate(&graph, &optimizer, dtype, sizes)?,
        false => Profile::measure(&graph, &optimizer, &Device::cpu(args.threads)?, dtype, sizes, 1.0, &mut || Ok(()))?,
    };
    if let Some(path) = &args.save {
        profile.save(path)?;
    }
    if args.json {
        return print_json(&profile);
    }
    for sample in &profile.samples {
        println!(
            "micro-batches of {} samples: milliseconds forward, input gradient, weight gradient, update",
            sample.micro_batch
        );
        println!(
            "{:20} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10}",
            "node", "F", "I", "W", "update", "output kB", "params kB", "saved kB"
        );
        let kb = |bytes: usize| bytes as f64 / 1e3;
        for n in sample.nodes.iter().filter(|n| n.seconds() > 0.0) {
            println!(
                "{:20} {:9.3} {:9.3} {:9.3} {:9.3} {:10.1} {:10.1} {:10.1}",
                n.node,
                n.forward * 1e3,
                n.input_grad * 1e3,
                n.weight_grad * 1e3,
                n.update * 1e3,
                kb(n.output_bytes),
                kb(n.param_bytes),
                kb(n.saved_bytes)
            );
        }
        let seconds: f64 = sample.nodes.iter().map(|n| n.seconds() + n.update).sum();
        println!(
            "in all {:.3} ms, {:.1} samples/s on one worker\n",
            seconds * 1e3,
            sample.micro_batch as f64 / seconds
        );
    }
    Ok(())
}
