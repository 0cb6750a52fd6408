//! What the network learns from: images and their classes.

pub(crate) mod augment;
pub(crate) mod folder;
pub(crate) mod glyphs;
pub(crate) mod loader;
pub(crate) mod order;
pub(crate) mod photo;

use crate::cli::{DataArgs, Dataset};
use anyhow::{Result, ensure};
use augment::Augmentation;
use folder::Folder;
use glyphs::Glyphs;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Channels of an image: red, green, blue.
pub(crate) const CHANNELS: usize = 3;
/// Mean and deviation of the channels of ImageNet's images, from 0 to 1: what torchvision's weights expect.
pub(crate) const MEAN: [f32; CHANNELS] = [0.485, 0.456, 0.406];
pub(crate) const DEVIATION: [f32; CHANNELS] = [0.229, 0.224, 0.225];

/// An image that cannot be used. It is left out, and counted.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub(crate) struct Unusable {
    pub(crate) path: PathBuf,
    pub(crate) reason: String,
}

/// Images and classes. Implementations are read by several threads.
pub(crate) trait Source: Send + Sync {
    /// Names of the classes; a class is known by its place among them.
    fn classes(&self) -> &[String];

    /// Images to learn from: what an epoch is.
    fn train_images(&self) -> u64;

    /// Images that are held out.
    fn validation_images(&self) -> u64;

    /// Writes a training image, changed at random by `rng`, into `pixels` `[3, size, size]`, normalized. Gives
    /// its class.
    fn train(
        &self,
        image: u64,
        size: usize,
        rng: &mut ChaCha8Rng,
        pixels: &mut [f32],
    ) -> Result<usize, Unusable>;

    /// Writes an image of the validation set, the same each time.
    fn validation(&self, image: u64, size: usize, pixels: &mut [f32]) -> Result<usize, Unusable>;

    /// The same for the same data. A run is resumed only with what it began with.
    fn fingerprint(&self) -> String;

    /// What it is, for the reader.
    fn summary(&self) -> String;

    /// How many images could not be used until now.
    fn skipped(&self) -> usize {
        0
    }
}

/// Where images come from. Saved with every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum DataSettings {
    /// Glyphs of the fonts in this program.
    Glyphs,
    /// A folder for each class.
    Folder {
        path: PathBuf,
        /// Share of each class that is held out, where there is no folder `val`.
        validation_share: f64,
        augmentation: Augmentation,
    },
}

impl DataSettings {
    /// What the command line asks for.
    pub(crate) fn resolve(args: &DataArgs) -> Result<Self> {
        let share = args.validation_share.unwrap_or(0.1);
        let augmentation = Augmentation::resolve(args)?;
        match &args.data {
            Some(path) => {
                ensure!(
                    share > 0.0 && share < 1.0,
                    "--validation-share: expected a number between 0 and 1, got {share}"
                );
                Ok(Self::Folder {
                    // A run may be resumed from elsewhere.
                    path: std::path::absolute(path)?,
                    validation_share: share,
                    augmentation,
                })
            }
            None => {
                args.check_without_folder()?;
                match args.dataset.unwrap_or(Dataset::Glyphs) {
                    Dataset::Glyphs => Ok(Self::Glyphs),
                }
            }
        }
    }

