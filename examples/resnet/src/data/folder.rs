//! Images in folders: one for each class.
//!
//! ```text
//! DIR/train/cat/1.jpg   DIR/train/dog/7.png   DIR/val/cat/2.jpg ...
//! DIR/cat/1.jpg         DIR/dog/7.png ...
//! ```
//!
//! Without `train` and `val`, a hash of an image's class and name decides which are held out, so that an image
//! stays where it is when others come or go.

use super::{
    Fingerprint, Source, Unusable,
    augment::Augmentation,
    normalize,
    photo::{self, EXTENSIONS},
};
use anyhow::{Context, Result, bail, ensure};
use rand_chacha::ChaCha8Rng;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Names that a folder of images for validation has.
const VALIDATION: [&str; 3] = ["val", "validation", "valid"];
/// Images that cannot be used are named one by one up to this many.
const NAMED: usize = 10;

/// The images of a folder.
pub(crate) struct Folder {
    root: PathBuf,
    classes: Vec<String>,
    augmentation: Augmentation,
    train: Vec<File>,
    validation: Vec<File>,
    unusable: Mutex<BTreeSet<PathBuf>>,
    /// How many that are.
    skipped: AtomicUsize,
}

#[derive(Clone, Debug, PartialEq)]
struct File {
    class: u32,
    /// Below the root.
    path: PathBuf,
}

impl Folder {
    /// Looks for images in `root`, without reading them.
    ///
    /// # Errors
    ///
    /// When there are no images or a single class, when a class has no images, when `train` and `val` have
    /// other classes, and when a class is too small to hold any out.
    pub(crate) fn scan(
        root: &Path,
        validation_share: f64,
        augmentation: Augmentation,
    ) -> Result<Self> {
        ensure!(root.is_dir(), "--data: expected a folder, {} is none", root.display());
        let train = root.join("train");
        let validation = VALIDATION.iter().map(|name| root.join(name)).find(|path| path.is_dir());
        let (classes, train, validation) = match (train.is_dir(), validation) {
            (true, Some(validation)) => {
                let classes = classes_of(&train)?;
                let of_validation = classes_of(&validation)?;
                ensure!(
                    classes == of_validation,
                    "{} and {} have other classes: {}",
                    train.display(),
                    validation.display(),
                    difference(&classes, &of_validation)
                );
                let files = |folder: &Path| list(root, folder, &classes);
                let (train, validation) = (files(&train)?, files(&validation)?);
                (classes, train, validation)
            }
            (true, None) => {
                let classes = classes_of(&train)?;
                let (train, validation) =
                    split(list(root, &train, &classes)?, &classes, validation_share)?;
                (classes, train, validation)
            }
            (false, Some(validation)) => bail!(
                "{} has a folder {}, and none that is called train",
                root.display(),
                validation.file_name().unwrap_or_default().display()
            ),
            (false, None) => {
                let classes = classes_of(root)?;
                let (train, validation) =
                    split(list(root, root, &classes)?, &classes, validation_share)?;
                (classes, train, validation)
            }
        };
        Ok(Self {
            root: root.to_owned(),
            classes,
            augmentation,
            train,
            validation,
            unusable: Mutex::default(),
            skipped: AtomicUsize::new(0),
        })
    }

    fn read(&self, file: &File) -> Result<image::RgbImage, Unusable> {
        let is_known = {
            let unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
            unusable.contains(&file.path)
        };
        if is_known {
            let reason = "it could not be read before".into();
            return Err(Unusable { path: self.root.join(&file.path), reason });
        }
        photo::read(&self.root.join(&file.path)).inspect_err(|error| {
            let mut unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
            if unusable.insert(file.path.clone()) {
                let count = self.skipped.fetch_add(1, Ordering::Relaxed) + 1;
                match count {
                    ..NAMED => tracing::warn!("leaving out {error}"),
                    NAMED => tracing::warn!("leaving out {error}; further ones are only counted"),
                    _ => {}
                }
            }
        })
    }
}

impl Source for Folder {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn train_images(&self) -> u64 {
        self.train.len() as u64
    }

    fn validation_images(&self) -> u64 {
        self.validation.len() as u64
    }

    fn train(
        &self,
        image: u64,
        size: usize,
        rng: &mut ChaCha8Rng,
        pixels: &mut [f32],
    ) -> Result<usize, Unusable> {
        let file = &self.train[image as usize];
        let photo = self.read(file)?;
        let crop = self.augmentation.crop(photo.dimensions().into(), rng);
        let mut rgb = photo::scale(&photo, crop, size);
        self.augmentation.recolor(&mut rgb, size, rng);
        normalize(&rgb, pixels);
        Ok(file.class as usize)
    }

