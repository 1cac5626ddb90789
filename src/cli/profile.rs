//! `pipewright profile`
use super::{print, print_json, profiled::Subject};
use crate::{Result, pipeline::profile::Sample};
use std::path::PathBuf;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    subject: Subject,
    /// Samples of a micro-batch: one size, or several, joined by commas
    #[arg(long, default_value = "128", value_delimiter = ',')]
    micro_batch: Vec<usize>,
    /// Threads of the kernels
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Writes the profile here
    #[arg(long)]
    save: Option<PathBuf>,
    /// Prints the profile as one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let profile = args.subject.profile(&args.subject.graph()?, &args.micro_batch, args.threads)?;
    if let Some(path) = &args.save {
        profile.save(path)?;
    }
    if args.json {
        return print_json(&profile);
    }
    print(&profile.samples.iter().map(table).collect::<String>())
}

/// The costs at one size of the micro-batch.
fn table(sample: &Sample) -> String {
    let mut text = format!(
        "micro-batches of {} samples: milliseconds forward, input gradient, weight gradient, update\n\
         {:20} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>10}\n",
        sample.micro_batch, "node", "F", "I", "W", "update", "output kB", "params kB", "saved kB"
    );
    for n in sample.nodes.iter().filter(|n| n.seconds() > 0.0) {
        text += &format!("{:20}", n.node);
        for seconds in [n.forward, n.input_grad, n.weight_grad, n.update] {
            text += &format!(" {:9.3}", seconds * 1e3);
        }
        for bytes in [n.output_bytes, n.param_bytes, n.saved_bytes] {
            text += &format!(" {:10.1}", bytes as f64 / 1e3);
        }
        text.push('\n');
    }
    let seconds: f64 = sample.nodes.iter().map(|n| n.passes() + n.update).sum();
    let speed = sample.micro_batch as f64 / seconds;
    text + &format!("in all {:.3} ms, {speed:.1} samples/s on one worker\n\n", seconds * 1e3)
}
