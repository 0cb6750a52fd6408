//! `cargo xtask chart`: draws the pictures that pages describe, from the rows of `benches/results`.
//!
//! A description is a comment of README or of a chapter of the book. Bars:
//!
//! ```text
//! <!-- chart: book/src/images/gpt2.svg
//! title: what is drawn, with its unit
//! group: bars that belong together
//! Blackburn = words that name a row
//! -->
//! ```
//!
//! With a line `scale: group` the longest bar of each group is as long as the picture is wide: where groups have units of
//! their own, which their names say.
//!
//! A roofline; each line of rows adds those that all of its words name:
//!
//! ```text
//! <!-- roofline: book/src/images/roofline.svg
//! title: what is drawn
//! device: the driver's name of it
//! rows: nvidia-h200 matmul bf16
//! -->
//! ```

use crate::{command, figures};
use anyhow::{Context, Result, bail, ensure};
use blackburn_bench::{
    drawing::{
        self,
        bars::{Bars, Line, Longest},
        roofline::Roofline,
    },
    results::{Results, words},
    row::Row,
};
use std::{fs, path::Path};

/// Draw the charts of README and book from benches/results.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_: &Arguments) -> Result<()> {
    let root = command::root();
    for Chart { file, svg } in charts(&root)? {
        let path = root.join(&file);
        fs::create_dir_all(path.parent().context("a chart lies in a folder")?)?;
        fs::write(&path, svg)?;
        println!("{file}");
    }
    Ok(())
}

/// Fails if a chart is not what its rows would be drawn as.
pub(crate) fn check(root: &Path) -> Result<()> {
    for Chart { file, svg } in charts(root)? {
        if fs::read_to_string(root.join(&file)).unwrap_or_default() != svg {
            bail!("{file} is not what benches/results has; `cargo xtask chart` draws it");
        }
    }
    Ok(())
}

/// A picture, and where it belongs.
struct Chart {
    file: String,
    svg: String,
}

fn charts(root: &Path) -> Result<Vec<Chart>> {
    let results = Results::read(&root.join("benches/results"))?;
    let mut charts = Vec::new();
    for path in figures::pages(root)? {
        let page = fs::read_to_string(root.join(path))?;
        for (open, draw) in
            [("<!-- chart: ", bars as fn(&_, &_) -> _), ("<!-- roofline: ", roofline)]
        {
            for (at, _) in page.match_indices(open) {
                let rest = &page[at + open.len()..];
                let (description, _) =
                    rest.split_once("-->").context("a chart's comment is open")?;
                charts.push(chart(description, &results, draw)?);
            }
        }
    }
    Ok(charts)
}

fn chart(
    description: &str,
    results: &Results,
    draw: fn(&str, &Results) -> Result<String>,
) -> Result<Chart> {
    let (file, lines) = description.split_once('\n').context("a chart has no lines")?;
    let file = file.trim().to_owned();
    let svg = draw(lines, results).with_context(|| file.clone())?;
    Ok(Chart { file, svg })
}

fn bars(description: &str, results: &Results) -> Result<String> {
    let mut bars = Bars { title: String::new(), lines: Vec::new(), longest: Longest::OfAll };
    for line in lines(description) {
        if let Some(title) = line.strip_prefix("title: ") {
            bars.title = title.into();
        } else if line == "scale: group" {
            bars.longest = Longest::OfGroup;
        } else if let Some(group) = line.strip_prefix("group: ") {
            bars.lines.push(Line::Group(group.into()));
        } else {
            let (label, named) = line
                .split_once(" = ")
                .with_context(|| format!("`{line}` is not `label = words`"))?;
            let value = results.value(&[words(named)], 0).with_context(|| label.to_owned())?;
            let unit = String::new();
            bars.lines.push(Line::Bar { label: label.into(), value: value.number, unit });
        }
    }
    let is_bar = |line: &Line| matches!(line, Line::Bar { .. });
    ensure!(bars.lines.iter().any(is_bar), "there are no bars");
    drawing::svg(&bars)
}

fn roofline(description: &str, results: &Results) -> Result<String> {
    let (mut title, mut device, mut rows) = ("", "", Vec::new());
    for line in lines(description) {
        match line.split_once(": ") {
            Some(("title", words)) => title = words,
            Some(("device", name)) => device = name,
            Some(("rows", named)) => {
                let found = Row::of_results(results, &words(named))?;
                ensure!(!found.is_empty(), "no row of benches/results is `{named}`");
                rows.extend(found);
            }
            _ => bail!("`{line}` is not `title: `, `device: ` or `rows: `"),
        }
    }
    drawing::svg(&Roofline::of_rows(&rows, device, title.to_owned())?)
}

fn lines(description: &str) -> impl Iterator<Item = &str> {
    description.lines().map(str::trim).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blackburn_bench::{results::Table, row::COLUMNS};

    /// What is wrong with a description.
    fn error(description: &str, draw: fn(&str, &Results) -> Result<String>) -> String {
        let none = Results(Vec::new());
        let error = chart(&format!("x.svg\n{description}\n"), &none, draw).err();
        error.map(|error| format!("{error:#}")).unwrap_or_default()
    }

    #[test]
    fn a_line_without_a_row_is_an_error() {
        let missing = error("Blackburn = gpt2", bars);
        assert_eq!(missing, "x.svg: Blackburn: no row of benches/results is `gpt2`");
        assert_eq!(error("title: x", bars), "x.svg: there are no bars");
        assert_eq!(error("Blackburn", bars), "x.svg: `Blackburn` is not `label = words`");
        let missing = error("rows: gpt2", roofline);
        assert_eq!(missing, "x.svg: no row of benches/results is `gpt2`");
        assert!(error("line: x", roofline).contains("`line: x` is not `title: `"));
    }

    #[test]
    fn groups_of_other_units_have_their_own_scale() {
        let text = include_str!("../../benches/runner/src/results/sample.tsv");
        let results = Results(vec![Table::parse("nvidia-h200.tsv", text).unwrap()]);
        let lines = "group: a\nBlackburn = gpt2 blackburn\ngroup: b\nother = gpt2 torch .median_ms";
        let full = |description: &str| {
            let svg = bars(description, &results).unwrap();
            svg.matches("width=\"510\"").count()
        };
        assert_eq!(full(lines), 1);
        assert_eq!(full(&format!("scale: group\n{lines}")), 2);
    }

    #[test]
    fn a_roofline_holds_the_rows_that_its_words_name() {
        let row = |op: &str, time: &str| {
            format!(
                "2026\tabc\t{op}\tforward\tbf16\t4096x4096x4096\tblackburn\t{time}\t-\t-\t-\t-\tNN"
            )
        };
        let text = [COLUMNS.join("\t"), row("matmul", "0.2"), row("linear", "0.3")].join("\n");
        let results = Results(vec![Table::parse("nvidia-h200.tsv", &text).unwrap()]);
        let points = |rows: &str| {
            let description = format!("title: Products\ndevice: NVIDIA H200\n{rows}");
            let svg = roofline(&description, &results).unwrap();
            assert!(svg.contains("Products") && svg.contains("memory: 4.8 TB/s"), "{svg}");
            // One is the legend's.
            svg.matches("<circle").count() - 1
        };
        assert_eq!(points("rows: nvidia-h200 matmul"), 1);
        assert_eq!(points("rows: nvidia-h200 matmul\nrows: abc linear"), 2);
    }
}
