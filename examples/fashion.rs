//! A small network on Fashion-MNIST, on two in-process workers, or on the ranks that `mpirun` starts.
use pipewright::prelude::*;

fn main() -> Result<()> {
    let mut g = Graph::new();
    let image = g.input("image", [28, 28, 1]);
    let label = g.label("label");
    let features = Sequential::new()
        .then(Conv2d::new(1, 32, 3).padding(1))
        .then(Relu)
        .then(MaxPool2d::new(2))
        .then(Flatten)
        .then(Linear::new(14 * 14 * 32, 64))
        .then(Relu)
        .then(Linear::new(64, 10));
    let x = g.chain(features, image)?;
    let loss = g.add(CrossEntropy::new(), [x, label])?;
    Trainer::new(g, loss, data::fashion_mnist()?)
        .optimizer(Sgd::new(0.05).momentum(0.9))
        .batch_size(128)
        .epochs(1)
        .schedule(Schedule::PipeDream)
        .workers(2)
        .run()?
        .print();
    Ok(())
}
