//! Data sets from the outside: file formats and what is wrong with them, order, transforms, reading ahead.
use flate2::{Compression, write::GzEncoder};
use pipewright::{
    Error, ErrorKind, Result,
    data::{self, Data, Dataset, Field, Images, Loader, Sample, Sampler, Transform},
    tensor::{DType, Device},
};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Barrier},
};
use tempfile::TempDir;

/// The file `name` of `dir` with `bytes` in it.
fn file(dir: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut z = GzEncoder::new(Vec::new(), Compression::fast());
    z.write_all(bytes).unwrap();
    z.finish().unwrap()
}

/// An IDX file of unsigned bytes.
fn idx(shape: &[u32], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    shape.iter().for_each(|n| bytes.extend(n.to_be_bytes()));
    bytes.extend(values);
    bytes
}

/// The error of `r`, which must be of `kind` and say all of `parts`.
fn fails<T>(r: Result<T>, kind: ErrorKind, parts: &[&str]) {
    let e = r.err().expect("an error");
    let text = e.to_string();
    assert_eq!(e.kind(), kind, "{text}");
    parts.iter().for_each(|p| assert!(text.contains(p), "{text:?} does not say {p:?}"));
}

fn f32s(loader: &Loader, epoch: u64, ids: &[u64], field: &str) -> Vec<f32> {
    loader.load(epoch, ids).unwrap().field(field).unwrap().to_host().unwrap()
}

const PIXELS: [u8; 12] = [0, 51, 102, 153, 204, 255, 1, 2, 3, 4, 5, 6];

#[test]
fn idx_raw_and_gzip() {
    let dir = TempDir::new().unwrap();
    let (images, labels) = (idx(&[2, 2, 3], &PIXELS), idx(&[2], &[1, 0]));
    for (images, labels) in [(images.clone(), labels.clone()), (gzip(&images), gzip(&labels))] {
        let set = Images::from_idx("tiny", file(&dir, "i", &images), file(&dir, "l", &labels), 2).unwrap();
        assert_eq!((set.len(), set.classes(), set.name()), (2, Some(2), "tiny"));
        let batch = Loader::new(Arc::new(set), &[], &Device::reference(), 0, false).unwrap().load(0, &[1, 0]).unwrap();
        assert_eq!(batch.field("image").unwrap().shape(), [2, 2, 3, 1]);
        let got = batch.field("image").unwrap().to_host::<f32>().unwrap();
        let want: Vec<f32> = PIXELS[6..].iter().chain(&PIXELS[..6]).map(|&p| f32::from(p) / 255.0).collect();
        assert_eq!(got, want);
        assert_eq!(batch.field("label").unwrap().to_host::<i64>().unwrap(), [0, 1]);
    }
}

#[test]
fn idx_damaged() {
    let dir = TempDir::new().unwrap();
    let good = idx(&[2, 2, 3], &PIXELS);
    let labels = file(&dir, "labels", &idx(&[2], &[1, 0]));
    let images = |bytes: &[u8]| Images::from_idx("x", file(&dir, "images", bytes), &labels, 2);
    let data = |bytes: &[u8], parts: &[&str]| fails(images(bytes), ErrorKind::Data, &[&["images"], parts].concat());

    assert!(images(&good).is_ok());
    for cut in [0, 3] {
        data(&good[..cut], &["cut off", &format!("ends at byte {cut}"), "expected 16 bytes"]);
    }
    data(&good[..15], &["ends at byte 15", "expected 16 bytes"]);
    data(&good[..27], &["ends at byte 27", "expected 28 bytes"]);
    data(&[&good[..], &[9]].concat(), &["goes on after byte 28"]);
    data(&idx(&[2, 6], &PIXELS), &["byte 0", "00000802", "00000803"]);
    data(&[&[0, 0, 13, 3], &good[4..]].concat(), &["00000d03", "unsigned bytes"]);
    data(b"not an IDX file at all", &["magic number"]);
    data(&idx(&[u32::MAX; 3], &PIXELS), &["too large"]);
    data(&idx(&[2, 0, 3], &[]), &["no pixels"]);
    data(&gzip(&good[..20]), &["(uncompressed)", "ends at byte 20"]);
    data(&gzip(&[&good[..], &[9]].concat()), &["(uncompressed)", "goes on after byte 28"]);

    let z = gzip(&good);
    data(&z[..z.len() - 4], &["damaged gzip"]);
    data(&z[..15], &["damaged gzip"]);
    data(&[&z[..], b"more"].concat(), &["damaged gzip"]);
    let mut flipped = z.clone();
    let crc = z.len() - 8;
    flipped[crc] ^= 1;
    data(&flipped, &["damaged gzip"]);

    let images = file(&dir, "images", &good);
    let labels = |bytes: &[u8]| Images::from_idx("x", &images, file(&dir, "labels", bytes), 2);
    fails(labels(&idx(&[2], &[1, 2])), ErrorKind::Data, &["labels", "byte 9", "sample 1", "label 2", "below 2"]);
    fails(labels(&idx(&[3], &[1, 1, 1])), ErrorKind::Data, &["2 images", "3 labels"]);
    fails(Images::from_idx("x", dir.path().join("nowhere"), &images, 2), ErrorKind::Io, &["nowhere"]);
}

