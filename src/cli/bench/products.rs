//! `pipewright bench products`
use crate::{
    Result,
    cli::print_found,
    tensor::{DType, Device, Isa, Philox, Tensor},
};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

#[derive(clap::Args)]
pub(in crate::cli) struct Args {
    /// Threads of each product
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// How long to measure each product
    #[arg(long, default_value_t = 300)]
    milliseconds: u64,
    /// Only products whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Rows, inputs and outputs of the linear layers of the cases of `bench step --case`, and of the square product that libraries
/// are compared by. Each is three products: y = x·wᵀ, dx = dy·w, dw = dyᵀ·x.
const LAYERS: [[usize; 3]; 11] = [
    [1024, 1024, 1024],
    [128, 784, 1024],
    [128, 1024, 1024],
    [64, 3136, 128],
    [4, 4096, 4096],
    [1024, 256, 768],
    [1024, 256, 256],
    [1024, 256, 1024],
    [1024, 1024, 256],
    [1024, 512, 2048],
    [1024, 512, 2000],
];
/// Bytes of operands that are used in turn, more than a core's own caches hold: in training, too, operands come from elsewhere.
const OPERANDS: usize = 16 << 20;
/// How long the limit is measured before and after each product.
const PEAK: Duration = Duration::from_millis(20);

#[derive(serde::Serialize)]
struct Answer {
    isa: &'static str,
    threads: usize,
    products: Vec<Found>,
}

#[derive(serde::Serialize)]
struct Found {
    /// As `128x1024x784 tb`: rows, columns and inner size of the result; `ta`, `tb` where an operand is read transposed.
    product: String,
    /// The median, in billions a second.
    gflops: f64,
    /// Reached by a tenth of the times: what is left of it where other work keeps breaking in.
    best_gflops: f64,
    /// What multiply-adds in registers reached on a core just before and after.
    peak_gflops: f64,
}

struct Product {
    ta: bool,
    tb: bool,
    sizes: [usize; 3],
}

impl Product {
    fn name(&self) -> String {
        let [m, n, k] = self.sizes;
        format!("{m}x{n}x{k}{}{}", if self.ta { " ta" } else { "" }, if self.tb { " tb" } else { "" })
    }

    /// GFLOP/s: the median, and what a tenth of the times reaches.
    fn measure(&self, device: &Device, time: Duration) -> Result<[f64; 2]> {
        let [m, n, k] = self.sizes;
        let sets = OPERANDS / (size_of::<f32>() * (m * k + k * n + m * n)) + 1;
        let random = |shape: [usize; 2]| device.uniform(Philox::new(1, 0, "products"), -1.0, 1.0, &shape, DType::F32);
        let pair = |_| -> Result<[Tensor; 2]> {
            Ok([random(if self.ta { [k, m] } else { [m, k] })?, random(if self.tb { [n, k] } else { [k, n] })?])
        };
        let operands: Vec<[Tensor; 2]> = (0..sets).map(pair).collect::<Result<_>>()?;
        let (mut times, start) = (Vec::new(), Instant::now());
        for [a, b] in operands.iter().cycle() {
            let begin = Instant::now();
            black_box(a.gemm(self.ta, b, self.tb, None)?);
            times.push(begin.elapsed().as_secs_f64());
            if start.elapsed() >= time {
                break;
            }
        }
        times.sort_by(f64::total_cmp);
        Ok([2, 10].map(|part| 2.0 * (m * n * k) as f64 / times[times.len() / part] / 1e9))
    }
}

pub(super) fn run(args: &Args) -> Result<()> {
    let (isa, device) = (Isa::chosen()?, Device::cpu(args.threads)?);
    let of_layer = |[rows, inputs, outputs]: [usize; 3]| {
        [
            Product { ta: false, tb: true, sizes: [rows, outputs, inputs] },
            Product { ta: false, tb: false, sizes: [rows, inputs, outputs] },
            Product { ta: true, tb: false, sizes: [outputs, inputs, rows] },
        ]
    };
    let mut products = Vec::new();
    for product in LAYERS.into_iter().flat_map(of_layer).filter(|p| p.name().contains(&args.only)) {
        let before = isa.peak_flops(PEAK)?;
        let [gflops, best_gflops] = product.measure(&device, Duration::from_millis(args.milliseconds))?;
        let peak_gflops = (before + isa.peak_flops(PEAK)?) / 2e9;
        products.push(Found { product: product.name(), gflops, best_gflops, peak_gflops });
    }
    let line = |f: &Found| {
        let share = 100.0 * f.gflops / (f.peak_gflops * args.threads as f64);
        format!("{:20} {:7.1} GFLOP/s, {share:5.1} % of multiply-adds in registers", f.product, f.gflops)
    };
    let words: Vec<String> = products.iter().map(line).collect();
    print_found(0, args.json, &Answer { isa: isa.name(), threads: args.threads, products }, &words.join("\n"))
}
