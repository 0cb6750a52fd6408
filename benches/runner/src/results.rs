//! The tables of `benches/results`, and the row that a marker's words name.

use anyhow::{Context, Result, bail, ensure};
use std::{collections::BTreeMap, fs, path::Path};

/// FLOPs that GPT-2 small spends on a token as llm.c counts them, `6 N + 6 L C T`: 124,439,808
/// parameters (the head, which llm.c shares with the embedding, once), 12 layers, 768 channels,
/// 1024 tokens.
const GPT2_FLOPS: f64 = 6.0 * 124_439_808.0 + 6.0 * 12.0 * 768.0 * 1024.0;
/// The same with attention counted as if it were not causal, as llm.c did until June 2024.
const GPT2_FLOPS_FULL_ATTENTION: f64 = GPT2_FLOPS + 6.0 * 12.0 * 768.0 * 1024.0;
/// Dense bf16 of an H100 or H200 SXM by NVIDIA's data sheet.
const HOPPER_FLOPS: f64 = 989e12;

/// A word of a marker. In quotes it may hold spaces, and `;` does not part alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Word {
    /// Without its quotes.
    pub text: String,
    quoted: bool,
}

/// The words of a marker: apart by white space, `"one word"` in quotes.
pub fn words(text: &str) -> Vec<Word> {
    let (mut words, mut word) = (Vec::new(), Word { text: String::new(), quoted: false });
    let mut inside = false;
    for character in text.chars().chain([' ']) {
        match character {
            '"' => {
                inside = !inside;
                word.quoted = true;
            }
            _ if character.is_whitespace() && !inside => {
                if !word.text.is_empty() {
                    words.push(word.clone());
                }
                word = Word { text: String::new(), quoted: false };
            }
            _ => word.text.push(character),
        }
    }
    words
}

/// How many numbers a marker names: `a;b` names two.
pub fn alternatives(words: &[Word]) -> usize {
    words
        .iter()
        .filter(|word| !word.quoted)
        .map(|word| word.text.split(';').count())
        .max()
        .unwrap_or(1)
}

/// One file of results.
pub struct Table {
    /// Of the file.
    pub name: String,
    /// Names of the columns.
    pub header: Vec<String>,
    /// The line in the file, and its fields.
    pub rows: Vec<(usize, Vec<String>)>,
}

impl Table {
    /// Reads tab-separated `text` with a header; lines that begin with `#` are comments.
    ///
    /// # Errors
    ///
    /// When there is no header, or a row has more or fewer fields.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let (_, header) = lines(text).next().with_context(|| format!("{name} has no header"))?;
        Self::of_lines(name, header, lines(text).skip(1))
    }

    /// The same of `text` whose header was left out.
    ///
    /// # Errors
    ///
    /// When a row has more or fewer fields.
    pub fn with_header(name: &str, header: &[&str], text: &str) -> Result<Self> {
        Self::of_lines(
            name,
            header.iter().map(|column| (*column).to_owned()).collect(),
            lines(text),
        )
    }

    fn of_lines(
        name: &str,
        header: Vec<String>,
        lines: impl Iterator<Item = (usize, Vec<String>)>,
    ) -> Result<Self> {
        let rows: Vec<_> = lines.collect();
        for (line, fields) in &rows {
            ensure!(
                fields.len() == header.len(),
                "{name}:{line} has {} fields, and the header {}",
                fields.len(),
                header.len()
            );
        }
        Ok(Self { name: name.to_owned(), header, rows })
    }

    /// The rows that all of some words name.
    pub fn named(&self, words: &[Word]) -> Self {
        let is_named = |row: &[String]| words.iter().all(|word| self.matches(row, &word.text));
        let rows = self.rows.iter().filter(|(_, row)| is_named(row)).cloned().collect();
        Self { name: self.name.clone(), header: self.header.clone(), rows }
    }

    fn field<'a>(&self, row: &'a [String], column: &str) -> Option<&'a str> {
        let index = self.header.iter().position(|name| name == column)?;
        row.get(index).map(String::as_str)
    }

    /// Whether a field is `word`, or that of the column where the word is `column=field`.
    fn matches(&self, row: &[String], word: &str) -> bool {
        if let Some((column, wanted)) = word.split_once('=')
            && let Some(field) = self.field(row, column)
        {
            return glob(wanted, field);
        }
        let stem = self.name.trim_end_matches(".tsv");
        std::iter::once(stem).chain(row.iter().map(String::as_str)).any(|field| glob(word, field))
    }
}

