//! Held-out images with what they are and what they were taken for.

use super::{BLUE, FONT, ORANGE, TEXT, register_fonts, shortened};
use crate::evaluation::{Evaluation, Sample};
use anyhow::{Context, Result};
use image::{ImageFormat, RgbImage, imageops};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::io::Cursor;

const COLUMNS: usize = 8;
/// Pixels of an image's side, and of its place with the two lines below it.
const SIDE: u32 = 120;
const PLACE: (u32, u32) = (150, 178);
/// Letters of a class's name.
const NAME: usize = 19;

/// A grid of images: below each its class, and what it was taken for, in blue where that is right and in orange,
/// with a frame, where it is wrong.
pub(crate) struct Samples<'a> {
    pub(crate) evaluation: &'a Evaluation,
    pub(crate) classes: &'a [String],
}

impl Samples<'_> {
    /// The picture in 8-bit RGB.
    pub(crate) fn render(&self) -> Result<RgbImage> {
        register_fonts()?;
        let samples = &self.evaluation.samples;
        let rows = samples.len().div_ceil(COLUMNS).max(1) as u32;
        let (width, height) = (PLACE.0 * COLUMNS as u32, PLACE.1 * rows);
        let mut pixels = vec![255; (width * height * 3) as usize];
        {
            let backend = BitMapBackend::with_buffer(&mut pixels, (width, height));
            let area = backend.into_drawing_area();
            for (index, sample) in samples.iter().enumerate() {
                let (x, y) = corner(index);
                let (left, below) = (x as i32, (y + SIDE) as i32);
                let is_right = sample.class == sample.predicted;
                let color = if is_right { BLUE } else { ORANGE };
                if !is_right {
                    let corners = [(left - 4, y as i32 - 4), (left + SIDE as i32 + 3, below + 3)];
                    area.draw(&Rectangle::new(corners, color.filled()))?;
                }
                let position = Pos::new(HPos::Left, VPos::Top);
                let font = |color: RGBColor| (FONT, 12).into_font().color(&color).pos(position);
                let class = shortened(&self.classes[sample.class], NAME);
                area.draw(&Text::new(class, (left, below + 8), font(TEXT)))?;
                let answer = shortened(&self.classes[sample.predicted], NAME - 5);
                let answer = format!("{answer} {:.0} %", 100.0 * sample.probability);
                area.draw(&Text::new(answer, (left, below + 26), font(color)))?;
            }
            area.present()?;
        }
        let canvas = RgbImage::from_raw(width, height, pixels);
        let mut canvas = canvas.context("the picture has another size than its pixels")?;
        for (index, sample) in samples.iter().enumerate() {
            let (x, y) = corner(index);
            imageops::replace(&mut canvas, &scaled(sample)?, x.into(), y.into());
        }
        Ok(canvas)
    }
}

fn corner(index: usize) -> (u32, u32) {
    let (column, row) = ((index % COLUMNS) as u32, (index / COLUMNS) as u32);
    (column * PLACE.0 + 15, row * PLACE.1 + 10)
}

fn scaled(sample: &Sample) -> Result<RgbImage> {
    let side = sample.size as u32;
    let image = RgbImage::from_raw(side, side, sample.rgb.clone());
    let image = image.context("a sample has another size than its pixels")?;
    let filter = imageops::FilterType::Triangle;
    Ok(imageops::resize(&image, SIDE, SIDE, filter))
}

/// A picture as a PNG file's bytes.
pub(crate) fn png(picture: &RgbImage) -> Result<Vec<u8>> {
    let mut bytes = Cursor::new(Vec::new());
    picture.write_to(&mut bytes, ImageFormat::Png).context("encoding a picture")?;
    Ok(bytes.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Rgb;

    #[test]
    fn images_are_in_a_grid_and_wrong_answers_have_a_frame() {
        let classes = ["cat".to_owned(), "dog".to_owned()];
        let mut evaluation = Evaluation::of(2);
        for index in 0..9 {
            let predicted = usize::from(index == 8);
            let rgb = [10 * index, 200, 90].repeat(16);
            let sample = Sample { rgb, size: 4, class: 0, predicted, probability: 0.7 };
            evaluation.samples.push(sample);
        }
        let picture =
            Samples { evaluation: &evaluation, classes: &classes }.render().expect("a picture");
        assert_eq!(picture.dimensions(), (1200, 356));
        assert_eq!(picture.get_pixel(15 + 60, 10 + 60), &Rgb([0, 200, 90]));
        // The ninth, in the second row, is wrong.
        assert_eq!(picture.get_pixel(15 + 60, 188 + 60), &Rgb([80, 200, 90]));
        assert_eq!(picture.get_pixel(13, 200), &Rgb([213, 94, 0]));
        assert_eq!(picture.get_pixel(13, 60), &Rgb([255, 255, 255]));
        let bytes = png(&picture).expect("a PNG");
        assert!(bytes.starts_with(b"\x89PNG"));
    }
}
