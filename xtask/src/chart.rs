//! `cargo xtask chart`: draws the bars that a page describes, from the rows of `benches/results`.
//!
//! The description is a comment of the page:
//!
//! ```text
//! <!-- chart: book/src/images/gpt2.svg
//! title: what is drawn, with its unit
//! group: bars that belong together
//! Blackburn = words that name a row
//! -->
//! ```

use crate::{
    command,
    figures::{Form, Results, Word, words},
};
use anyhow::{Context, Result, anyhow, bail, ensure};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};
use std::{fs, path::Path};

/// Draw the charts of README from benches/results.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    let root = command::root();
    for chart in charts(&root)? {
        let path = root.join(&chart.file);
        fs::create_dir_all(path.parent().context("a chart lies in a folder")?)?;
        fs::write(&path, chart.draw()?)?;
        println!("{}", chart.file);
    }
    Ok(())
}

/// Fails if a chart is not what its rows would be drawn as.
pub(crate) fn check(root: &Path) -> Result<()> {
    for chart in charts(root)? {
        let drawn = fs::read_to_string(root.join(&chart.file)).unwrap_or_default();
        if drawn != chart.draw()? {
            bail!("{} is not what benches/results has; `cargo xtask chart` draws it", chart.file);
        }
    }
    Ok(())
}

fn charts(root: &Path) -> Result<Vec<Chart>> {
    let results = Results::read(&root.join("benches/results"))?;
    let page = fs::read_to_string(root.join("README.md"))?;
    page.match_indices("<!-- chart: ")
        .map(|(at, open)| {
            let rest = &page[at + open.len()..];
            let (description, _) = rest.split_once("-->").context("a chart's comment is open")?;
            Chart::read(description, &results)
        })
        .collect()
}

/// What is drawn.
struct Chart {
    file: String,
    title: String,
    rows: Vec<Row>,
}

enum Row {
    Group(String),
    Bar { label: String, value: f64 },
}

// In the middle between black and white, so that it is read on both.
const TEXT: RGBColor = RGBColor(118, 126, 137);
/// Blackburn's bars, and those of others.
const OURS: RGBColor = RGBColor(232, 89, 12);
const OTHERS: RGBColor = RGBColor(134, 150, 170);
const FONT: &str = "sans-serif";

const WIDTH: u32 = 860;
/// Where bars begin, and where the longest ends.
const LEFT: i32 = 270;
const RIGHT: i32 = 780;
const TOP: i32 = 52;
const ROW: i32 = 30;
const THICKNESS: i32 = 20;

impl Chart {
    fn read(description: &str, results: &Results) -> Result<Self> {
        let (file, rest) = description.split_once('\n').context("a chart has no lines")?;
        let mut chart = Self { file: file.trim().into(), title: String::new(), rows: Vec::new() };
        for line in rest.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if let Some(title) = line.strip_prefix("title: ") {
                chart.title = title.into();
            } else if let Some(group) = line.strip_prefix("group: ") {
                chart.rows.push(Row::Group(group.into()));
            } else {
                let (label, named) = line
                    .split_once(" = ")
                    .with_context(|| format!("{}: `{line}` is not `label = words`", chart.file))?;
                let named: Vec<Word> = words(named);
                let value = results
                    .value(&[named], 0)
                    .with_context(|| format!("{}: {label}", chart.file))?;
                chart.rows.push(Row::Bar { label: label.into(), value: value.number });
            }
        }
        ensure!(chart.longest() > 0.0, "{} has no bars", chart.file);
        Ok(chart)
    }

    fn longest(&self) -> f64 {
        let values = self.rows.iter().filter_map(|row| match row {
            Row::Bar { value, .. } => Some(*value),
            Row::Group(_) => None,
        });
        values.fold(0.0, f64::max)
    }

    /// The picture as SVG without a background.
    fn draw(&self) -> Result<String> {
        let height = TOP + ROW * self.rows.len() as i32 + 10;
        let mut svg = String::new();
        let backend = SVGBackend::with_string(&mut svg, (WIDTH, height as u32));
        let area = backend.into_drawing_area();
        let error = |error| anyhow!("{}: {error}", self.file);
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
        area.draw_text(&self.title, &bold(21), (10, 24)).map_err(|e| error(e.to_string()))?;
        let scale = f64::from(RIGHT - LEFT) / self.longest();
        for (index, row) in self.rows.iter().enumerate() {
            let y = TOP + ROW * index as i32 + ROW / 2;
            match row {
                Row::Group(name) => {
                    area.draw_text(name, &bold(18), (10, y + 5))
                        .map_err(|e| error(e.to_string()))?;
                }
                Row::Bar { label, value } => {
                    let end = LEFT + (value * scale).round() as i32;
                    let color = if label.starts_with("Blackburn") { OURS } else { OTHERS };
                    let bar = [(LEFT, y - THICKNESS / 2), (end, y + THICKNESS / 2)];
                    area.draw(&Rectangle::new(bar, color.filled()))
                        .map_err(|e| error(e.to_string()))?;
                    let form = Form::of(if *value < 10_000.0 { "1,000" } else { "1k" });
                    let shown = form.map(|form| form.write(*value)).unwrap_or_default();
                    for (words, at, position) in
                        [(label, LEFT - 10, HPos::Right), (&shown, end + 8, HPos::Left)]
                    {
                        area.draw_text(words, &text(18, position), (at, y))
                            .map_err(|e| error(e.to_string()))?;
                    }
                }
            }
        }
        area.present().map_err(|e| error(e.to_string()))?;
        drop(area);
        Ok(svg)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let bar = |label: &str, value| Row::Bar { label: label.into(), value };
        let rows = vec![
            Row::Group("Batch 8".into()),
            bar("Blackburn", 410_400.0),
            bar("PyTorch", 205_200.0),
        ];
        Chart { file: "x.svg".into(), title: "tokens/s".into(), rows }
    }

    #[test]
    fn bars_are_as_long_as_their_values_and_say_them() {
        let svg = chart().draw().unwrap();
        assert!(svg.contains("410k") && svg.contains("205k") && svg.contains("Batch 8"), "{svg}");
        let half = (RIGHT - LEFT) / 2;
        for width in [RIGHT - LEFT, half] {
            assert!(svg.contains(&format!("width=\"{width}\"")), "{width} in {svg}");
        }
    }

    #[test]
    fn a_picture_says_the_same_each_time_and_changes_with_a_row() {
        let mut other = chart();
        other.rows[2] = Row::Bar { label: "PyTorch".into(), value: 300_000.0 };
        assert_eq!(chart().draw().unwrap(), chart().draw().unwrap());
        assert_ne!(chart().draw().unwrap(), other.draw().unwrap());
    }

    #[test]
    fn a_line_without_a_row_is_an_error() {
        let none = Results(Vec::new());
        let read = |line: &str| Chart::read(&format!("x.svg\n{line}\n"), &none).err();
        let error = format!("{:#}", read("Blackburn = gpt2").unwrap());
        assert_eq!(error, "x.svg: Blackburn: no row of benches/results is `gpt2`");
        assert!(read("title: x").is_some() && read("Blackburn").is_some());
    }
}