/// The lines that are no comments, with their numbers, as fields.
fn lines(text: &str) -> impl Iterator<Item = (usize, Vec<String>)> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty())
        .map(|(number, line)| (number + 1, line.split('\t').map(str::to_owned).collect()))
}

/// All files of results.
pub struct Results(pub Vec<Table>);

/// What a marker's words come to.
#[derive(Debug)]
pub struct Value {
    /// A field of one row, or what several come to.
    pub number: f64,
    /// `file:line` of every row in it.
    pub rows: Vec<String>,
}

impl Results {
    /// Reads the tables of a folder.
    ///
    /// # Errors
    ///
    /// When one cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut tables = Vec::new();
        let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "tsv") {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                tables.push(Table::parse(&name, &fs::read_to_string(&path)?)?);
            }
        }
        tables.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self(tables))
    }

    /// The value that the words of all `levels` name together (those of the table, the column, the
    /// row, the cell), with the alternative number `place` of each. `/` parts a level into what
    /// is above and what is below a fraction's line; words without it belong to both.
    ///
    /// # Errors
    ///
    /// When no row or several have the words, or the one has no such number.
    pub fn value(&self, levels: &[Vec<Word>], place: usize) -> Result<Value> {
        let (mut above, mut below, mut is_ratio) = (Vec::new(), Vec::new(), false);
        for level in levels {
            let mut sides = level.split(|word| word.text == "/");
            let first = sides.next().unwrap_or_default();
            let second = sides.next();
            is_ratio |= second.is_some();
            above.extend_from_slice(first);
            below.extend_from_slice(second.unwrap_or(first));
        }
        let query = Query::new(&above, place)?;
        let above = self.select(&query)?;
        if !is_ratio {
            ensure!(query.over.is_none(), "`geomean`, `least` and `most` are of ratios: a / b");
            return single(&query, above);
        }
        let below_query = Query::new(&below, place)?;
        let below = self.select(&below_query)?;
        let Some(over) = query.over else {
            let (above, below) = (single(&query, above)?, single(&below_query, below)?);
            let rows = above.rows.into_iter().chain(below.rows).collect();
            return Ok(Value { number: above.number / below.number, rows });
        };
        let mut ratios = Vec::new();
        let mut rows = Vec::new();
        for (key, value) in &above {
            let Some(other) = below.get(key) else { continue };
            for found in [value, other] {
                ensure!(!found.is_ambiguous, "several rows for {key}: {}", found.rows.join(", "));
                rows.extend(found.rows.iter().cloned());
            }
            ratios.push(value.number / other.number);
        }
        ensure!(!ratios.is_empty(), "no row of {query} has a peer of {below_query}");
        let number = match over {
            Over::Geomean => {
                (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
            }
            Over::Least => ratios.iter().copied().fold(f64::INFINITY, f64::min),
            Over::Most => ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        };
        Ok(Value { number, rows })
    }

    /// Values by op, dtype and shape (and pass).
    fn select(&self, query: &Query) -> Result<BTreeMap<String, Found>> {
        if !query.both {
            return self.select_pass(query, None);
        }
        let measured = self.select_pass(query, Some("forward_backward"))?;
        if !measured.is_empty() {
            return Ok(measured);
        }
        let mut forward = self.select_pass(query, Some("forward"))?;
        for (key, backward) in self.select_pass(query, Some("backward"))? {
            if let Some(found) = forward.get_mut(&key) {
                found.number += backward.number;
                found.rows.extend(backward.rows);
                found.is_ambiguous |= backward.is_ambiguous;
            }
        }
        Ok(forward)
    }

    fn select_pass(&self, query: &Query, pass: Option<&str>) -> Result<BTreeMap<String, Found>> {
        let mut found = BTreeMap::<String, Found>::new();
        for table in &self.0 {
            for (line, row) in &table.rows {
                let is_meant = query.words.iter().all(|word| table.matches(row, word))
                    && pass.is_none_or(|pass| table.field(row, "pass") == Some(pass));
                if !is_meant {
                    continue;
                }
                let place = format!("{}:{line}", table.name);
                let number = query.column.of(table, row).with_context(|| {
                    format!("{place} has no number for {}", query.column.shown())
                })?;
                let columns: &[&str] = match pass {
                    Some(_) => &["op", "dtype", "shape"],
                    None => &["op", "pass", "dtype", "shape"],
                };
                let parts: Vec<_> =
                    columns.iter().filter_map(|column| table.field(row, column)).collect();
                let key = if parts.is_empty() { place.clone() } else { parts.join(" ") };
                let number = number * query.scale;
                match found.get_mut(&key) {
                    None => {
                        found.insert(key, Found { number, rows: vec![place], is_ambiguous: false });
                    }
                    Some(other) => {
                        other.is_ambiguous = true;
                        other.rows.push(place);
                    }
                }
            }
        }
        Ok(found)
    }
}