#[test]
fn images_in_memory() {
    let new = |pixels: usize, labels: &[i64]| Images::new("m", [1, 2, 1], 3, vec![0; pixels], labels.to_vec());
    assert_eq!(new(4, &[0, 2]).unwrap().len(), 2);
    fails(new(5, &[0, 2]), ErrorKind::Data, &["5 pixel values", "2 labels", "2 each"]);
    fails(new(4, &[0, 3]), ErrorKind::Data, &["label 3 of image 1", "below 3"]);
    fails(new(4, &[-1, 0]), ErrorKind::Data, &["label -1 of image 0"]);
    fails(Images::new("m", [usize::MAX, 2, 1], 3, vec![], vec![]), ErrorKind::Shape, &["too large"]);
}

#[test]
fn fashion_mnist_missing_and_altered() {
    let dir = TempDir::new().unwrap();
    fails(data::fashion_mnist_from(dir.path()), ErrorKind::Data, &["train-images-idx3-ubyte"]);
    file(&dir, "train-images-idx3-ubyte.gz", &gzip(&idx(&[1, 28, 28], &[7; 784])));
    file(&dir, "train-labels-idx1-ubyte", &idx(&[1], &[3]));
    let want = ["train-images-idx3-ubyte.gz", "MD5", "expected f4a8712d7a061bf5bd6d2ca38dc4d50a"];
    fails(data::fashion_mnist_from(dir.path()), ErrorKind::Data, &want);
}

/// The published files, where Debian's package is installed.
#[test]
fn fashion_mnist_real() {
    let dir = Path::new("/usr/share/datasets/fashion-mnist");
    if !dir.is_dir() {
        // Past the test runner, which keeps what a passing test prints to itself.
        let line = format!("skipped: {} is not there (apt-get install dataset-fashion-mnist)\n", dir.display());
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    }
    let data = data::fashion_mnist_from(dir).unwrap();
    assert_eq!((data.train.len(), data.train.classes()), (60_000, Some(10)));
    assert_eq!(data.test.as_ref().unwrap().len(), 10_000);
    let (train, test) = data.loaders(&Device::reference(), 0).unwrap();

    let ids: Vec<u64> = (0..60_000).collect();
    let (mut sum, mut squares, mut per_class) = (0.0, 0.0, [0; 10]);
    for ids in ids.chunks(1000) {
        let batch = train.load(0, ids).unwrap();
        for v in batch.field("image").unwrap().to_f64().unwrap() {
            (sum, squares) = (sum + v, squares + v * v);
        }
        for l in batch.field("label").unwrap().to_host::<i64>().unwrap() {
            per_class[l as usize] += 1;
        }
    }
    let n = 60_000.0 * 784.0;
    assert!((sum / n).abs() < 1e-3 && (squares / n - 1.0).abs() < 1e-3, "mean {}, square {}", sum / n, squares / n);
    assert_eq!(per_class, [6000; 10]);
    assert_eq!(test.unwrap().load(0, &[0, 9_999]).unwrap().field("label").unwrap().to_host::<i64>().unwrap(), [9, 5]);
}

