//! Bars of Blackburn and of its peers, a row of the picture for each.

use super::{Drawing, FONT, TEXT};
use crate::{newest::Newest, number::Form, row::Row};
use anyhow::{Context, Result, ensure};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// What is drawn.
pub struct Bars {
    /// Above all bars, with their unit if they share one.
    pub title: String,
    /// From top to bottom.
    pub lines: Vec<Line>,
    /// What is as long as the picture is wide.
    pub longest: Longest,
}

/// What bars are as long as the picture is wide.
#[derive(Clone, Copy, PartialEq)]
pub enum Longest {
    /// One of all, which have one unit.
    OfAll,
    /// One of each group, which has a unit of its own.
    OfGroup,
}

/// A line of the picture.
pub enum Line {
    /// The name of what follows.
    Group(String),
    /// A bar.
    Bar {
        /// In front of it.
        label: String,
        /// Its length.
        value: f64,
        /// Behind the value that is written behind it.
        unit: String,
    },
}

/// Blackburn's bars, and those of others.
const OURS: RGBColor = RGBColor(232, 89, 12);
const OTHERS: RGBColor = RGBColor(134, 150, 170);

const WIDTH: u32 = 860;
/// Where bars begin, and where the longest ends if nothing but a short number stands behind it.
const LEFT: i32 = 270;
const RIGHT: i32 = 780;
/// Where the longest ends if units stand behind the numbers.
const RIGHT_OF_UNITS: i32 = 710;
const TOP: i32 = 52;
const ROW: i32 = 30;
const THICKNESS: i32 = 20;

impl Bars {
    /// Whatever rows hold that were measured of Blackburn and of a peer: of each the newest. At most `most` groups,
    /// the first ones; says how many there are besides.
    ///
    /// # Errors
    ///
    /// When there are none.
    pub fn of_rows(rows: &[Row], title: String, most: usize) -> Result<(Self, usize)> {
        let mut groups: Vec<(String, Vec<&Row>)> = Vec::new();
        let newest = Newest::of(rows.iter().filter(|row| row.rate().is_some()));
        for row in newest.rows() {
            let name = group(row);
            let place = groups.iter().position(|(known, _)| *known == name);
            let place = place.unwrap_or_else(|| {
                groups.push((name, Vec::new()));
                groups.len() - 1
            });
            groups[place].1.push(row);
        }
        groups.retain(|(_, rows)| {
            let is_one_unit = rows.iter().all(|row| row.unit == rows[0].unit);
            let ours = rows.iter().filter(|row| row.is_ours()).count();
            is_one_unit && ours > 0 && ours < rows.len()
        });
        ensure!(
            !groups.is_empty(),
            "none of {} rows was measured of Blackburn and of a peer, with a rate of one unit: nothing to draw",
            rows.len()
        );
        let besides = groups.len().saturating_sub(most);
        let mut lines = Vec::new();
        for (name, mut rows) in groups.into_iter().take(most) {
            rows.sort_by_key(|row| !row.is_ours());
            lines.push(Line::Group(name));
            lines.extend(rows.into_iter().map(|row| Line::Bar {
                label: label(row),
                value: row.rate().unwrap_or_default(),
                unit: row.unit.clone(),
            }));
        }
        Ok((Self { title, lines, longest: Longest::OfGroup }, besides))
    }

    /// Of all bars, or of those behind the group's name in line `place`.
    fn longest_of(&self, place: usize) -> f64 {
        let is_bar = |line: &&Line| matches!(line, Line::Bar { .. });
        let lines = match self.longest {
            Longest::OfAll => &self.lines[..],
            Longest::OfGroup => {
                let group = |line: &Line| matches!(line, Line::Group(_));
                let start = self.lines[..place].iter().rposition(group).map_or(0, |at| at + 1);
                let end = self.lines[place..].iter().position(group);
                &self.lines[start..end.map_or(self.lines.len(), |end| place + end)]
            }
        };
        let values = lines.iter().filter(is_bar).map(|line| match line {
            Line::Bar { value, .. } => *value,
            Line::Group(_) => 0.0,
        });
        values.fold(0.0, f64::max)
    }
}

/// What is drawn together. What differs in a step stands behind its shape, and on the bar.
fn group(row: &Row) -> String {
    let (shape, _) = parts(row);
    Row { shape: shape.to_owned(), ..row.clone() }.name()
}

/// The shape that bars of a group share, and what stands behind it on one.
fn parts(row: &Row) -> (&str, &str) {
    match row.pass.as_str() {
        "step" => row.shape.split_once([' ', ',']).unwrap_or((&row.shape, "")),
        _ => (&row.shape, ""),
    }
}

fn label(row: &Row) -> String {
    let subject = match row.subject.as_str() {
        "blackburn" => "Blackburn",
        "burn" => "Burn",
        "stock-burn" => "stock Burn",
        "torch" => "PyTorch",
        "torch-compile" => "PyTorch, compiled",
        other => other,
    };
    match parts(row).1.trim() {
        "" => subject.to_owned(),
        rest => shortened(format!("{subject}, {rest}")),
    }
}

/// As many letters as there is room for in front of a bar.
fn shortened(label: String) -> String {
    const LETTERS: usize = 28;
    if label.chars().count() <= LETTERS {
        return label;
    }
    label.chars().take(LETTERS - 1).chain(['…']).collect()
}

impl Drawing for Bars {
    fn size(&self) -> (u32, u32) {
        (WIDTH, (TOP + ROW * self.lines.len() as i32 + 10) as u32)
    }

