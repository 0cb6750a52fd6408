//! `cargo xtask figures`: holds every measured figure of README and book to a row of
//! `benches/results`. `benches/README.md` explains the markers.

mod page;
mod results;

pub(crate) use results::{Results, Word, words};

use crate::command;
use anyhow::{Context, Result, bail};
use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// Compare the figures of README and book with the rows of benches/results.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Write the rows' figures into the pages, in the form that each has there.
    #[arg(long)]
    write: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let root = command::root();
    if arguments.write {
        let results = Results::read(&root.join("benches/results"))?;
        for path in pages(&root)? {
            let text = fs::read_to_string(root.join(&path))?;
            let written = rewritten(&text, &results);
            if written != text {
                fs::write(root.join(&path), written)?;
                println!("{}", path.display());
            }
        }
    }
    check(&root)
}

/// Fails with a list of the figures that no row has.
pub(crate) fn check(root: &Path) -> Result<()> {
    let results = Results::read(&root.join("benches/results"))?;
    let mut faults = Vec::new();
    for path in pages(root)? {
        let text = fs::read_to_string(root.join(&path))?;
        faults.extend(
            in_page(&text, &results)
                .into_iter()
                .map(|(line, fault)| format!("{}:{line}: {fault}", path.display())),
        );
    }
    for fault in &faults {
        eprintln!("{fault}");
    }
    match faults.len() {
        0 => Ok(()),
        count => bail!(
            "{count} figures differ from benches/results; `cargo xtask figures --write` corrects \
             numbers, benches/README.md explains markers"
        ),
    }
}