/// `n` CIFAR-10 records: label i mod 10, all red pixels i, all green 100 + position mod 10, all blue 200.
fn cifar_records(n: usize) -> Vec<u8> {
    let record = |i: usize| {
        let planes = (0..1024).map(move |_| i as u8).chain((0..1024).map(|p| 100 + (p % 10) as u8)).chain([200; 1024]);
        [(i % 10) as u8].into_iter().chain(planes)
    };
    (0..n).flat_map(record).collect()
}

#[test]
fn cifar10_files() {
    let dir = TempDir::new().unwrap();
    fails(data::cifar10(dir.path()), ErrorKind::Data, &["data_batch_1.bin", "no such file", "cifar-10-binary.tar.gz"]);
    // The published archive's folder is found inside the one given.
    let inner = dir.path().join("cifar-10-batches-bin");
    fs::create_dir(&inner).unwrap();
    let records = cifar_records(10_000);
    let write = |name: &str, bytes: &[u8]| fs::write(inner.join(name), bytes).unwrap();
    (1..=5).for_each(|i| write(&format!("data_batch_{i}.bin"), &records));
    write("test_batch.bin", &records);

    let data = data::cifar10(dir.path()).unwrap();
    assert_eq!((data.train.len(), data.test.as_ref().unwrap().len()), (50_000, 10_000));
    let raw = Loader::new(data.train.clone(), &[], &Device::reference(), 0, true).unwrap();
    let image = f32s(&raw, 0, &[10_007], "image");
    assert_eq!(image.len(), 3072);
    assert_eq!(image[3 * 14..3 * 15], [7.0 / 255.0, 104.0 / 255.0, 200.0 / 255.0]);
    let (train, test) = data.loaders(&Device::reference(), 1).unwrap();
    assert_ne!(f32s(&train, 0, &[1, 2, 3], "image"), f32s(&train, 1, &[1, 2, 3], "image"));
    let test = test.unwrap();
    assert_eq!(f32s(&test, 0, &[1, 2, 3], "image"), f32s(&test, 1, &[1, 2, 3], "image"));

    let size = 3073 * 10_000;
    write("data_batch_3.bin", &records[..size - 1]);
    let want = ["data_batch_3.bin", "cut off in record 9999", "30729999 bytes", "expected 30730000"];
    fails(data::cifar10(dir.path()), ErrorKind::Data, &want);
    write("data_batch_3.bin", &records[..size - 3073]);
    fails(data::cifar10(dir.path()), ErrorKind::Data, &["data_batch_3.bin", "10000 records of 3073"]);
    write("data_batch_3.bin", &[&records[..], &[0]].concat());
    fails(data::cifar10(dir.path()), ErrorKind::Data, &["data_batch_3.bin", "too long"]);
    let mut wrong = records;
    wrong[2 * 3073] = 10;
    write("data_batch_3.bin", &wrong);
    fails(
        data::cifar10(dir.path()),
        ErrorKind::Data,
        &["data_batch_3.bin", "byte 6146", "record 2", "label 10", "below 10"],
    );
}

#[test]
fn cifar100_takes_the_fine_label() {
    let dir = TempDir::new().unwrap();
    let records =
        |n: usize| -> Vec<u8> { (0..n).flat_map(|i| [5, (i % 100) as u8].into_iter().chain([1; 3072])).collect() };
    file(&dir, "train.bin", &records(50_000));
    file(&dir, "test.bin", &records(10_000));
    let data = data::cifar100(dir.path()).unwrap();
    assert_eq!((data.train.len(), data.train.classes()), (50_000, Some(100)));
    let (train, _) = data.loaders(&Device::reference(), 0).unwrap();
    assert_eq!(train.load(0, &[399]).unwrap().field("label").unwrap().to_host::<i64>().unwrap(), [99]);
}