    fn validation(&self, image: u64, size: usize, pixels: &mut [f32]) -> Result<usize, Unusable> {
        let file = &self.validation[image as usize];
        let photo = self.read(file)?;
        normalize(&photo::scale(&photo, photo::middle(photo.dimensions().into()), size), pixels);
        Ok(file.class as usize)
    }

    fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new("folder");
        self.classes.iter().for_each(|class| fingerprint.text(class));
        for files in [&self.train, &self.validation] {
            fingerprint.number(files.len() as u64);
            files.iter().for_each(|file| fingerprint.text(&file.path.to_string_lossy()));
        }
        fingerprint.finish()
    }

    fn summary(&self) -> String {
        format!(
            "{}: {} classes, {} images to learn from, {} held out",
            self.root.display(),
            self.classes.len(),
            self.train.len(),
            self.validation.len()
        )
    }

    fn skipped(&self) -> usize {
        self.skipped.load(Ordering::Relaxed)
    }
}

/// Names of the folders in `folder`, sorted, but for hidden ones.
fn classes_of(folder: &Path) -> Result<Vec<String>> {
    let mut classes = Vec::new();
    for path in entries(folder)? {
        if path.is_dir() {
            classes.push(name(&path));
        }
    }
    match &classes[..] {
        [] => bail!(
            "--data: found no images in {}: expected a folder for each class, with JPEG or PNG files",
            folder.display()
        ),
        [class] => bail!(
            "--data: {} has the single class {class}: expected folders of at least two",
            folder.display()
        ),
        _ => Ok(classes),
    }
}

/// The images of all classes.
fn list(root: &Path, folder: &Path, classes: &[String]) -> Result<Vec<File>> {
    let mut files = Vec::new();
    for (class, name) in classes.iter().enumerate() {
        let before = files.len();
        let folder = folder.join(name);
        collect(&folder, &mut |path| {
            let path = path.strip_prefix(root).unwrap_or(path).to_owned();
            files.push(File { class: class as u32, path });
        })?;
        ensure!(
            files.len() > before,
            "--data: the class {name} has no images: found no JPEG or PNG file in {}. Remove the \
             folder, or put some there",
            folder.display()
        );
    }
    Ok(files)
}

/// All images in `folder` and below it, sorted.
fn collect(folder: &Path, found: &mut impl FnMut(&Path)) -> Result<()> {
    for path in entries(folder)? {
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_dir() {
            collect(&path, found)?;
        } else if EXTENSIONS.contains(&extension.as_str()) {
            found(&path);
        }
    }
    Ok(())
}

/// What is in a folder, sorted, but for hidden files.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let cannot = || format!("cannot read the folder {}", folder.display());
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if !name(&path).starts_with('.') {
            paths.push(path);
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Holds out a share of each class, and at least one image.
fn split(files: Vec<File>, classes: &[String], share: f64) -> Result<(Vec<File>, Vec<File>)> {
    let (mut train, mut validation) = (Vec::new(), Vec::new());
    for (class, name) in classes.iter().enumerate() {
        let mut own: Vec<_> = files.iter().filter(|file| file.class as usize == class).collect();
        ensure!(
            own.len() > 1,
            "--data: the class {name} has one image: expected at least two, one to learn from and one to \
             hold out"
        );
        // The lowest hashes are held out.
        own.sort_by_cached_key(|file| {
            let mut fingerprint = Fingerprint::new("split");
            // A path's separators differ between systems.
            let parts = file.path.iter().map(|part| part.to_string_lossy());
            parts.for_each(|part| fingerprint.text(&part));
            fingerprint.value()
        });
        let held_out = ((own.len() as f64 * share).round() as usize).clamp(1, own.len() - 1);
        validation.extend(own[..held_out].iter().map(|file| (*file).clone()));
        train.extend(own[held_out..].iter().map(|file| (*file).clone()));
    }
    Ok((train, validation))
}

fn difference(ours: &[String], theirs: &[String]) -> String {
    let only = |these: &[String], those: &[String]| -> Option<String> {
        these.iter().find(|name| !those.contains(name)).cloned()
    };
    match (only(ours, theirs), only(theirs, ours)) {
        (Some(name), _) => format!("{name} is only in the first"),
        (_, Some(name)) => format!("{name} is only in the second"),
        _ => "they are sorted otherwise".into(),
    }
}

#[cfg(test)]
mod tests;
