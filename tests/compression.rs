//! Compressed gradients and edges mean what their definitions say: beside plain loops over the whole graph.
mod closed;
mod plainly;
mod small;

use closed::*;
use pipewright::{
    Result,
    autograd::{Cx, Mask, Op, Outputs, Saved, Sink, Var},
    layers::*,
    optim::Sgd,
    pipeline::{
        reduce::{AllReduce, Compression},
        schedule::Kind,
        transport::threads::Options,
    },
    tensor::{DType, Philox, Tensor},
};
use small::*;
use std::cell::RefCell;

/// Cuts and the workers of each stage.
const REPLICATED: &[(&[&str], &[usize])] =
    &[(&[], &[2]), (&[], &[3]), (&["linear2"], &[2, 1]), (&["linear2"], &[1, 2]), (&["relu1", "linear3"], &[1, 3, 2])];

/// Losses, and a hash of the weights.
type Made = (Vec<f64>, String);

/// The closed form and the run, for numbers of minibatches that no number of workers divides and drains within rounds.
fn both(
    (cuts, replicas): (&[&str], &[usize]),
    compression: Compression,
    all_reduce: AllReduce,
    new: &dyn Fn() -> Box<Combine>,
) -> Result<Vec<[Made; 2]>> {
    let g = small()?;
    let plan = cut_on(&g, cuts, replicas)?;
    let shape = plan.shape()?;
    let reads = |r: usize, j: usize| (j / replicas[r]).saturating_sub(shape.warm_up()[r]);
    let mut all = Vec::new();
    for (n, drains) in [(2, &[][..]), (13, &[4, 5, 8])] {
        let sizes: Vec<usize> = (0..n).map(|j| SIZE - j % 3).collect();
        let case = Case { plan: &plan, opt: &sgd(), sizes: &sizes, drains, reads: &reads, combine: &*new() };
        let (losses, weights) = closed_form(&g, &case)?;
        let mut recipe = recipe(g.clone(), sgd(), Kind::PipeDream, SIZE, 8);
        (recipe.settings.compress_gradients, recipe.settings.all_reduce) = (compression, all_reduce);
        let got = train(&recipe, &plan, &sizes, drains, Options::default())?;
        let got_losses = got.losses.iter().map(|l| l.loss).collect();
        all.push([(losses, sha(&g, &weights)?), (got_losses, got.sha)]);
    }
    Ok(all)
}

fn rounded(t: &Tensor) -> Result<Tensor> {
    t.cast(DType::BF16)?.cast(DType::F64)
}

#[test]
fn rounded_gradients_equal_their_closed_form() -> Result<()> {
    for &plan in REPLICATED {
        let combine = |p: usize, grads: &[(usize, Tensor)]| {
            let sent = grads.iter().map(|(n, g)| Ok((*n, rounded(g)?))).collect::<Result<Vec<_>>>()?;
            rounded(&mean(p, &sent)?)
        };
        for [expected, got] in both(plan, Compression::Bf16, AllReduce::Auto, &|| Box::new(combine))? {
            assert_eq!(expected, got, "{plan:?}");
        }
    }
    Ok(())
}

/// In pairs at distance 2, then 1: each half of a gradient is added up in its own order.
#[test]
fn halving_equals_its_closed_form() -> Result<()> {
    let pair = |p: usize, grads: &[(usize, Tensor)], at: [usize; 2]| -> Result<Option<(usize, Tensor)>> {
        let of: Vec<_> = at.iter().filter_map(|&i| grads.get(i).cloned()).collect();
        let samples = of.iter().map(|(n, _)| n).sum();
        if of.is_empty() { Ok(None) } else { Ok(Some((samples, mean(p, &of)?))) }
    };
    let combine = move |p: usize, grads: &[(usize, Tensor)]| {
        let halves = [pair(p, grads, [0, 2])?, pair(p, grads, [1, 3])?];
        mean(p, &halves.into_iter().flatten().collect::<Vec<_>>())
    };
    for plan in [(&[][..], &[4][..]), (&["linear2"], &[1, 4])] {
        for [expected, got] in both(plan, Compression::None, AllReduce::Halving, &|| Box::new(combine))? {
            assert_eq!(expected, got, "{plan:?}");
        }
    }
    Ok(())
}