#[test]
fn sampler_permutes_and_resumes() {
    let s = Sampler::new(103, 8, 5, true).unwrap();
    assert_eq!((s.batches_per_epoch(), s.size(0).unwrap(), s.size(12).unwrap()), (13, 8, 7));
    let epoch = |s: &Sampler, e: u64| (0..13).flat_map(|i| s.ids(e, i).unwrap()).collect::<Vec<u64>>();
    let (first, second) = (epoch(&s, 0), epoch(&s, 1));
    assert_ne!(first, second);
    for mut order in [first.clone(), second.clone()] {
        order.sort_unstable();
        assert!(order.into_iter().eq(0..103));
    }
    // A fresh one, asked from any minibatch on and in any order, says the same.
    for number in (0..26).rev() {
        let fresh = Sampler::new(103, 8, 5, true).unwrap();
        let (e, i) = fresh.locate(number);
        assert_eq!(fresh.minibatch(number).unwrap(), (e, s.ids(e, i).unwrap()));
    }
    assert_ne!(epoch(&Sampler::new(103, 8, 6, true).unwrap(), 0), first);
    assert!(epoch(&Sampler::new(103, 8, 5, false).unwrap(), 3).into_iter().eq(0..103));
    assert_eq!(Sampler::new(3, 8, 0, true).unwrap().ids(0, 0).unwrap().len(), 3);

    fails(s.ids(0, 13), ErrorKind::Data, &["minibatch 13", "epoch of 13"]);
    fails(Sampler::new(0, 8, 0, true), ErrorKind::Data, &["no samples"]);
    fails(Sampler::new(5, 0, 0, true), ErrorKind::Config, &["batch", "got 0"]);
}

/// The sample's id, as f32[2,3,1] and as i64[].
struct Ids {
    fields: Vec<Field>,
    len: usize,
    on_read: Box<dyn Fn(usize) -> Result<()> + Send + Sync>,
}

impl Ids {
    fn new(len: usize, on_read: impl Fn(usize) -> Result<()> + Send + Sync + 'static) -> Arc<Ids> {
        let fields = vec![Field::new("x", [2, 3, 1], DType::F32), Field::new("id", [], DType::I64)];
        Arc::new(Ids { fields, len, on_read: Box::new(on_read) })
    }
}

impl Dataset for Ids {
    fn name(&self) -> &str {
        "ids"
    }
    fn len(&self) -> usize {
        self.len
    }
    fn fields(&self) -> &[Field] {
        &self.fields
    }
    fn read(&self, index: usize, out: &mut Sample) -> Result<()> {
        (self.on_read)(index)?;
        out.put(0, &[index as f32; 6])?;
        out.put(1, &[index as i64])
    }
}

fn loader(set: Arc<Ids>) -> Loader {
    Loader::new(set, &[], &Device::reference(), 0, true).unwrap()
}

#[test]
fn batches_and_their_parts() {
    let l = loader(Ids::new(10, |_| Ok(())));
    let batch = l.load(0, &[9, 0, 4]).unwrap();
    assert_eq!((batch.len(), batch.is_empty()), (3, false));
    assert_eq!(batch.field("id").unwrap().to_host::<i64>().unwrap(), [9, 0, 4]);
    let part = batch.slice(1, 2).unwrap();
    assert_eq!((part.ids.as_slice(), part.field("x").unwrap().shape()), (&[0, 4][..], &[2, 2, 3, 1][..]));
    assert_eq!(part.field("id").unwrap().to_host::<i64>().unwrap(), [0, 4]);
    assert!(part.field("id").unwrap().shares_storage(batch.field("id").unwrap()));
    fails(batch.slice(2, 2), ErrorKind::Shape, &["2 samples from 2 on", "batch of 3"]);
    fails(batch.slice(usize::MAX, 2), ErrorKind::Shape, &["batch of 3"]);
    fails(batch.field("y"), ErrorKind::Data, &["\"y\"", "\"x\", \"id\""]);
    fails(l.load(0, &[3, 10]), ErrorKind::Data, &["sample 10", "\"ids\"", "10 samples"]);
    fails(l.load(0, &[u64::MAX]), ErrorKind::Data, &["10 samples"]);
    assert!(l.load(0, &[]).unwrap().is_empty());
}

/// A data set whose `read` is the function given.
struct Faulty(Vec<Field>, fn(&mut Sample) -> Result<()>);

impl Dataset for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }
    fn len(&self) -> usize {
        2
    }
    fn fields(&self) -> &[Field] {
        &self.0
    }
    fn read(&self, _: usize, out: &mut Sample) -> Result<()> {
        (self.1)(out)
    }
}