    /// By the options that set them, for ranks to compare. Where the images are may differ; what they are is
    /// compared besides.
    pub(crate) fn options(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Glyphs => vec![("--data", "glyphs".into())],
            Self::Folder {
                path: _,
                validation_share,
                augmentation: Augmentation { min_crop, jitter, flip },
            } => vec![
                ("--data", "a folder".into()),
                ("--validation-share", validation_share.to_string()),
                ("--min-crop", min_crop.to_string()),
                ("--jitter", jitter.to_string()),
                ("--no-flip", (!flip).to_string()),
            ],
        }
    }

    /// Looks at the data.
    pub(crate) fn open(&self) -> Result<Arc<dyn Source>> {
        match self {
            Self::Glyphs => Ok(Arc::new(Glyphs::new()?)),
            Self::Folder { path, validation_share, augmentation } => {
                Ok(Arc::new(Folder::scan(path, *validation_share, *augmentation)?))
            }
        }
    }

    /// Looks at the data that a run began with.
    pub(crate) fn reopen(&self, fingerprint: &str) -> Result<Arc<dyn Source>> {
        let source = self.open()?;
        ensure!(
            source.fingerprint() == fingerprint,
            "{} are not the images that the run began with: expected the fingerprint {fingerprint}, \
             got {}. Put them back, or start another run with --out DIR",
            self.path().map_or("these".into(), |path| path.display().to_string()),
            source.fingerprint()
        );
        Ok(source)
    }

    fn path(&self) -> Option<&Path> {
        match self {
            Self::Glyphs => None,
            Self::Folder { path, .. } => Some(path),
        }
    }
}

/// A fingerprint of names and numbers, in their order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    pub(crate) fn new(kind: &str) -> Self {
        let mut fingerprint = Self(0);
        fingerprint.text(kind);
        fingerprint
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0 = order::mixed(self.0 ^ order::mixed(number));
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        for part in text.as_bytes().chunks(8) {
            let mut bytes = [0; 8];
            bytes[..part.len()].copy_from_slice(part);
            self.number(u64::from_le_bytes(bytes));
        }
    }

    pub(crate) fn value(self) -> u64 {
        self.0
    }

    pub(crate) fn finish(self) -> String {
        format!("{:016x}", self.0)
    }
}

/// Writes 8-bit RGB pixels, row by row, as channels one after the other, normalized.
pub(crate) fn normalize(rgb: &[u8], pixels: &mut [f32]) {
    let plane = rgb.len() / CHANNELS;
    for channel in 0..CHANNELS {
        // One multiplication and one addition a pixel.
        let scale = 1.0 / (255.0 * DEVIATION[channel]);
        let shift = -MEAN[channel] / DEVIATION[channel];
        let values = rgb.iter().skip(channel).step_by(CHANNELS);
        for (pixel, value) in pixels[channel * plane..][..plane].iter_mut().zip(values) {
            *pixel = f32::from(*value) * scale + shift;
        }
    }
}

/// The way back, for pictures.
pub(crate) fn denormalize(pixels: &[f32]) -> Vec<u8> {
    let plane = pixels.len() / CHANNELS;
    let value = |index: usize| {
        let (pixel, channel) = (index / CHANNELS, index % CHANNELS);
        let value = pixels[channel * plane + pixel] * DEVIATION[channel] + MEAN[channel];
        (255.0 * value).round().clamp(0.0, 255.0) as u8
    };
    (0..pixels.len()).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normalized_pixels_are_channels_with_imagenet_s_numbers_and_come_back() {
        let rgb: Vec<u8> = (0..=254).collect();
        let mut pixels = vec![0.0; rgb.len()];
        normalize(&rgb, &mut pixels);
        // The second pixel is (3, 4, 5).
        for (channel, value) in [3.0, 4.0, 5.0].into_iter().enumerate() {
            let expected = (value / 255.0 - MEAN[channel]) / DEVIATION[channel];
            assert!((pixels[channel * 85 + 1] - expected).abs() < 1e-5);
        }
        assert_eq!(denormalize(&pixels), rgb);
    }

    #[test]
    fn fingerprints_tell_texts_and_their_order_apart() {
        let of = |texts: &[&str]| {
            let mut fingerprint = Fingerprint::new("test");
            texts.iter().for_each(|text| fingerprint.text(text));
            fingerprint.finish()
        };
        let all = [of(&[]), of(&["a"]), of(&["a", "b"]), of(&["b", "a"]), of(&["ab"])];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(of(&["a", "b"]), all[2]);
    }
}