type Matrix = Vec<Vec<f64>>;

fn matrix(values: &[f64], columns: usize) -> Matrix {
    values.chunks(columns).map(<[f64]>::to_vec).collect()
}

fn transposed(a: &Matrix) -> Matrix {
    (0..a[0].len()).map(|c| a.iter().map(|row| row[c]).collect()).collect()
}

fn product(a: &Matrix, b: &Matrix) -> Matrix {
    let b = transposed(b);
    a.iter().map(|row| b.iter().map(|col| row.iter().zip(col).map(|(x, y)| x * y).sum()).collect()).collect()
}

/// `a + scale · b`.
fn plus(a: &Matrix, scale: f64, b: &Matrix) -> Matrix {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(x, y)| x + scale * y).collect()).collect()
}

/// Columns orthonormal, by Gram and Schmidt.
fn orthonormal(a: &Matrix) -> Matrix {
    let mut done: Matrix = Vec::new();
    for column in transposed(a) {
        let mut v = column;
        for _ in 0..2 {
            for u in &done {
                let along: f64 = u.iter().zip(&v).map(|(x, y)| x * y).sum();
                v.iter_mut().zip(u).for_each(|(x, y)| *x -= along * y);
            }
        }
        let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt();
        done.push(v.into_iter().map(|x| x / norm).collect());
    }
    transposed(&done)
}

/// A parameter's two sides, if its factors are smaller than it.
fn sides(shape: &[usize], rank: usize) -> Option<(usize, usize)> {
    let &[a, b] = shape else { return None };
    ((a + b) * rank < a * b).then_some((a, b))
}

/// Algorithms 1 and 2 of Vogels et al. by plain loops, and nothing is lost: what was not sent is sent later.
#[test]
fn powersgd_equals_its_closed_form() -> Result<()> {
    let g = small()?;
    for plan in [(&[][..], &[2][..]), (&[], &[3]), (&["linear2"], &[2, 1]), (&["linear2"], &[1, 2])] {
        let rank = 2;
        // Slots are those of the stage that is replicated.
        let (stage, first) =
            if plan.1[0] == 1 { (1, g.nodes()[g.find("linear2").expect("there")].params[0]) } else { (0, 0) };
        let shapes: Vec<Vec<usize>> = g.params().iter().map(|p| p.spec.shape.clone()).collect();
        let replicas = plan.1[stage];
        let new = || -> Box<Combine> {
            let shapes = shapes.clone();
            // Q and the errors of all workers, by parameter.
            let state = RefCell::new(vec![None::<(Matrix, Vec<Matrix>)>; shapes.len()]);
            Box::new(move |p, grads| {
                let Some((rows, columns)) = sides(&shapes[p], rank) else { return mean(p, grads) };
                let slot = p - first;
                let mut state = state.borrow_mut();
                let (q, errors) = state[p].get_or_insert_with(|| {
                    let draw = Philox::new(7, 0, &format!("powersgd {stage} {slot}"));
                    let q = (0..rank).map(|c| draw.normal(c as u64, columns).collect()).collect();
                    (transposed(&q), vec![vec![vec![0.0; columns]; rows]; replicas])
                });
                let samples: usize = grads.iter().map(|(n, _)| n).sum();
                let mut m = Vec::new();
                for (worker, (_, g)) in grads.iter().enumerate() {
                    m.push(plus(&matrix(&g.to_f64()?, columns), 1.0, &errors[worker]));
                }
                let average = |all: Vec<Matrix>| {
                    let zero = vec![vec![0.0; all[0][0].len()]; all[0].len()];
                    let weight = |i: usize| grads[i].0 as f64 / samples as f64;
                    all.iter().enumerate().fold(zero, |sum, (i, a)| plus(&sum, weight(i), a))
                };
                let p_hat = orthonormal(&average(m.iter().map(|m| product(m, q)).collect()));
                let own: Vec<Matrix> = m.iter().map(|m| product(&transposed(m), &p_hat)).collect();
                *q = average(own.clone());
                for (worker, (m, own)) in m.iter().zip(&own).enumerate() {
                    errors[worker] = plus(m, -1.0, &product(&p_hat, &transposed(own)));
                }
                let whole: Vec<f64> = product(&p_hat, &transposed(q)).concat();
                Tensor::from_host(&whole, &shapes[p], grads[0].1.device())
            })
        };
        for [(expected, _), (got, _)] in both(plan, Compression::PowerSgd { rank }, AllReduce::Auto, &new)? {
            assert_eq!(expected.len(), got.len(), "{plan:?}");
            for (i, (a, b)) in expected.iter().zip(got).enumerate() {
                assert!((a - b).abs() <= 1e-8 * a.abs(), "{plan:?}: minibatch {i}: {a} expected, got {b}");
            }
        }
    }
    Ok(())
}

