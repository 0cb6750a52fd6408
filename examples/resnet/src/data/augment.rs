//! Random changes of photographs, by which each is a little different each time it is learned from.

use super::{
    CHANNELS,
    order::{below, between, unit},
};
use crate::cli::DataArgs;
use anyhow::{Result, ensure};
use rand_chacha::{ChaCha8Rng, rand_core::Rng};
use serde::{Deserialize, Serialize};

/// Sides of a crop, width by height, that random crops have at most: Szegedy et al., "Going deeper with
/// convolutions", arXiv:1409.4842, section 6.
const MOST_OBLONG: f32 = 4.0 / 3.0;
/// How often a crop is drawn that may not fit, before all of the image is taken.
const TRIES: usize = 10;
/// What red, green and blue add to brightness (ITU-R BT.601).
const LUMA: [f32; CHANNELS] = [0.299, 0.587, 0.114];

/// How much photographs are changed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Augmentation {
    /// The least share of an image's area that a crop has.
    pub(crate) min_crop: f32,
    /// By what share brightness, contrast and saturation are changed at most.
    pub(crate) jitter: f32,
    /// Whether every other image is mirrored.
    pub(crate) flip: bool,
}

impl Augmentation {
    pub(crate) fn resolve(args: &DataArgs) -> Result<Self> {
        let augmentation = Self {
            min_crop: args.min_crop.unwrap_or(0.08),
            jitter: args.jitter.unwrap_or(0.2),
            flip: !args.no_flip,
        };
        let Self { min_crop, jitter, .. } = augmentation;
        ensure!(
            min_crop > 0.0 && min_crop <= 1.0,
            "--min-crop: expected a share above 0, at most 1, got {min_crop}"
        );
        ensure!(
            (0.0..1.0).contains(&jitter),
            "--jitter: expected a share from 0 to below 1, got {jitter}"
        );
        Ok(augmentation)
    }

    /// A random part of an image: of `min_crop` to all of its area, and of sides in the ratio of 3 to 4 to
    /// 4 to 3, evenly on a logarithmic scale.
    pub(crate) fn crop(&self, [width, height]: [u32; 2], rng: &mut ChaCha8Rng) -> Crop {
        let area = width as f32 * height as f32;
        for _ in 0..TRIES {
            let share = between(rng, [self.min_crop, 1.0]);
            let ratio = MOST_OBLONG.powf(between(rng, [-1.0, 1.0]));
            let columns = (area * share * ratio).sqrt().round() as u32;
            let rows = (area * share / ratio).sqrt().round() as u32;
            if (1..=width).contains(&columns) && (1..=height).contains(&rows) {
                let left = below(rng, (width - columns + 1) as usize) as u32;
                let top = below(rng, (height - rows + 1) as usize) as u32;
                return Crop { left, top, width: columns, height: rows };
            }
        }
        Crop { left: 0, top: 0, width, height }
    }

    /// Mirrors 8-bit RGB pixels, or not, and changes brightness, contrast and saturation, each by a factor of
    /// 1 - jitter to 1 + jitter.
    pub(crate) fn recolor(&self, rgb: &mut [u8], width: usize, rng: &mut ChaCha8Rng) {
        if self.flip && rng.next_u32() & 1 == 1 {
            mirror(rgb, width);
        }
        if self.jitter > 0.0 {
            let factor = |rng: &mut _| 1.0 + self.jitter * (2.0 * unit(rng) - 1.0);
            let [brightness, contrast, saturation] = [factor(rng), factor(rng), factor(rng)];
            jitter(rgb, brightness, contrast, saturation);
        }
    }
}

/// A part of an image, in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Crop {
    pub(crate) left: u32,
    pub(crate) top: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

fn mirror(rgb: &mut [u8], width: usize) {
    for row in rgb.chunks_exact_mut(width * CHANNELS) {
        for left in 0..width / 2 {
            let right = width - 1 - left;
            for channel in 0..CHANNELS {
                row.swap(left * CHANNELS + channel, right * CHANNELS + channel);
            }
        }
    }
}

