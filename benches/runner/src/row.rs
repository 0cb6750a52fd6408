//! A row of `benches/results`: what was measured, of what, when, and how.

use crate::results::{Results, Table, Word};
use anyhow::{Context, Result, ensure};
use std::{fs, path::Path};

/// The columns of a device's table, in their order.
pub const COLUMNS: [&str; 13] = [
    "date",
    "commit",
    "op",
    "pass",
    "dtype",
    "shape",
    "subject",
    "median_ms",
    "min_ms",
    "max_ms",
    "metric",
    "unit",
    "note",
];

/// The subject of rows that are ours.
pub const OURS: &str = "blackburn";

/// One measurement. Numbers keep the digits that they were written with; `-` stands for none.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Day of the run.
    pub date: String,
    /// Of this repository; in a peer's row the one that it was compared with.
    pub commit: String,
    /// What was computed.
    pub op: String,
    /// Forward, backward, both, a step.
    pub pass: String,
    /// What it was computed in.
    pub dtype: String,
    /// Sizes, and behind them what differs.
    pub shape: String,
    /// Who computed it.
    pub subject: String,
    /// Milliseconds.
    pub median_ms: String,
    /// Milliseconds of the fastest repetition.
    pub min_ms: String,
    /// Milliseconds of the slowest repetition.
    pub max_ms: String,
    /// The derived figure.
    pub metric: String,
    /// Of the metric.
    pub unit: String,
    /// All that is worth knowing besides.
    pub note: String,
}

/// What two rows have to have in common to be compared: op, pass, dtype, shape and subject. Rows of matrix
/// products of one shape differ by the layout, which stands in their notes.
pub type Key = [String; 6];

/// Layouts of matrix products, by the letters of both operands.
const LAYOUTS: [&str; 4] = ["NN", "NT", "TN", "TT"];

impl Row {
    /// From the fields of one line, in the order of [`COLUMNS`].
    ///
    /// # Errors
    ///
    /// When there are more or fewer.
    pub fn of_line(line: &str) -> Result<Self> {
        let fields: Vec<&str> = line.split('\t').collect();
        ensure!(
            fields.len() == COLUMNS.len(),
            "expected {} fields, separated by tabs, and found {}: {line}",
            COLUMNS.len(),
            fields.len()
        );
        let mut fields = fields.into_iter().map(str::to_owned);
        let mut next = || fields.next().unwrap_or_default();
        Ok(Self {
            date: next(),
            commit: next(),
            op: next(),
            pass: next(),
            dtype: next(),
            shape: next(),
            subject: next(),
            median_ms: next(),
            min_ms: next(),
            max_ms: next(),
            metric: next(),
            unit: next(),
            note: next(),
        })
    }

    /// A row without numbers and without an origin.
    pub fn blank(op: &str, pass: &str, dtype: &str, shape: &str, subject: &str) -> Self {
        let [op, pass, dtype, shape, subject] =
            [op, pass, dtype, shape, subject].map(str::to_owned);
        let [date, commit, median_ms, min_ms, max_ms, metric, unit] = [(); 7].map(|()| "-".into());
        let note = String::new();
        Self {
            date,
            commit,
            op,
            pass,
            dtype,
            shape,
            subject,
            median_ms,
            min_ms,
            max_ms,
            metric,
            unit,
            note,
        }
    }

    /// As a line of a table, without its end.
    pub fn line(&self) -> String {
        [
            &self.date,
            &self.commit,
            &self.op,
            &self.pass,
            &self.dtype,
            &self.shape,
            &self.subject,
            &self.median_ms,
            &self.min_ms,
            &self.max_ms,
            &self.metric,
            &self.unit,
            &self.note,
        ]
        // What ends a field or a row must not stand in one.
        .map(|field| field.replace(['\t', '\n', '\r'], " "))
        .join("\t")
    }