/// Rounds to bf16, there and back.
struct Round;

impl Op for Round {
    fn name(&self) -> &'static str {
        "round"
    }
    fn backward(&self, _: &mut Saved, dy: &[Option<Tensor>], _: Mask, dx: &mut Sink) -> Result<()> {
        let Some(dy) = &dy[0] else { return Ok(()) };
        dx.put(0, rounded(dy)?)
    }
}

impl Layer for Round {
    fn kind(&self) -> &'static str {
        "round"
    }
    fn forward(&self, cx: &mut Cx, x: &[Var]) -> Result<Outputs> {
        let x = single(x)?;
        let y = rounded(x.value())?;
        cx.record(Round, &[x], vec![y], &[])
    }
    fn examples() -> Vec<Example> {
        Vec::new()
    }
}

/// A chain that is rounded before the layers with these numbers.
fn chain(rounds: &[usize]) -> Result<Graph> {
    let mut g = Graph::new();
    let (x, label) = (g.input("x", [6, 6, 2]), g.label("label"));
    let mut a = g.add(Flatten, [x])?;
    for (i, [from, to]) in [[72, 9], [9, 7], [7, 5]].into_iter().enumerate() {
        if rounds.contains(&i) {
            a = g.add(Round, [a])?;
        }
        a = g.add(Linear::new(from, to), [a])?;
        a = g.add(Tanh, [a])?;
    }
    if rounds.contains(&3) {
        a = g.add(Round, [a])?;
    }
    let y = g.add(Linear::new(5, 3), [a])?;
    let loss = g.add(CrossEntropy::new(), [y, label])?;
    g.with_loss(loss)
}

#[test]
fn rounded_edges_are_layers_that_round() -> Result<()> {
    let sizes = [12, 12, 7, 12, 2];
    for (cuts, rounds) in [(&["linear2"][..], &[1][..]), (&["linear2", "linear4"], &[1, 3]), (&["linear1"], &[])] {
        let plain = recipe(chain(rounds)?, sgd(), Kind::Sequential, 12, 4);
        let mut expected = train(&plain, &cut(&plain.graph, &[])?, &sizes, &[], Options::default())?;
        expected.versions.clear();
        for kind in [Kind::GPipe, Kind::OneFOneB] {
            let mut recipe = recipe(chain(&[])?, sgd(), kind, 12, 4);
            recipe.settings.compress_edges = true;
            for synchronous in [false, true] {
                let plan = cut(&recipe.graph, cuts)?;
                let mut got = train(&recipe, &plan, &sizes, &[], Options { synchronous })?;
                got.versions.clear();
                assert_eq!(expected, got, "{kind} cut before {cuts:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_is_refused() -> Result<()> {
    let g = small()?;
    for (all_reduce, replicas, deterministic, words) in [
        (AllReduce::Halving, &[3][..], false, "2, 4, 8, … workers, one is on 3"),
        (AllReduce::TwoLevel, &[4], false, "two or more hosts"),
        (AllReduce::Halving, &[2], true, "direct expected in a deterministic run"),
    ] {
        let mut recipe = recipe(g.clone(), Sgd::new(0.1), Kind::PipeDream, SIZE, 8);
        (recipe.settings.all_reduce, recipe.settings.deterministic) = (all_reduce, deterministic);
        let failed = train(&recipe, &cut_on(&g, &[], replicas)?, &[SIZE; 4], &[], Options::default());
        let said = failed.expect_err("no such sums").to_string();
        assert!(said.contains(words), "{words:?} expected in {said:?}");
    }
    Ok(())
}
