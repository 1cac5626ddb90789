//! Fashion-MNIST (Xiao et al. 2017): 60,000 and 10,000 grey images of 28×28, ten classes of clothing.
use super::{
    Data, Images, Transform,
    idx::{Idx, find, join},
    root,
};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// Where Debian's package puts it.
const DEBIAN: &str = "/usr/share/datasets/fashion-mnist";

/// The stem of each file and the MD5 sum of its uncompressed contents: images and labels, of training and of test.
const FILES: [[(&str, &str); 2]; 2] = [
    [
        ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
    ],
    [
        ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
    ],
];

/// Fashion-MNIST, from `$PIPEWRIGHT_DATA/fashion-mnist` or where Debian's package dataset-fashion-mnist puts it. Fields:
/// `image: f32[28,28,1]`, normalised, and `label: i64[]`.
///
/// # Errors
/// If it is not there, or damaged.
pub fn fashion_mnist() -> Result<Data> {
    let named = root()?.map(|r| r.join("fashion-mnist"));
    let places: Vec<PathBuf> = named.into_iter().chain([DEBIAN.into()]).collect();
    match places.iter().find(|p| p.is_dir()) {
        Some(dir) => fashion_mnist_from(dir),
        None => Err(Error::data(format!(
            "Fashion-MNIST is not in {}; install it with `apt-get install dataset-fashion-mnist`, or put its four files into \
             the folder fashion-mnist of a folder that the environment variable PIPEWRIGHT_DATA names",
            places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" or ")
        ))),
    }
}

/// Fashion-MNIST from the folder `dir`; see [`fashion_mnist`].
///
/// # Errors
/// If one of the four files is missing, or is not the published one by its MD5 sum.
pub fn fashion_mnist_from(dir: impl AsRef<Path>) -> Result<Data> {
    let read = |name: &str, [images, labels]: [(&str, &str); 2]| -> Result<Images> {
        let file = |(stem, md5), axes| Idx::read(&find(dir.as_ref(), stem)?, axes)?.expect_md5(md5);
        join(name, file(images, 3)?, file(labels, 1)?, 10)
    };
    let [train, test] = FILES;
    // Mean and standard deviation of the training images.
    let normalise = Transform::normalise("image", &[0.2860], &[0.3530]);
    Ok(Data::new(read("fashion-mnist", train)?).with_test(read("fashion-mnist test", test)?).with_transform(normalise))
}
