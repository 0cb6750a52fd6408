//! Pictures of a run: its curves, what it takes for what, and samples.

mod confusion;
mod curves;
mod samples;

pub(crate) use confusion::Confusion;
pub(crate) use curves::Curves;
pub(crate) use samples::{Samples, png};

use anyhow::{Context, Result, anyhow};
use blackburn::train::replace::replace_file;
use plotters::{
    coord::Shift,
    prelude::*,
    style::{FontStyle, register_font},
};
use std::{fs, path::Path};

/// A family that every browser has; bitmaps are drawn with an embedded font of that name.
const FONT: &str = "sans-serif";
// Told apart by the colour blind, and by their lightness in print.
const BLUE: RGBColor = RGBColor(0, 114, 178);
const ORANGE: RGBColor = RGBColor(213, 94, 0);
const TEXT: RGBColor = RGBColor(51, 51, 51);
const GRID: RGBColor = RGBColor(226, 226, 226);

/// What can be drawn, as vectors and as pixels.
pub(crate) trait Drawing {
    /// Width and height.
    fn size(&self) -> (u32, u32);

    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static;
}

/// Draws `name.svg` and `name.png` in a folder.
pub(crate) fn write(drawing: &impl Drawing, folder: &Path, name: &str) -> Result<()> {
    register_fonts()?;
    let path = folder.join(name);
    save(&path.with_extension("svg"), |temporary| {
        let mut text = String::new();
        let backend = SVGBackend::with_string(&mut text, drawing.size());
        drawing.draw(&backend.into_drawing_area())?;
        Ok(fs::write(temporary, text)?)
    })?;
    save(&path.with_extension("png"), |temporary| {
        drawing.draw(&BitMapBackend::new(temporary, drawing.size()).into_drawing_area())
    })
}

/// Replaces a file as a whole.
pub(crate) fn save(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    replace_file(path, fill).with_context(|| format!("cannot write {}", path.display()))
}

fn register_fonts() -> Result<()> {
    register_font(FONT, FontStyle::Normal, dejavu::sans::regular())
        .map_err(|_| anyhow!("the embedded font cannot be read"))
}

/// A text that fits into so many letters.
fn shortened(text: &str, letters: usize) -> String {
    if text.chars().count() <= letters {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(letters.saturating_sub(1)).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The SVG's text and the PNG's width and height.
    pub(super) fn drawn(drawing: &impl Drawing) -> (String, (u32, u32)) {
        let folder = tempfile::tempdir().expect("a folder");
        write(drawing, folder.path(), "picture").expect("pictures");
        let entries = fs::read_dir(folder.path()).expect("entries").count();
        assert_eq!(entries, 2, "temporary files are left");
        let svg = fs::read_to_string(folder.path().join("picture.svg")).expect("an SVG");
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        let png = image::open(folder.path().join("picture.png")).expect("a PNG").into_rgb8();
        (svg, png.dimensions())
    }

    #[test]
    fn long_names_are_shortened_by_letters() {
        assert_eq!(shortened("écru", 4), "écru");
        assert_eq!(shortened("écrues", 4), "écr…");
    }
}
