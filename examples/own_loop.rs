//! A training loop of one's own on Fashion-MNIST: it stops early, keeps the best weights, and predicts. Every worker runs it.
use pipewright::prelude::*;

fn main() -> Result<()> {
    let data = data::fashion_mnist()?;
    let input = models::Input::Image([28, 28, 1]);
    let model = models::by_name("lenet", &models::ModelConfig { input, classes: 10, width: None })?;
    let logits = model.logits;
    let (best, scores) = Trainer::new(model.graph, model.loss, data)
        .optimizer(Adam::new(0.001))
        .batch_size(128)
        .schedule(Schedule::OneFOneB)
        .workers(2)
        .out("runs/own_loop")
        .run_with(|session| {
            let (mut best, mut without_progress) = (0.0, 0);
            while without_progress < 2 && session.epoch() < 20 && !session.interrupted() {
                while let Some(batch) = session.next_batch()? {
                    session.step(&batch)?;
                }
                let report = session.end_epoch()?;
                session.say(|| report.summary());
                let accuracy = report.test_accuracy.unwrap_or(0.0);
                without_progress += 1;
                if accuracy > best {
                    (best, without_progress) = (accuracy, 0);
                    session.keep_best()?;
                }
            }
            let images = session.test_samples(&[0, 1, 2])?;
            Ok((best, session.predict(&images, logits)?.to_f64()?))
        })?;
    println!("test accuracy {:.2} %; scores of the first test images: {scores:.1?}", 100.0 * best);
    Ok(())
}
