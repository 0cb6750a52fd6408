//! Pictures of rows: bars beside peers, and a roofline. As vectors without a background, in colors that are read on
//! white and on black, and as pixels on white.

pub mod bars;
pub mod roofline;

use anyhow::{Context, Result, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::{FontStyle, register_font},
};
use std::{fs, path::Path};

/// A family that every browser has; bitmaps are drawn with an embedded font of that name.
const FONT: &str = "sans-serif";
/// In the middle between black and white.
const TEXT: RGBColor = RGBColor(118, 126, 137);

/// What can be drawn, as vectors and as pixels.
pub trait Drawing {
    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);

    /// Draws onto an area of that size.
    ///
    /// # Errors
    ///
    /// The backend's.
    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static;
}

/// The picture as the text of an SVG file. It is the same each time.
///
/// # Errors
///
/// The drawing's.
pub fn svg(drawing: &impl Drawing) -> Result<String> {
    register_fonts()?;
    let mut text = String::new();
    drawing.draw(&SVGBackend::with_string(&mut text, drawing.size()).into_drawing_area())?;
    Ok(text)
}

/// Writes `path` with `.svg` and with `.png` behind it.
///
/// # Errors
///
/// When the drawing fails, or a file cannot be written.
pub fn write(drawing: &impl Drawing, path: &Path) -> Result<()> {
    let [vectors, pixels] = ["svg", "png"].map(|extension| path.with_added_extension(extension));
    fs::write(&vectors, svg(drawing)?).with_context(|| format!("write {}", vectors.display()))?;
    let area = BitMapBackend::new(&pixels, drawing.size()).into_drawing_area();
    area.fill(&WHITE)?;
    drawing.draw(&area).with_context(|| format!("write {}", pixels.display()))
}

fn register_fonts() -> Result<()> {
    for (style, font) in
        [(FontStyle::Normal, dejavu::sans::regular()), (FontStyle::Bold, dejavu::sans::bold())]
    {
        register_font(FONT, style, font)
            .map_err(|_| anyhow!("the embedded font cannot be read"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The SVG's text, and the width and height of the PNG.
    pub(super) fn drawn(drawing: &impl Drawing) -> (String, (u32, u32)) {
        let folder = tempfile::tempdir().unwrap();
        write(drawing, &folder.path().join("picture")).unwrap();
        let svg = fs::read_to_string(folder.path().join("picture.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        let png = fs::read(folder.path().join("picture.png")).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "no PNG");
        // The first chunk, of a length and a name of four bytes each, begins with width and height.
        let number = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
        (svg, (number(16), number(20)))
    }
}