    /// Rows of a file. A file that a run wrote has no header, so that it can be put behind a table as it is.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, or has other columns.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        Self::of_table(&table(path)?)
    }

    /// Rows of all devices that all of some words name.
    ///
    /// # Errors
    ///
    /// When a named table has other columns.
    pub fn of_results(results: &Results, words: &[Word]) -> Result<Vec<Self>> {
        let mut rows = Vec::new();
        for table in &results.0 {
            let named = table.named(words);
            if !named.rows.is_empty() {
                rows.extend(Self::of_table(&named)?);
            }
        }
        Ok(rows)
    }

    /// Rows of a device's table.
    ///
    /// # Errors
    ///
    /// When it has other columns.
    pub fn of_table(table: &Table) -> Result<Vec<Self>> {
        ensure!(
            table.header == COLUMNS,
            "{} has the columns {}, and rows of a device have {}",
            table.name,
            table.header.join(" "),
            COLUMNS.join(" ")
        );
        table.rows.iter().map(|(_, fields)| Self::of_line(&fields.join("\t"))).collect()
    }

    /// Milliseconds, where they were measured.
    pub fn median(&self) -> Option<f64> {
        number(&self.median_ms)
    }

    /// The derived figure, where there is one.
    pub fn rate(&self) -> Option<f64> {
        number(&self.metric)
    }

    /// What time it tells: milliseconds, or those of a million items where only a rate is known.
    pub fn cost(&self) -> Option<f64> {
        let is_rate = self.unit.ends_with("/s");
        self.median().or_else(|| self.rate().filter(|_| is_rate).map(|rate| 1e9 / rate))
    }

    /// Whether it is of Blackburn.
    pub fn is_ours(&self) -> bool {
        self.subject == OURS
    }

    /// What it may be compared with.
    pub fn key(&self) -> Key {
        [
            self.op.clone(),
            self.pass.clone(),
            self.dtype.clone(),
            self.shape.clone(),
            self.subject.clone(),
            self.layout().to_owned(),
        ]
    }

    /// Of a matrix product, by its note; empty otherwise.
    pub fn layout(&self) -> &str {
        if !["matmul", "linear"].contains(&self.op.as_str()) {
            return "";
        }
        let words = || self.note.split([';', ',', ' ']).map(str::trim);
        words().find(|word| LAYOUTS.contains(word)).unwrap_or_default()
    }

    /// Op, pass, dtype and shape as people read them.
    pub fn name(&self) -> String {
        let Self { op, pass, dtype, shape, .. } = self;
        format!("{op} {pass} {dtype} {shape} {}", self.layout()).trim_end().to_owned()
    }

    /// Puts words behind the note.
    pub fn add_note(&mut self, words: &str) {
        let end = self.note.trim_end_matches([' ', ';']).len();
        self.note.truncate(end);
        if !self.note.is_empty() && !words.is_empty() {
            self.note.push_str("; ");
        }
        self.note.push_str(words);
    }
}

/// A positive number that a field holds.
fn number(field: &str) -> Option<f64> {
    field.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0)
}

/// A file of rows of a device, with or without a header.
///
/// # Errors
///
/// When it cannot be read, or its rows have more or fewer fields than its header.
pub fn table(path: &Path) -> Result<Table> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    let has_header = lines.next().is_some_and(|line| line.split('\t').next() == Some(COLUMNS[0]));
    match has_header {
        true => Table::parse(&name, &text),
        false => Table::with_header(&name, &COLUMNS, &text),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A row that `fields` describes: op, pass, dtype, shape, subject, median, metric, unit, note.
    pub(crate) fn row(fields: [&str; 9]) -> Row {
        let [op, pass, dtype, shape, subject, median_ms, metric, unit, note] = fields;
        Row {
            median_ms: median_ms.into(),
            metric: metric.into(),
            unit: unit.into(),
            note: note.into(),
            date: "2026-01-01".into(),
            commit: "abc1234".into(),
            ..Row::blank(op, pass, dtype, shape, subject)
        }
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let line =
            "2026-01-01\tabc\tsum\tforward\tbf16\t8x8\tblackburn\t0.0120\t-\t-\t3.10\tGB/s\tx; y";
        let read = Row::of_line(line).unwrap();
        assert_eq!(
            (read.line().as_str(), read.median(), read.rate()),
            (line, Some(0.012), Some(3.1))
        );
        let error = Row::of_line("a\tb").unwrap_err().to_string();
        assert!(error.starts_with("expected 13 fields, separated by tabs, and found 2"), "{error}");
    }

    #[test]
    fn what_is_no_time_is_none() {
        for median in ["-", "", "NaN", "inf", "0", "-1.0"] {
            let row = row(["sum", "forward", "f32", "8", OURS, median, "-", "-", ""]);
            assert_eq!(row.median(), None, "{median}");
        }
    }

    #[test]
    fn products_of_one_shape_differ_by_their_layout() {
        let product = |note| row(["matmul", "forward", "bf16", "8x8x8", OURS, "1", "-", "-", note]);
        assert_ne!(product("head; NN; plan").key(), product("head; NT; plan").key());
        assert_eq!(product("a; NT; plan").key(), product("b, NT; NT; other plan").key());
    }

    #[test]
    fn a_note_grows_by_one_separator_and_a_field_stays_one() {
        let mut row = row(["sum", "forward", "f32", "8", OURS, "1", "-", "-", "ops_sweep; "]);
        row.add_note("driver 1\t2");
        assert_eq!(row.note, "ops_sweep; driver 1\t2");
        assert_eq!(row.line().split('\t').count(), 13);
        row.note.clear();
        row.add_note("driver 1");
        assert_eq!(row.note, "driver 1");
    }

    #[test]
    fn a_file_is_read_with_and_without_its_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.tsv");
        let written = row(["sum", "forward", "f32", "8", OURS, "1", "-", "-", "n"]);
        let body = format!("# a comment\n{}\n", written.line());
        for text in [body.clone(), format!("{}\n{body}", COLUMNS.join("\t"))] {
            fs::write(&path, text).unwrap();
            assert_eq!(Row::read(&path).unwrap(), std::slice::from_ref(&written));
        }
        fs::write(&path, "date\tcommit\n2026\tabc\n").unwrap();
        let error = Row::read(&path).unwrap_err().to_string();
        assert!(error.contains("rows.tsv has the columns date commit, and rows"), "{error}");
    }
}