struct Found {
    number: f64,
    rows: Vec<String>,
    is_ambiguous: bool,
}

fn single(query: &Query, mut found: BTreeMap<String, Found>) -> Result<Value> {
    let several = found.len() > 1 || found.values().any(|value| value.is_ambiguous);
    if several {
        let rows: Vec<_> = found.values().flat_map(|value| &value.rows).cloned().collect();
        bail!("{} rows are {query}: {}; add a word that only one has", rows.len(), rows.join(", "));
    }
    match found.pop_first() {
        Some((_, value)) => Ok(Value { number: value.number, rows: value.rows }),
        None => bail!("no row of benches/results is {query}"),
    }
}

#[derive(Clone, Copy)]
enum Over {
    Geomean,
    Least,
    Most,
}

/// Where in a row the number stands.
enum Column {
    Named(String),
    /// In the note, where the pattern has `#`.
    Note(String),
}

impl Column {
    fn of(&self, table: &Table, row: &[String]) -> Option<f64> {
        match self {
            Self::Named(name) => table.field(row, name)?.parse().ok(),
            Self::Note(pattern) => {
                let note = table.field(row, "note")?;
                let (before, after) = pattern.split_once('#')?;
                note.match_indices(before).find_map(|(at, _)| {
                    let rest = &note[at + before.len()..];
                    let digit = |c: char| c.is_ascii_digit() || c == '.';
                    let end = rest.find(|c| !digit(c)).unwrap_or(rest.len());
                    rest[end..].starts_with(after).then(|| rest[..end].parse().ok())?
                })
            }
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Named(name) => format!("`{name}`"),
            Self::Note(pattern) => format!("\"{pattern}\" in its note"),
        }
    }
}

struct Query {
    words: Vec<String>,
    column: Column,
    scale: f64,
    both: bool,
    over: Option<Over>,
}

impl Query {
    fn new(words: &[Word], place: usize) -> Result<Self> {
        let mut query = Self {
            words: Vec::new(),
            column: Column::Named("metric".into()),
            scale: 1.0,
            both: false,
            over: None,
        };
        for word in words {
            let text = match word.quoted {
                true => word.text.as_str(),
                false => match word.text.split(';').collect::<Vec<_>>()[..] {
                    [only] => only,
                    ref several => *several.get(place).with_context(|| {
                        format!("a number too many: `{}` names {}", word.text, several.len())
                    })?,
                },
            };
            if let Some(column) = text.strip_prefix('.') {
                query.column = Column::Named(column.to_owned());
            } else if let Some(pattern) = text.strip_prefix("note:") {
                query.column = Column::Note(pattern.to_owned());
            } else if let Some(scale) = text.strip_prefix("scale=") {
                query.scale = scale.parse().with_context(|| format!("`{text}`"))?;
            } else {
                match text {
                    "both" => query.both = true,
                    "geomean" => query.over = Some(Over::Geomean),
                    "least" => query.over = Some(Over::Least),
                    "most" => query.over = Some(Over::Most),
                    "mfu" => query.scale = 100.0 * GPT2_FLOPS / HOPPER_FLOPS,
                    "mfu-full" => query.scale = 100.0 * GPT2_FLOPS_FULL_ATTENTION / HOPPER_FLOPS,
                    _ => query.words.push(text.to_owned()),
                }
            }
        }
        ensure!(!query.words.is_empty(), "the marker names no row");
        Ok(query)
    }
}

