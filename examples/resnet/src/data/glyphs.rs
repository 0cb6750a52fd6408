//! Glyphs of the DejaVu fonts, to be told apart by their Unicode block: images of real shapes that exist on every
//! machine.
//!
//! A fifth of each block's characters is held out: no drawing of them is ever learned from, in no font. The rest
//! is drawn anew each time: turned, sheared, scaled and moved, in two colors, under noise.

use super::{
    CHANNELS, DEVIATION, Fingerprint, MEAN, Source, Unusable,
    order::{Stream, below, between, mixed, noise, rng},
};
use ab_glyph::{Font, FontRef, Glyph, PxScale, point};
use anyhow::{Context, Result};
use rand_chacha::ChaCha8Rng;
use std::ops::RangeInclusive;

/// Classes: blocks of Unicode of which the fonts have many glyphs, in scripts and signs that look unlike.
const BLOCKS: [(&str, RangeInclusive<u32>); 16] = [
    ("Basic Latin", 0x21..=0x7e),
    ("Cyrillic", 0x400..=0x4ff),
    ("Armenian", 0x530..=0x58f),
    ("Hebrew", 0x590..=0x5ff),
    ("Arabic", 0x600..=0x6ff),
    ("NKo", 0x7c0..=0x7ff),
    ("Lao", 0xe80..=0xeff),
    ("Georgian", 0x10a0..=0x10ff),
    ("Canadian Aboriginal Syllabics", 0x1400..=0x167f),
    ("Arrows", 0x2190..=0x21ff),
    ("Mathematical Operators", 0x2200..=0x22ff),
    ("Box Drawing", 0x2500..=0x257f),
    ("Geometric Shapes", 0x25a0..=0x25ff),
    ("Braille Patterns", 0x2800..=0x28ff),
    ("Tifinagh", 0x2d30..=0x2d7f),
    ("Yijing Hexagram Symbols", 0x4dc0..=0x4dff),
];

/// Pixels of a side of the drawings that are distorted.
const SIDE: usize = 64;
/// Pixels of a line's height. A letter fills half of it, and wide arrows lose their ends.
const LINE: f32 = 80.0;
/// One character in so many is held out.
const HELD_OUT: u64 = 5;
/// Drawings of each class that make an epoch, of images that never repeat.
const EPOCH: u64 = 256;
/// Drawings of each class to validate with.
const VALIDATION: u64 = 32;

/// The glyphs, drawn once.
pub(crate) struct Glyphs {
    classes: Vec<String>,
    /// Of each class: characters to learn from, and those held out.
    train: Vec<Vec<Character>>,
    validation: Vec<Vec<Character>>,
}

/// A character's drawings, one for each font that has it: how much of each pixel is covered.
struct Character {
    code: u32,
    drawings: Vec<Vec<u8>>,
}

impl Glyphs {
    pub(crate) fn new() -> Result<Self> {
        let fonts = [
            dejavu::sans::regular(),
            dejavu::sans::bold(),
            dejavu::sans_mono::regular(),
            dejavu::serif::regular(),
        ];
        let fonts: Vec<FontRef<'static>> = fonts
            .into_iter()
            .map(|bytes| FontRef::try_from_slice(bytes).context("an embedded font cannot be read"))
            .collect::<Result<_>>()?;
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for (_, range) in BLOCKS {
            let characters = range.filter_map(|code| {
                let character = char::from_u32(code)?;
                let drawings: Vec<_> =
                    fonts.iter().filter_map(|font| draw(font, character)).collect();
                (!drawings.is_empty()).then_some(Character { code, drawings })
            });
            let (held_out, rest): (Vec<_>, Vec<_>) =
                characters.partition(|character| is_held_out(character.code));
            train.push(rest);
            validation.push(held_out);
        }
        let classes = BLOCKS.iter().map(|(name, _)| (*name).to_owned()).collect();
        Ok(Self { classes, train, validation })
    }

    /// A drawing of a class, distorted at random.
    fn write(characters: &[Character], size: usize, rng: &mut ChaCha8Rng, pixels: &mut [f32]) {
        let character = &characters[below(rng, characters.len())];
        let drawing = &character.drawings[below(rng, character.drawings.len())];
        Distortion::draw(rng).write(drawing, size, rng, pixels);
    }
}

fn is_held_out(code: u32) -> bool {
    mixed(code.into()).is_multiple_of(HELD_OUT)
}