    fn draw<B>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B: DrawingBackend,
        B::ErrorType: 'static,
    {
        let text = |size: i32, position: HPos| {
            TextStyle::from((FONT, size).into_font())
                .color(&TEXT)
                .pos(Pos::new(position, VPos::Center))
        };
        let bold = |size: i32| {
            TextStyle::from((FONT, size, FontStyle::Bold).into_font())
                .color(&TEXT)
                .pos(Pos::new(HPos::Left, VPos::Center))
        };
        area.draw_text(&self.title, &bold(21), (10, 24))?;
        let has_units = |line: &Line| matches!(line, Line::Bar { unit, .. } if !unit.is_empty());
        let right = if self.lines.iter().any(has_units) { RIGHT_OF_UNITS } else { RIGHT };
        for (index, line) in self.lines.iter().enumerate() {
            let y = TOP + ROW * index as i32 + ROW / 2;
            match line {
                Line::Group(name) => area.draw_text(name, &bold(18), (10, y + 5))?,
                Line::Bar { label, value, unit } => {
                    let scale = f64::from(right - LEFT) / self.longest_of(index);
                    let end = LEFT + (value * scale).round() as i32;
                    let color = if label.starts_with("Blackburn") { OURS } else { OTHERS };
                    let bar = [(LEFT, y - THICKNESS / 2), (end, y + THICKNESS / 2)];
                    area.draw(&Rectangle::new(bar, color.filled()))?;
                    let shown = format!("{} {unit}", shown(*value));
                    for (words, at, position) in [
                        (label.as_str(), LEFT - 10, HPos::Right),
                        (shown.trim_end(), end + 8, HPos::Left),
                    ] {
                        area.draw_text(words, &text(18, position), (at, y))?;
                    }
                }
            }
        }
        area.present().context("writing the picture")
    }
}

/// `410k`, `1,541`, `98.5`.
fn shown(value: f64) -> String {
    let form = match value {
        10_000.0.. => "1k",
        100.0.. => "1,000",
        _ => "1.0",
    };
    Form::of(form).map(|form| form.write(value)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        drawing::{svg, tests::drawn},
        row::tests::row,
    };

    fn bars() -> Bars {
        let bar =
            |label: &str, value| Line::Bar { label: label.into(), value, unit: String::new() };
        let lines = vec![
            Line::Group("Batch 8".into()),
            bar("Blackburn", 410_400.0),
            bar("PyTorch", 205_200.0),
        ];
        Bars { title: "tokens/s".into(), lines, longest: Longest::OfAll }
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_say_them() {
        let svg = svg(&bars()).unwrap();
        assert!(svg.contains("410k") && svg.contains("205k") && svg.contains("Batch 8"), "{svg}");
        let half = (RIGHT - LEFT) / 2;
        for width in [RIGHT - LEFT, half] {
            assert!(svg.contains(&format!("width=\"{width}\"")), "{width} in {svg}");
        }
    }

    #[test]
    fn a_picture_says_the_same_each_time_and_changes_with_a_row() {
        let mut other = bars();
        other.lines[2] = Line::Bar { label: "PyTorch".into(), value: 300_000.0, unit: "".into() };
        assert_eq!(svg(&bars()).unwrap(), svg(&bars()).unwrap());
        assert_ne!(svg(&bars()).unwrap(), svg(&other).unwrap());
    }

    #[test]
    fn groups_of_rows_are_as_wide_as_the_picture_and_named() {
        let rows = [
            row(["matmul", "forward", "bf16", "8x8x8", "blackburn", "9", "100", "TFLOP/s", "NN"]),
            row(["matmul", "forward", "bf16", "8x8x8", "blackburn", "1", "600", "TFLOP/s", "NN"]),
            row(["matmul", "forward", "bf16", "8x8x8", "torch", "1", "300", "TFLOP/s", "NN"]),
            row(["gpt2", "step", "bf16", "B8", "blackburn", "1", "40000", "tokens/s", ""]),
            row([
                "gpt2",
                "step",
                "bf16",
                "B8 padded",
                "torch-compile",
                "1",
                "20000",
                "tokens/s",
                "",
            ]),
            row(["sum", "forward", "bf16", "8", "blackburn", "1", "77", "GB/s", "alone"]),
        ];
        let (bars, besides) = Bars::of_rows(&rows, "Run".into(), 9).unwrap();
        assert_eq!(besides, 0);
        let (svg, size) = drawn(&bars);
        assert_eq!(size, bars.size());
        for label in [
            "matmul forward bf16 8x8x8 NN",
            "600 TFLOP/s",
            "gpt2 step bf16 B8",
            "PyTorch, compiled, padded",
            "40k tokens/s",
        ] {
            assert!(svg.contains(label), "{label} in {svg}");
        }
        assert!(!svg.contains("77.0 GB/s") && !svg.contains("100 TFLOP/s"), "{svg}");
        let full = format!("width=\"{}\"", RIGHT_OF_UNITS - LEFT);
        assert_eq!(svg.matches(&full).count(), 2, "{svg}");
        assert_eq!(Bars::of_rows(&rows, "Run".into(), 1).unwrap().1, 1);
    }

    #[test]
    fn long_labels_are_shortened_by_letters() {
        assert_eq!(shortened("é".repeat(28)), "é".repeat(28));
        assert_eq!(shortened("é".repeat(29)), "é".repeat(27) + "…");
    }

    #[test]
    fn rows_without_a_peer_are_an_error() {
        let alone = [row(["sum", "forward", "f32", "8", "blackburn", "1", "7", "GB/s", ""])];
        let error = Bars::of_rows(&alone, String::new(), 9).err().unwrap().to_string();
        assert!(
            error.starts_with("none of 1 rows was measured of Blackburn and of a peer"),
            "{error}"
        );
    }
}
