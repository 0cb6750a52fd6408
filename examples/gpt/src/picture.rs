//! Drawings as files: SVG for the web and PNG for everything else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::metrics::replace_file;

pub(crate) const SIZE: (u32, u32) = (1200, 700);

/// A family that every browser has; the bitmap is drawn with an embedded font of that name.
pub(crate) const FONT: &str = "sans-serif";

// Told apart by the colour blind, and by their lightness in print.
pub(crate) const BLUE: RGBColor = RGBColor(0, 114, 178);
pub(crate) const ORANGE: RGBColor = RGBColor(213, 94, 0);
pub(crate) const TEXT: RGBColor = RGBColor(51, 51, 51);
pub(crate) const GRID: RGBColor = RGBColor(226, 226, 226);

/// What can be drawn on an area of [`SIZE`].
pub(crate) trait Drawing {
    /// Draws itself; `scale` is the number of pixels to a unit of length.
    fn draw<B>(&self, area: &DrawingArea<B, Shift>, scale: u32) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static;
}

/// Draws into both files.
pub(crate) fn write(drawing: &impl Drawing, svg: &Path, png: &Path) -> Result<()> {
    register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the embedded font cannot be read"))?;
    replace_file(svg, |temporary| {
        let mut text = String::new();
        drawing.draw(&SVGBackend::with_string(&mut text, SIZE).into_drawing_area(), 1)?;
        Ok(fs::write(temporary, text)?)
    })?;
    replace_file(png, |temporary| {
        // Drawn at twice the size and averaged: the bitmap backend smooths neither thick lines
        // nor the spacing of letters.
        let (width, height) = (SIZE.0 * 2, SIZE.1 * 2);
        let mut pixels = vec![0; (width * height * 3) as usize];
        let large = BitMapBackend::with_buffer(&mut pixels, (width, height));
        drawing.draw(&large.into_drawing_area(), 2)?;
        let mut bitmap = BitMapBackend::new(temporary, SIZE);
        bitmap.blit_bitmap((0, 0), SIZE, &halve(&pixels, width as usize))?;
        bitmap.present().context("encoding the picture")
    })
}

/// Averages squares of two by two RGB pixels.
fn halve(pixels: &[u8], width: usize) -> Vec<u8> {
    let mut small = Vec::with_capacity(pixels.len() / 4);
    for rows in pixels.chunks_exact(2 * width * 3) {
        let (upper, lower) = rows.split_at(width * 3);
        for (upper, lower) in upper.chunks_exact(6).zip(lower.chunks_exact(6)) {
            for channel in 0..3 {
                let four = [upper[channel], upper[channel + 3], lower[channel], lower[channel + 3]];
                let sum: u16 = four.into_iter().map(u16::from).sum();
                small.push(((sum + 2) / 4) as u8);
            }
        }
    }
    small
}