/// The glyph in the middle of a square; none where the font lacks it, and for marks that stand on other letters.
fn draw(font: &FontRef<'_>, character: char) -> Option<Vec<u8>> {
    let id = font.glyph_id(character);
    // Glyph 0 is drawn for what a font lacks.
    if id.0 == 0 || font.h_advance_unscaled(id) == 0.0 {
        return None;
    }
    let glyph: Glyph = id.with_scale_and_position(PxScale::from(LINE), point(0.0, 0.0));
    let outline = font.outline_glyph(glyph)?;
    let bounds = outline.px_bounds();
    let offset = |length: f32| ((SIDE as f32 - length) / 2.0).round() as i64;
    let (left, top) = (offset(bounds.width()), offset(bounds.height()));
    let mut drawing = vec![0; SIDE * SIDE];
    outline.draw(|x, y, coverage| {
        let at = |offset: i64, position: u32| {
            usize::try_from(offset + i64::from(position)).ok().filter(|at| *at < SIDE)
        };
        if let (Some(column), Some(row)) = (at(left, x), at(top, y)) {
            drawing[row * SIDE + column] = (255.0 * coverage.clamp(0.0, 1.0)).round() as u8;
        }
    });
    drawing.iter().any(|value| *value > 127).then_some(drawing)
}

/// A random change of a drawing.
struct Distortion {
    /// From places in the image, -1 to 1, to places in the drawing.
    matrix: [[f32; 2]; 2],
    shift: [f32; 2],
    ink: [f32; CHANNELS],
    paper: [f32; CHANNELS],
    noise: f32,
}

impl Distortion {
    fn draw(rng: &mut ChaCha8Rng) -> Self {
        let angle = between(rng, [-0.25, 0.25]);
        let (sin, cos) = angle.sin_cos();
        let shear = between(rng, [-0.2, 0.2]);
        // Above 1, the glyph comes out smaller than it was drawn.
        let [horizontal, vertical] = [0; 2].map(|_| between(rng, [0.85, 1.25]));
        let matrix = [
            [horizontal * cos, horizontal * (shear * cos - sin)],
            [vertical * sin, vertical * (shear * sin + cos)],
        ];
        let shift = [0; 2].map(|_| between(rng, [-0.1, 0.1]));
        let light = [0; CHANNELS].map(|_| between(rng, [0.6, 1.0]));
        let dark = [0; CHANNELS].map(|_| between(rng, [0.0, 0.35]));
        let (ink, paper) = if below(rng, 2) == 0 { (dark, light) } else { (light, dark) };
        Self { matrix, shift, ink, paper, noise: between(rng, [0.0, 0.12]) }
    }

    fn write(&self, drawing: &[u8], size: usize, rng: &mut ChaCha8Rng, pixels: &mut [f32]) {
        let plane = size * size;
        let center = |index: usize| (2 * index + 1) as f32 / size as f32 - 1.0;
        for row in 0..size {
            for column in 0..size {
                let (x, y) = (center(column), center(row));
                let place = |axis: usize| {
                    let [a, b] = self.matrix[axis];
                    (a * x + b * y + self.shift[axis] + 1.0) * SIDE as f32 / 2.0 - 0.5
                };
                let covered = sample(drawing, place(0), place(1));
                let noise = self.noise * noise(rng);
                for channel in 0..CHANNELS {
                    let paper = self.paper[channel];
                    let value = paper + covered * (self.ink[channel] - paper) + noise;
                    let value = (value.clamp(0.0, 1.0) - MEAN[channel]) / DEVIATION[channel];
                    pixels[channel * plane + row * size + column] = value;
                }
            }
        }
    }
}

/// Bilinear; around the drawing there is paper.
fn sample(drawing: &[u8], x: f32, y: f32) -> f32 {
    let (left, top) = (x.floor(), y.floor());
    let (right_share, lower_share) = (x - left, y - top);
    let at = |column: f32, row: f32| -> f32 {
        let within = |place: f32| (0.0..SIDE as f32).contains(&place);
        match within(column) && within(row) {
            true => f32::from(drawing[row as usize * SIDE + column as usize]) / 255.0,
            false => 0.0,
        }
    };
    let upper = at(left, top) * (1.0 - right_share) + at(left + 1.0, top) * right_share;
    let lower = at(left, top + 1.0) * (1.0 - right_share) + at(left + 1.0, top + 1.0) * right_share;
    upper * (1.0 - lower_share) + lower * lower_share
}

impl Source for Glyphs {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn train_images(&self) -> u64 {
        EPOCH * BLOCKS.len() as u64
    }

    fn validation_images(&self) -> u64 {
        VALIDATION * BLOCKS.len() as u64
    }

    fn train(
        &self,
        image: u64,
        size: usize,
        rng: &mut ChaCha8Rng,
        pixels: &mut [f32],
    ) -> Result<usize, Unusable> {
        // As many of each class in an epoch.
        let class = image as usize % BLOCKS.len();
        Self::write(&self.train[class], size, rng, pixels);
        Ok(class)
    }

    fn validation(&self, image: u64, size: usize, pixels: &mut [f32]) -> Result<usize, Unusable> {
        let class = image as usize % BLOCKS.len();
        let mut rng = rng(0, Stream::Validation, image);
        Self::write(&self.validation[class], size, &mut rng, pixels);
        Ok(class)
    }

    fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new("glyphs");
        for characters in self.train.iter().chain(&self.validation) {
            fingerprint.number(characters.len() as u64);
            for character in characters {
                fingerprint.number(character.code.into());
                fingerprint.number(character.drawings.len() as u64);
            }
        }
        fingerprint.finish()
    }

    fn summary(&self) -> String {
        let count = |classes: &[Vec<Character>]| classes.iter().map(Vec::len).sum::<usize>();
        format!(
            "glyphs of the DejaVu fonts: {} Unicode blocks, {} characters to learn from, {} held out",
            BLOCKS.len(),
            count(&self.train),
            count(&self.validation)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_class_has_characters_on_both_sides_and_none_on_two() {
        let glyphs = Glyphs::new().expect("fonts");
        let mut seen = BTreeSet::new();
        for (class, name) in glyphs.classes.iter().enumerate() {
            let (train, held_out) = (&glyphs.train[class], &glyphs.validation[class]);
            assert!(train.len() >= 20 && held_out.len() >= 4, "{name}: {}", train.len());
            let share = held_out.len() as f64 / (train.len() + held_out.len()) as f64;
            assert!((0.08..0.35).contains(&share), "{name}: {share}");
            for character in train.iter().chain(held_out) {
                assert!(seen.insert(character.code), "{:x}", character.code);
            }
        }
        assert!(seen.len() > 1500, "{}", seen.len());
    }

    #[test]
    fn drawings_are_in_the_middle_and_what_a_font_lacks_has_none() {
        let font = FontRef::try_from_slice(dejavu::sans::regular()).expect("a font");
        // No Hangul, and an accent that stands on other letters.
        assert!(draw(&font, '\u{ac00}').is_none() && draw(&font, '\u{301}').is_none());
        let drawing = draw(&font, 'H').expect("a letter");
        let columns: Vec<usize> =
            (0..SIDE * SIDE).filter(|at| drawing[*at] > 0).map(|at| at % SIDE).collect();
        let (first, last) = (columns.iter().min(), columns.iter().max());
        let (first, last) = (first.expect("ink"), last.expect("ink"));
        assert!((first + last).abs_diff(SIDE) <= 2, "{first} to {last}");
        assert!(last - first > 20, "{first} to {last}");
    }

    #[test]
    fn images_follow_from_the_draws_and_look_like_the_glyph() {
        let glyphs = Glyphs::new().expect("fonts");
        let image = |position| {
            let mut pixels = vec![f32::NAN; CHANNELS * 32 * 32];
            let mut rng = rng(1, Stream::Augmentation, position);
            assert_eq!(glyphs.train(16, 32, &mut rng, &mut pixels).expect("an image"), 0);
            pixels
        };
        assert_eq!(image(1), image(1));
        assert_ne!(image(1), image(2));
        // Ink and paper are apart: the pixels are not of one value and its noise.
        for position in 0..20 {
            let pixels = image(position);
            assert!(pixels.iter().all(|pixel| pixel.is_finite()));
            let mean = pixels.iter().sum::<f32>() / pixels.len() as f32;
            let variance = pixels.iter().map(|pixel| (pixel - mean).powi(2)).sum::<f32>();
            assert!(variance / pixels.len() as f32 > 0.05, "{position}");
        }
    }

    #[test]
    fn the_validation_set_has_as_many_of_each_class_and_does_not_change() {
        let glyphs = Glyphs::new().expect("fonts");
        let mut counts = [0; BLOCKS.len()];
        let mut first = vec![0.0; CHANNELS * 16 * 16];
        for image in 0..glyphs.validation_images() {
            counts[glyphs.validation(image, 16, &mut first).expect("an image")] += 1;
        }
        assert_eq!(counts, [VALIDATION; BLOCKS.len()]);
        let mut second = first.clone();
        second.fill(0.0);
        let last = glyphs.validation_images() - 1;
        glyphs.validation(last, 16, &mut second).expect("an image");
        assert_eq!(first, second);
    }

    #[test]
    fn without_distortion_sampling_gives_the_drawing() {
        let drawing: Vec<u8> = (0..SIDE * SIDE).map(|at| (at % 251) as u8).collect();
        for (x, y) in [(0, 0), (63, 63), (5, 40)] {
            let expected = f32::from(drawing[y * SIDE + x]) / 255.0;
            assert!((sample(&drawing, x as f32, y as f32) - expected).abs() < 1e-6);
        }
        let between = (f32::from(drawing[7]) + f32::from(drawing[8])) / 510.0;
        assert!((sample(&drawing, 7.5, 0.0) - between).abs() < 1e-6);
        assert_eq!(sample(&drawing, -3.0, 5.0), 0.0);
    }
}