/// Brightness scales all values. Contrast moves them away from the mean grey, saturation from their own.
fn jitter(rgb: &mut [u8], brightness: f32, contrast: f32, saturation: f32) {
    let grey = |pixel: &[u8]| -> f32 {
        pixel.iter().zip(LUMA).map(|(value, weight)| weight * f32::from(*value)).sum()
    };
    let pixels = rgb.len() / CHANNELS;
    let mean = rgb.chunks_exact(CHANNELS).map(grey).sum::<f32>() / pixels.max(1) as f32;
    let shift = brightness * mean * (1.0 - contrast);
    let scale = brightness * contrast;
    for pixel in rgb.chunks_exact_mut(CHANNELS) {
        let own = grey(pixel) * scale + shift;
        for value in pixel {
            let changed = f32::from(*value) * scale + shift;
            // `as` keeps within 0 and 255.
            *value = (own + saturation * (changed - own)).round() as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::order::{Stream, rng};

    const FULL: Augmentation = Augmentation { min_crop: 0.08, jitter: 0.4, flip: true };

    #[test]
    fn crops_stay_within_the_image_and_have_the_promised_areas_and_ratios() {
        let mut rng = rng(1, Stream::Augmentation, 0);
        let mut areas = Vec::new();
        for size in [[640, 480], [200, 300], [1, 1], [1000, 3]] {
            for _ in 0..500 {
                let crop = FULL.crop(size, &mut rng);
                assert!(crop.width > 0 && crop.left + crop.width <= size[0], "{crop:?}");
                assert!(crop.height > 0 && crop.top + crop.height <= size[1], "{crop:?}");
                if size == [640, 480] {
                    let share = (crop.width * crop.height) as f32 / (640.0 * 480.0);
                    let ratio = crop.width as f32 / crop.height as f32;
                    assert!((0.079..=1.0).contains(&share), "{crop:?}");
                    assert!((0.74..1.35).contains(&ratio), "{crop:?}");
                    areas.push(share);
                }
            }
        }
        let mean = areas.iter().sum::<f32>() / areas.len() as f32;
        // Uniform would be 0.54; large crops of other ratios do not fit and are drawn again.
        assert!((0.4..0.6).contains(&mean), "{mean}");
    }

    #[test]
    fn mirroring_twice_is_nothing_and_once_swaps_columns() {
        let rgb: Vec<u8> = (0..2 * 3 * 3).collect();
        let mut mirrored = rgb.clone();
        mirror(&mut mirrored, 3);
        assert_eq!(mirrored[..9], [6, 7, 8, 3, 4, 5, 0, 1, 2]);
        mirror(&mut mirrored, 3);
        assert_eq!(mirrored, rgb);
    }

    #[test]
    fn each_factor_of_colour_does_what_it_is_named_for() {
        let rgb = [10, 20, 30, 200, 100, 50];
        let with = |brightness, contrast, saturation| {
            let mut changed = rgb;
            jitter(&mut changed, brightness, contrast, saturation);
            changed
        };
        assert_eq!(with(1.0, 1.0, 1.0), rgb);
        assert_eq!(with(0.5, 1.0, 1.0), [5, 10, 15, 100, 50, 25]);
        // Without saturation a pixel is grey, without contrast the image.
        let grey = with(1.0, 1.0, 0.0);
        assert!(grey[..3].iter().all(|value| *value == 18), "{grey:?}");
        let flat = with(1.0, 0.0, 1.0);
        assert!(flat.iter().all(|value| value.abs_diff(71) <= 1), "{flat:?}");
        assert_eq!(with(9.0, 1.0, 1.0)[3..], [255, 255, 255]);
    }

    #[test]
    fn changes_follow_the_draws_and_can_be_switched_off() {
        let rgb: Vec<u8> = (0..75).map(|value| value * 3).collect();
        let changed = |augmentation: Augmentation, position| {
            let mut changed = rgb.clone();
            augmentation.recolor(&mut changed, 5, &mut rng(1, Stream::Augmentation, position));
            changed
        };
        assert_eq!(changed(FULL, 3), changed(FULL, 3));
        assert_ne!(changed(FULL, 3), changed(FULL, 4));
        let none = Augmentation { min_crop: 1.0, jitter: 0.0, flip: false };
        assert_eq!(changed(none, 3), rgb);
        assert_eq!(none.crop([7, 7], &mut rng(1, Stream::Augmentation, 0)).width, 7);
    }
}