/// README and the book's chapters, relative to `root`.
fn pages(root: &Path) -> Result<Vec<PathBuf>> {
    let mut pages = vec![PathBuf::from("README.md")];
    for entry in fs::read_dir(root.join("book/src")).context("read book/src")? {
        let name = entry?.file_name();
        let path = Path::new("book/src").join(name);
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
    pages.sort();
    Ok(pages)
}

/// The faults of a page, with their lines.
fn in_page(text: &str, results: &Results) -> Vec<(usize, String)> {
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    let read = page::read(text);
    let mut faults: Vec<(usize, String)> = read
        .bare
        .iter()
        .map(|at| {
            let figure = &text[at.clone()];
            let advice = "name its row (`<!-- = ... -->`), or say `<!-- not measured: why -->`";
            (at.start, format!("{figure} stands without a marker: {advice}"))
        })
        .collect();
    for claim in &read.claims {
        let shown = &text[claim.at.clone()];
        let fault = match results.value(&claim.levels, claim.place) {
            Err(error) => format!("{shown}: {error:#}"),
            Ok(value) if Form::of(shown).is_some_and(|form| form.fits(shown, value.number)) => {
                continue;
            }
            Ok(value) => {
                let expected = Form::of(shown).map(|form| form.write(value.number));
                let expected = expected.unwrap_or_else(|| value.number.to_string());
                format!("{shown} should be {expected}: {}", places(&value.rows))
            }
        };
        faults.push((claim.at.start, fault));
    }
    faults.sort();
    faults.into_iter().map(|(at, fault)| (line(at), fault)).collect()
}

fn places(rows: &[String]) -> String {
    match rows {
        [first, second, third, _, ..] => {
            format!("{first}, {second}, {third} and {} more", rows.len() - 3)
        }
        _ => rows.join(", "),
    }
}

/// `text` with the rows' figures; what cannot be found is left as it is.
fn rewritten(text: &str, results: &Results) -> String {
    let mut edits: Vec<(Range<usize>, String)> = page::read(text)
        .claims
        .into_iter()
        .filter_map(|claim| {
            let value = results.value(&claim.levels, claim.place).ok()?;
            let form = Form::of(&text[claim.at.clone()])?;
            Some((claim.at, form.write(value.number)))
        })
        .collect();
    edits.sort_by_key(|(at, _)| at.start);
    let mut written = text.to_owned();
    for (at, number) in edits.into_iter().rev() {
        written.replace_range(at, &number);
    }
    written
}

/// How a number is written: `410k`, `1,541`, `0.32`.
pub(crate) struct Form {
    decimals: usize,
    is_thousands: bool,
    has_commas: bool,
}

impl Form {
    pub(crate) fn of(shown: &str) -> Option<Self> {
        let digits = shown.strip_suffix('k').unwrap_or(shown);
        let number: f64 = digits.replace(',', "").parse().ok()?;
        Some(Self {
            decimals: digits.split_once('.').map_or(0, |(_, decimals)| decimals.len()),
            is_thousands: digits.len() < shown.len(),
            has_commas: digits.contains(',') || number < 1000.0,
        })
    }

    /// Whether `shown` is `number`, rounded to the digits that it has.
    fn fits(&self, shown: &str, number: f64) -> bool {
        let digits = shown.trim_end_matches('k').replace(',', "");
        let Ok(shown) = digits.parse::<f64>() else { return false };
        let unit = 10f64.powi(-(self.decimals as i32));
        let number = if self.is_thousands { number / 1e3 } else { number };
        // A half may be rounded either way.
        (shown - number).abs() <= 0.5 * unit + 1e-9 * number.abs()
    }

    pub(crate) fn write(&self, number: f64) -> String {
        let number = if self.is_thousands { number / 1e3 } else { number };
        let mut written = format!("{number:.*}", self.decimals);
        if self.has_commas {
            let whole = written.find('.').unwrap_or(written.len());
            for at in (1..whole).rev().filter(|at| (whole - at) % 3 == 0) {
                written.insert(at, ',');
            }
        }
        written + if self.is_thousands { "k" } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use results::tests::sample;

    fn faults(text: &str) -> Vec<(usize, String)> {
        in_page(text, &sample())
    }

    #[test]
    fn a_figure_that_its_row_has_passes() {
        let text = "It makes 410k tokens/s<!-- = gpt2 blackburn -->, 1.35x<!-- = gpt2 blackburn / gpt2\n\
                    torch --> as many, in 6.8 GiB<!-- = gpt2 blackburn note:\"# GiB\" -->.\n";
        assert_eq!(faults(text), []);
    }

    #[test]
    fn a_stale_figure_is_named_with_its_row() {
        let text = "Now:\n\nIt makes 411k tokens/s<!-- = gpt2 blackburn -->.\n";
        let expected = "411k should be 410k: nvidia-h200.tsv:2".to_owned();
        assert_eq!(faults(text), [(3, expected)]);
        assert_eq!(rewritten(text, &sample()), text.replace("411k", "410k"));
    }

    #[test]
    fn a_figure_without_a_marker_and_one_without_a_row_are_named() {
        let found = faults("It makes 410k tokens/s.\n\n20 ms<!-- = gpt2 jax -->\n");
        assert!(found[0].1.starts_with("410k stands without a marker"), "{}", found[0].1);
        assert_eq!(found[1], (3, "20: no row of benches/results is `gpt2`, `jax`".to_owned()));
    }

    #[test]
    fn a_stale_cell_of_a_table_is_named() {
        let table = "<!-- = gpt2 .median_ms -->\n| | ms |\n|---|---|\n\
                     | Blackburn<!-- = blackburn --> | 20.0 |\n| torch<!-- = torch --> | 25.0 |\n";
        assert_eq!(faults(table), []);
        let stale = faults(&table.replace("25.0", "24.9"));
        assert_eq!(stale, [(5, "24.9 should be 25.0: nvidia-h200.tsv:3".to_owned())]);
    }

    #[test]
    fn numbers_keep_their_form() {
        for (shown, number, written) in [
            ("410k", 427_499.0, "427k"),
            ("1,541", 2_036.6, "2,037"),
            ("1541", 2_036.6, "2037"),
            ("0.32", 1.0 / 3.0, "0.33"),
            ("900", 1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(Form::of(shown).unwrap().write(number), written);
        }
        assert!(Form::of("0.5").unwrap().fits("0.5", 0.45));
        assert!(!Form::of("0.50").unwrap().fits("0.50", 0.49));
    }
}