impl std::fmt::Display for Query {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "`{}`", self.words.join("`, `"))
    }
}

/// Whether `text` is `pattern`, in which `*` stands for anything.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|tail| {
            tail.char_indices()
                .map(|(at, _)| at)
                .chain([tail.len()])
                .any(|at| glob(rest, &tail[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Results {
        let text = include_str!("results/sample.tsv");
        Results(vec![Table::parse("nvidia-h200.tsv", text).unwrap()])
    }

    fn value(text: &str) -> Result<f64> {
        Ok(sample().value(&[words(text)], 0)?.number)
    }

    #[test]
    fn words_name_one_row_and_a_column_of_it() {
        assert_eq!(value("nvidia-h200 gpt2 blackburn").unwrap(), 410_400.0);
        assert_eq!(value("gpt2 B* blackburn .median_ms").unwrap(), 20.0);
        assert_eq!(value("gpt2 subject=torch").unwrap(), 304_000.0);
        assert_eq!(value("gpt2 blackburn note:\"cold # s\"").unwrap(), 19.4);
        assert_eq!(value("gpt2 blackburn note:\"# GiB reserved\"").unwrap(), 6.77);
    }

    #[test]
    fn a_missing_row_and_an_ambiguous_one_are_told() {
        let missing = value("gpt2 burn").unwrap_err().to_string();
        assert_eq!(missing, "no row of benches/results is `gpt2`, `burn`");
        let several = value("gpt2 bf16").unwrap_err().to_string();
        assert!(several.starts_with("2 rows are `gpt2`, `bf16`: nvidia-h200.tsv:2"), "{several}");
        assert!(value("attention forward Q1 blackburn .metric").is_err());
    }

    #[test]
    fn ratios_take_the_common_words_on_both_sides() {
        let ratio = value("gpt2 / gpt2 torch").unwrap_err().to_string();
        assert!(ratio.contains("add a word"), "{ratio}");
        let levels = [words("gpt2 .metric"), words("blackburn / torch")];
        assert_eq!(sample().value(&levels, 0).unwrap().number, 410_400.0 / 304_000.0);
    }

    #[test]
    fn both_passes_are_added_where_they_were_measured_apart() {
        assert_eq!(value("attention Q1 blackburn both .median_ms").unwrap(), 4.0);
        assert_eq!(value("attention Q1 torch both .median_ms").unwrap(), 2.0);
        let all = |over: &str| {
            let levels =
                [words("attention both .median_ms"), words(over), words("torch / blackburn")];
            sample().value(&levels, 0).unwrap().number
        };
        assert!((all("geomean") - 0.25).abs() < 1e-12);
        assert_eq!((all("least"), all("most")), (0.125, 0.5));
    }

    #[test]
    fn alternatives_follow_the_numbers_of_a_cell() {
        let levels = [words("gpt2 blackburn;torch .median_ms")];
        assert_eq!(sample().value(&levels, 1).unwrap().number, 25.0);
        assert!(sample().value(&levels, 2).unwrap_err().to_string().contains("a number too many"));
        assert_eq!(alternatives(&words("\"a;b\" c;d;e")), 3);
    }

    #[test]
    fn utilization_is_by_the_convention_of_llm_c() {
        // 410,400 tokens/s at 803.3 MFLOP each, of 989 TFLOP/s.
        assert!((value("gpt2 blackburn mfu").unwrap() - 33.33).abs() < 0.01);
        assert!((value("gpt2 blackburn mfu-full").unwrap() - 35.68).abs() < 0.01);
    }

    #[test]
    fn a_row_with_a_field_too_few_is_refused() {
        let error = Table::parse("x.tsv", "a\tb\n1\n").err().unwrap().to_string();
        assert_eq!(error, "x.tsv:2 has 1 fields, and the header 2");
    }
}