#[test]
fn what_a_dataset_may_not_do() {
    let fields = || vec![Field::new("a", [2], DType::F32), Field::new("b", [], DType::I64)];
    fn load(fields: Vec<Field>, f: fn(&mut Sample) -> Result<()>) -> Result<()> {
        Loader::new(Arc::new(Faulty(fields, f)), &[], &Device::reference(), 0, true)?.load(0, &[0, 1]).map(drop)
    }
    let at = ["sample 0", "\"faulty\""];
    let with = |parts: &[&'static str]| [&at[..], parts].concat();
    fails(load(fields(), |s| s.put(0, &[1.0f32; 2])), ErrorKind::Data, &with(&["field \"b\" was not written"]));
    fails(
        load(fields(), |s| s.put(0, &[1.0f32; 3])),
        ErrorKind::Shape,
        &with(&["field \"a\"", "2 elements", "3 were written"]),
    );
    fails(load(fields(), |s| s.put(0, &[1.0f64; 2])), ErrorKind::DType, &with(&["field \"a\" is f32", "f64"]));
    fails(load(fields(), |s| s.put(2, &[1i64])), ErrorKind::Data, &with(&["field number 2", "2 fields"]));
    let twice = vec![Field::new("a", [], DType::F32), Field::new("a", [], DType::F32)];
    fails(load(twice, |_| Ok(())), ErrorKind::Data, &["two fields are called \"a\""]);
    let huge = vec![Field::new("a", [usize::MAX, 2], DType::F32)];
    fails(load(huge, |_| Ok(())), ErrorKind::Shape, &["\"a\"", "too large"]);
    let empty = Loader::new(Ids::new(0, |_| Ok(())), &[], &Device::reference(), 0, true);
    fails(empty, ErrorKind::Data, &["no samples", "\"ids\""]);
}

#[test]
fn transforms_must_fit() {
    let new = |t: Transform| Loader::new(Ids::new(4, |_| Ok(())), &[t], &Device::reference(), 0, false);
    fails(
        new(Transform::horizontal_flip("y")),
        ErrorKind::Data,
        &["\"horizontal-flip\"", "no field \"y\"", "\"x\", \"id\""],
    );
    fails(new(Transform::horizontal_flip("id")), ErrorKind::DType, &["f32 expected", "i64"]);
    fails(new(Transform::normalise("x", &[0.0; 3], &[1.0; 3])), ErrorKind::Shape, &["1 channels", "3 means"]);
    fails(new(Transform::normalise("x", &[0.0], &[0.0])), ErrorKind::Data, &["positive standard deviations"]);
    fails(new(Transform::random_crop("x", 2)), ErrorKind::Shape, &["2 pixels of padding", "2×3"]);
    let custom = Transform::custom("mine", "x", |_, _, _| Err(Error::data("no")));
    fails(new(custom).unwrap().load(0, &[3]), ErrorKind::Data, &["no", "\"mine\"", "sample 3"]);
    let other =
        Data::new(Faulty(vec![], |_| Ok(()))).with_test(Faulty(vec![Field::new("a", [], DType::F32)], |_| Ok(())));
    fails(other.loaders(&Device::reference(), 0), ErrorKind::Data, &["tested with"]);
}

#[test]
fn transforms_depend_on_seed_epoch_and_sample_only() {
    let set = Arc::new(Images::new("i", [6, 6, 2], 2, (0..144).collect(), vec![0, 1]).unwrap());
    let all = [
        Transform::random_crop("image", 2),
        Transform::horizontal_flip("image"),
        Transform::custom("noise", "image", |x, shape, random| {
            assert_eq!(shape, [6, 6, 2]);
            x[0] = random.unit() + random.below(9) as f32;
            Ok(())
        })
        .train_only(),
        Transform::normalise("image", &[0.5, 0.25], &[0.5, 2.0]),
    ];
    let load = |seed, train, epoch, ids: &[u64]| {
        f32s(&Loader::new(set.clone(), &all, &Device::reference(), seed, train).unwrap(), epoch, ids, "image")
    };
    let both = load(1, true, 3, &[0, 1]);
    assert_eq!(both[72..], load(1, true, 3, &[1]));
    assert_eq!(both[..72], load(1, true, 3, &[1, 0])[72..]);
    let varied: Vec<_> = (0..8).map(|epoch| load(1, true, epoch, &[0])).collect();
    assert!((1..8).all(|e| varied[e] != varied[0]));
    assert_ne!(load(2, true, 3, &[0, 1]), both);

    let plain = load(1, false, 3, &[0]);
    assert_eq!(plain, load(2, false, 9, &[0]));
    for (i, v) in plain.iter().enumerate() {
        let x = i as f32 / 255.0;
        assert_eq!(*v, if i % 2 == 0 { (x - 0.5) / 0.5 } else { (x - 0.25) / 2.0 });
    }
}

#[test]
fn crops_and_flips_take_every_value() {
    let set = Arc::new(Images::new("i", [4, 4, 1], 1, (1..17).collect(), vec![0]).unwrap());
    let of = |t: Transform| {
        let l = Loader::new(set.clone(), &[t], &Device::reference(), 0, true).unwrap();
        let mut seen: Vec<Vec<u8>> = (0..400)
            .map(|epoch| f32s(&l, epoch, &[0], "image").iter().map(|v| (v * 255.0).round() as u8).collect())
            .collect();
        seen.sort();
        seen.dedup();
        seen
    };
    assert_eq!(of(Transform::random_crop("image", 1)).len(), 9);
    assert_eq!(of(Transform::random_crop("image", 0)), [(1..17).collect::<Vec<u8>>()]);
    let flipped = of(Transform::horizontal_flip("image"));
    assert_eq!(flipped.len(), 2);
    assert_eq!((&flipped[0][..5], &flipped[1][..5]), (&[1, 2, 3, 4, 5][..], &[4, 3, 2, 1, 8][..]));
}

#[test]
fn reading_ahead_is_the_same() {
    let l = loader(Ids::new(10, |_| Ok(())));
    let s = Sampler::new(10, 4, 3, true).unwrap();
    let got: Vec<Vec<u64>> = l.prefetch(&s, 2..9).unwrap().map(|b| b.unwrap().ids).collect();
    let want: Vec<Vec<u64>> = (2..9).map(|n| s.minibatch(n).unwrap().1).collect();
    assert_eq!(got, want);
    assert_eq!(got.iter().map(Vec::len).collect::<Vec<_>>(), [2, 4, 4, 2, 4, 4, 2]);
    assert_eq!(l.prefetch(&s, 5..5).unwrap().count(), 0);
}

#[test]
fn an_error_or_a_panic_while_reading_ahead_is_the_last_item() {
    let s = Sampler::new(10, 2, 0, false).unwrap();
    let broken = Ids::new(10, |i| if i == 5 { Err(Error::data("unreadable")) } else { Ok(()) });
    let mut ahead = loader(broken).prefetch(&s, 0..5).unwrap();
    assert!(ahead.next().unwrap().is_ok() && ahead.next().unwrap().is_ok());
    fails(ahead.next().unwrap(), ErrorKind::Data, &["unreadable", "sample 5", "minibatch 2"]);
    assert!(ahead.next().is_none());

    let panics = Ids::new(10, |i| if i == 3 { panic!("boom {i}") } else { Ok(()) });
    let mut ahead = loader(panics).prefetch(&s, 0..5).unwrap();
    assert!(ahead.next().unwrap().is_ok());
    fails(ahead.next().unwrap(), ErrorKind::Data, &["panicked: boom 3", "minibatch 1"]);
    assert!(ahead.next().is_none());

    let short = loader(Ids::new(9, |_| Ok(())));
    let last = short.prefetch(&s, 0..5).unwrap().last().unwrap();
    fails(last, ErrorKind::Data, &["sample 9", "9 samples"]);
}

/// Dropping does not wait: neither for a thread that has nobody to give to, nor for one that reads.
#[test]
fn dropping_does_not_hang() {
    let s = Sampler::new(10, 1, 0, false).unwrap();
    let mut full = loader(Ids::new(10, |_| Ok(()))).prefetch(&s, 0..1000).unwrap();
    assert!(full.next().unwrap().is_ok());
    drop(full);

    let gate = Arc::new(Barrier::new(2));
    let inside = gate.clone();
    let reading = loader(Ids::new(10, move |_| {
        inside.wait();
        Ok(())
    }));
    drop(reading.prefetch(&s, 0..10).unwrap());
    // Lets the thread end; it is still at its first sample.
    gate.wait();
}

#[test]
fn synthetic_images_are_learnable_and_reproducible() {
    let data = data::synthetic([8, 8, 3], 4, 200, 100, 7).unwrap();
    let (train, test) = data.loaders(&Device::reference(), 0).unwrap();
    let (a, b) = (train.load(0, &[5, 6]).unwrap(), train.load(9, &[6]).unwrap());
    assert_eq!(
        a.field("image").unwrap().to_host::<f32>().unwrap()[192..],
        b.field("image").unwrap().to_host::<f32>().unwrap()
    );

    // The nearest class mean of the training set classifies the test set.
    let all = |l: &Loader, n: u64| {
        let b = l.load(0, &(0..n).collect::<Vec<_>>()).unwrap();
        (b.field("image").unwrap().to_host::<f32>().unwrap(), b.field("label").unwrap().to_host::<i64>().unwrap())
    };
    let (images, labels) = all(&train, 200);
    let mut means = vec![vec![0.0f32; 192]; 4];
    for (x, &l) in images.chunks(192).zip(&labels) {
        let n = labels.iter().filter(|&&m| m == l).count() as f32;
        means[l as usize].iter_mut().zip(x).for_each(|(m, v)| *m += v / n);
    }
    let (images, labels) = all(&test.unwrap(), 100);
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f32>();
    let nearest = |x: &[f32]| (0..4).min_by(|&a, &b| far(x, &means[a]).total_cmp(&far(x, &means[b]))).unwrap();
    let right = images.chunks(192).zip(&labels).filter(|(x, l)| nearest(x) == **l as usize).count();
    assert!(right >= 95, "{right} of 100");
}

#[test]
fn synthetic_tokens_follow_a_rule() {
    let data = data::synthetic_tokens(50, 30, 20, 5, 1).unwrap();
    let (train, _) = data.loaders(&Device::reference(), 0).unwrap();
    let batch = train.load(0, &(0..20).collect::<Vec<_>>()).unwrap();
    let of = |name: &str| batch.field(name).unwrap().to_host::<i64>().unwrap();
    let (tokens, target) = (of("tokens"), of("target"));
    assert_eq!(batch.field("tokens").unwrap().shape(), [20, 50]);
    assert!(tokens.iter().all(|t| (0..30).contains(t)));
    assert!((0..20).all(|r| tokens[r * 50 + 1..(r + 1) * 50] == target[r * 50..(r + 1) * 50 - 1]));
    let follow = tokens.iter().zip(&target).filter(|(t, n)| (5 * **t + 3) % 30 == **n).count();
    assert!((820..940).contains(&follow), "{follow} of 1000");
}

#[test]
fn data_sets_by_name() {
    let d = data::by_name("synthetic:5x6x2:7:11:3").unwrap();
    assert_eq!((d.train.len(), d.test.as_ref().unwrap().len(), d.train.classes()), (11, 3, Some(7)));
    assert_eq!(d.train.fields()[0], Field::new("image", [5, 6, 2], DType::F32));
    assert_eq!(data::by_name("synthetic-tokens:9").unwrap().train.fields()[1].shape, [9]);
    fails(data::by_name("mnist"), ErrorKind::Config, &["\"mnist\"", "fashion-mnist, cifar10", "synthetic[:HxWxC"]);
    for wrong in ["synthetic:5x6", "synthetic:5x6x2:many", "synthetic:5x6x2:1:1:1:1", "fashion-mnist:1", "synthetic:"] {
        fails(data::by_name(wrong), ErrorKind::Config, &[wrong, "expected"]);
    }
    fails(data::by_name("synthetic:0x1x1"), ErrorKind::Config, &["1 or more"]);
    fails(data::by_name("synthetic:1x1x1:0"), ErrorKind::Config, &["1 or more"]);
    fails(data::by_name("synthetic-tokens:0"), ErrorKind::Config, &["1 or more"]);
    fails(data::by_name("synthetic-tokens:1000000000"), ErrorKind::Config, &["1000000000 tokens", "4 GiB at most"]);
    for many in ["4294967297", "10000000000000", "18446744073709551615"] {
        for name in [format!("synthetic:1x1x1:2:{many}:1"), format!("synthetic:1x1x1:2:1:{many}")] {
            fails(data::by_name(&name), ErrorKind::Data, &["at most 4294967296 samples expected", many]);
        }
        let tokens = format!("synthetic-tokens:2:2:{many}");
        fails(data::by_name(&tokens), ErrorKind::Data, &["synthetic-tokens", "at most 4294967296", many]);
    }
}
