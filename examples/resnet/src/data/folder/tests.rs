use super::*;
use crate::data::order::{Stream, rng};
use image::{Rgb, RgbImage};
use tempfile::TempDir;

const PLAIN: Augmentation = Augmentation { min_crop: 1.0, jitter: 0.0, flip: false };

/// Images of one color each, in files of these names.
fn place(files: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (number, file) in files.iter().enumerate() {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        let color = Rgb([40 * (number % 6) as u8, 100, 200]);
        RgbImage::from_pixel(12, 10, color).save(path).expect("saved");
    }
    folder
}

fn scan(folder: &TempDir, share: f64) -> Result<Folder> {
    Folder::scan(folder.path(), share, PLAIN)
}

#[track_caller]
fn refused(folder: &TempDir, expected: &[&str]) {
    let error = format!("{:#}", scan(folder, 0.5).map(drop).expect_err("refused"));
    assert!(expected.iter().all(|part| error.contains(part)), "{error}");
}

#[test]
fn folders_are_classes_and_images_come_out_normalized() {
    let folder = place(&["train/b/1.png", "train/a/deep/2.jpg", "val/a/3.PNG", "val/b/4.png"]);
    fs::write(folder.path().join("train/a/notes.txt"), "no image").expect("written");
    let found = scan(&folder, 0.5).expect("images");
    assert_eq!(found.classes(), ["a", "b"]);
    assert_eq!((found.train_images(), found.validation_images()), (2, 2));
    let mut pixels = vec![0.0; 3 * 4 * 4];
    assert_eq!(found.validation(1, 4, &mut pixels).expect("an image"), 1);
    assert_eq!(super::super::denormalize(&pixels)[..3], [120, 100, 200]);
    let mut rng = rng(1, Stream::Augmentation, 0);
    assert_eq!(found.train(1, 4, &mut rng, &mut pixels).expect("an image"), 1);
    assert_eq!(super::super::denormalize(&pixels)[45..], [0, 100, 200]);
}

#[test]
fn a_share_of_each_class_is_held_out_and_stays_so_when_images_come() {
    let names: Vec<String> = (0..20).map(|number| format!("{}/{number}.png", number % 2)).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    let held_out = |names: &[&str]| -> Vec<PathBuf> {
        let found = scan(&place(names), 0.3).expect("images");
        assert!(found.validation.iter().all(|file| !found.train.contains(file)));
        found.validation.into_iter().map(|file| file.path).collect()
    };
    let before = held_out(&names);
    assert_eq!(before.len(), 6);
    assert_eq!(before.iter().filter(|path| path.starts_with("1")).count(), 3);
    names.push("1/new.png");
    let after = held_out(&names);
    assert!(before.iter().filter(|path| !after.contains(path)).count() <= 1, "{after:?}");
}

#[test]
fn folders_that_are_no_classes_are_refused_by_name() {
    refused(&place(&["cat/1.png", "cat/2.png"]), &["the single class cat"]);
    refused(&place(&["1.png"]), &["found no images", "a folder for each class"]);
    refused(&place(&["cat/1.png", "dog/1.png", "dog/2.png"]), &["the class cat has one image"]);
    let empty = place(&["cat/1.png", "cat/2.png"]);
    fs::create_dir(empty.path().join("dog")).expect("created");
    refused(&empty, &["the class dog has no images", "dog"]);
    refused(
        &place(&["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"]),
        &["other classes", "b is only in the first"],
    );
    refused(&place(&["val/a/1.png", "val/b/1.png"]), &["none that is called train"]);
    let error = Folder::scan(Path::new("no/such"), 0.5, PLAIN).map(drop).expect_err("none");
    assert!(error.to_string().contains("expected a folder, no/such is none"), "{error}");
}

#[test]
fn images_that_cannot_be_read_are_counted_once() {
    let folder = place(&["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png"]);
    fs::write(folder.path().join("train/a/1.png"), "no image").expect("written");
    let found = scan(&folder, 0.5).expect("images");
    let mut pixels = vec![0.0; 3 * 4 * 4];
    for _ in 0..2 {
        let mut rng = rng(1, Stream::Augmentation, 0);
        let error = found.train(0, 4, &mut rng, &mut pixels).expect_err("no image").to_string();
        assert!(error.contains("1.png"), "{error}");
    }
    assert_eq!(found.skipped(), 1);
}

#[test]
fn the_fingerprint_is_of_the_names() {
    let of = |names: &[&str]| scan(&place(names), 0.5).expect("images").fingerprint();
    let names = ["a/1.png", "a/2.png", "b/1.png", "b/2.png"];
    assert_eq!(of(&names), of(&names));
    assert_ne!(of(&names), of(&["a/1.png", "a/2.png", "b/1.png", "b/3.png"]));
}
