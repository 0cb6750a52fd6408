//! `cargo xtask figures`: holds every measured figure of README and book to a row of
//! `benches/results`. `benches/README.md` explains the markers.

mod page;

use crate::command;
use anyhow::{Context, Result, bail};
use blackburn_bench::{number::Form, results::Results};
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
pub(crate) fn pages(root: &Path) -> Result<Vec<PathBuf>> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use blackburn_bench::results::Table;

    fn sample() -> Results {
        let text = include_str!("../../../benches/runner/src/results/sample.tsv");
        Results(vec![Table::parse("nvidia-h200.tsv", text).unwrap()])
    }

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
}
