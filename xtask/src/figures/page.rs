//! The numbers of a Markdown page, and the markers that say where each is from.

use blackburn_bench::results::{Word, alternatives, words};
use std::ops::Range;

/// What makes a number a measured figure.
const UNITS: [&str; 21] = [
    "tokens/s",
    "tokens a second",
    "images/s",
    "samples/s",
    "TFLOP/s",
    "GB/s",
    "TB/s",
    "ms",
    "us",
    "microseconds",
    "milliseconds",
    "s",
    "seconds",
    "minutes",
    "MB",
    "GB",
    "MiB",
    "GiB",
    "%",
    "times",
    "x",
];

/// What joins numbers in front of one unit: `0.1 / 0.3 ms`.
const JOINTS: [&str; 5] = ["/", "to", "and", "or", ","];

/// A number with the words that name its row.
pub(crate) struct Claim {
    pub(crate) at: Range<usize>,
    pub(crate) levels: Vec<Vec<Word>>,
    /// Which alternative of `a;b` it takes.
    pub(crate) place: usize,
}

/// What [`read`] finds.
#[derive(Default)]
pub(crate) struct Page {
    pub(crate) claims: Vec<Claim>,
    /// Figures without a marker.
    pub(crate) bare: Vec<Range<usize>>,
}

enum Marker {
    Cited(Vec<Word>),
    NotMeasured,
}

/// What a table says about its cells.
#[derive(Clone, Default)]
struct Scope {
    levels: Vec<Vec<Word>>,
    /// A number needs no unit to be a figure.
    has_unit: bool,
    is_exempt: bool,
}

impl Scope {
    fn add(&mut self, markers: &[(usize, Marker)]) {
        for (_, marker) in markers {
            match marker {
                Marker::Cited(words) => self.levels.push(words.clone()),
                Marker::NotMeasured => self.is_exempt = true,
            }
        }
    }
}

/// The claims and the bare figures of a page; code is left out.
pub(crate) fn read(text: &str) -> Page {
    let mut page = Page::default();
    let mut scope = Scope::default();
    let mut lines = lines(text).into_iter().peekable();
    let mut fence = None;
    while let Some(line) = lines.next() {
        let start = text[line.clone()].trim_start();
        let mark = ["```", "~~~"].into_iter().find(|mark| start.starts_with(mark));
        match (fence, mark) {
            (None, Some(mark)) => fence = Some(mark),
            (Some(open), Some(mark)) if open == mark => fence = None,
            _ => {}
        }
        if fence.is_some() || mark.is_some() || start.trim().is_empty() {
            continue;
        }
        let is_row = start.starts_with('|');
        let mut block = vec![line];
        let belongs = |next: &Range<usize>| {
            let next = text[next.clone()].trim_start();
            !next.trim().is_empty()
                && next.starts_with('|') == is_row
                && !next.starts_with("```")
                && !next.starts_with("~~~")
        };
        while let Some(next) = lines.next_if(belongs) {
            block.push(next);
        }
        if is_row {
            page.table(text, &block, std::mem::take(&mut scope));
            continue;
        }
        let range = block[0].start..block[block.len() - 1].end;
        let markers = markers(text, &range);
        let masked = masked(text, range.clone());
        scope = Scope::default();
        if masked.iter().all(u8::is_ascii_whitespace) {
            // A marker that stands alone is for the table behind it.
            scope.add(&markers);
        } else {
            page.prose(text, &range);
        }
    }
    page
}

fn lines(text: &str) -> Vec<Range<usize>> {
    let mut start = 0;
    text.split_inclusive('\n')
        .map(|line| {
            start += line.len();
            start - line.len()..start
        })
        .collect()
}

impl Page {
    /// A marker stands behind its number, and one with alternatives behind its numbers.
    fn prose(&mut self, text: &str, range: &Range<usize>) {
        let mut numbers = numbers(text, range).into_iter().peekable();
        for (at, marker) in markers(text, range) {
            let mut before = Vec::new();
            while let Some(number) = numbers.next_if(|number| number.at.start < at) {
                before.push(number);
            }
            let Marker::Cited(words) = marker else { continue };
            let rest = before.len().saturating_sub(alternatives(&words));
            for (place, number) in before.drain(rest..).enumerate() {
                self.claims.push(Claim { at: number.at, levels: vec![words.clone()], place });
            }
            self.bare(before.into_iter());
        }
        self.bare(numbers);
    }

    fn bare(&mut self, numbers: impl Iterator<Item = Number>) {
        self.bare.extend(numbers.filter(|number| number.has_unit).map(|number| number.at));
    }

    fn table(&mut self, text: &str, block: &[Range<usize>], scope: Scope) {
        let cells: Vec<Vec<Range<usize>>> = block.iter().map(|line| cells(text, line)).collect();
        let Some((header, rows)) = cells.split_first() else { return };
        let unit_of = |cell: &Range<usize>| {
            let shown = String::from_utf8_lossy(&masked(text, cell.clone())).into_owned();
            shown
                .split(|c: char| c.is_whitespace() || ",;()".contains(c))
                .any(|word| UNITS.contains(&word) && !["s", "x"].contains(&word))
        };
        let corner = header.first().is_some_and(unit_of);
        let columns: Vec<Scope> = header
            .iter()
            .map(|cell| {
                let mut column = scope.clone();
                column.has_unit = corner || unit_of(cell);
                column.add(&markers(text, cell));
                column
            })
            .collect();
        // The line below the header has no numbers.
        for row in rows {
            let Some((label, values)) = row.split_first() else { continue };
            for (cell, column) in values.iter().zip(columns.iter().skip(1)) {
                let mut scope = column.clone();
                scope.add(&markers(text, label));
                self.cell(text, cell, &scope);
            }
        }
    }

    fn cell(&mut self, text: &str, cell: &Range<usize>, scope: &Scope) {
        let mut numbers = numbers(text, cell).into_iter().peekable();
        for (at, marker) in markers(text, cell) {
            let mut place = 0;
            while let Some(number) = numbers.next_if(|number| number.at.start < at) {
                if let Marker::Cited(words) = &marker {
                    let levels = scope.levels.iter().cloned().chain([words.clone()]).collect();
                    self.claims.push(Claim { at: number.at, levels, place });
                }
                place += 1;
            }
        }
        for (place, number) in numbers.enumerate() {
            if scope.is_exempt {
                continue;
            } else if !scope.levels.is_empty() {
                self.claims.push(Claim { at: number.at, levels: scope.levels.clone(), place });
            } else if number.has_unit || scope.has_unit {
                self.bare.push(number.at);
            }
        }
    }
}

struct Number {
    at: Range<usize>,
    has_unit: bool,
}

/// The numbers within `range` that are words of their own, such as `410k`, `1,541` or `0.32`.
fn numbers(text: &str, range: &Range<usize>) -> Vec<Number> {
    let bytes = masked(text, range.clone());
    let (mut found, mut at): (Vec<Number>, _) = (Vec::new(), 0);
    while at < bytes.len() {
        if !bytes[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let start = at;
        while at < bytes.len() && (bytes[at].is_ascii_digit() || b".,".contains(&bytes[at])) {
            at += 1;
        }
        let mut end = at;
        while b".,".contains(&bytes[end - 1]) {
            end -= 1;
        }
        let before = start.checked_sub(1).map_or(b' ', |before| bytes[before]);
        let is_name = before.is_ascii_alphanumeric() || b"-_^#.".contains(&before);
        let digits = &bytes[start..end];
        let is_version = digits.iter().filter(|byte| **byte == b'.').count() > 1;
        let mut behind = end;
        if bytes.get(end) == Some(&b'k') && !alphanumeric(bytes.get(end + 1)) {
            behind += 1;
        }
        if is_name
            || is_version
            || (bytes.get(behind) == Some(&b'-') && alphanumeric(bytes.get(behind + 1)))
        {
            continue;
        }
        // `410k` is a figure without a unit, too.
        let has_unit = behind > end || unit_behind(&bytes[behind..]);
        found.push(Number { at: range.start + start..range.start + behind, has_unit });
        at = at.max(behind);
    }
    // A number that is joined to one with a unit has that unit.
    for index in (1..found.len()).rev() {
        let between =
            &bytes[found[index - 1].at.end - range.start..found[index].at.start - range.start];
        let between = String::from_utf8_lossy(between);
        if found[index].has_unit && JOINTS.contains(&between.trim()) {
            found[index - 1].has_unit = true;
        }
    }
    found
}

fn alphanumeric(byte: Option<&u8>) -> bool {
    byte.is_some_and(u8::is_ascii_alphanumeric)
}

fn unit_behind(bytes: &[u8]) -> bool {
    let spaces = bytes.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    UNITS.iter().any(|unit| {
        // `8192 x 768` is a shape, `1.15x` a ratio; and a line may break in `tokens a second`.
        let fits = bytes[spaces..].starts_with(unit.as_bytes()) && (*unit != "x" || spaces == 0);
        fits && !bytes
            .get(spaces + unit.len())
            .is_some_and(|next| next.is_ascii_alphanumeric() || *next == b'/')
    })
}

/// The bytes of `range` with comments, code and targets of links as spaces.
fn masked(text: &str, range: Range<usize>) -> Vec<u8> {
    let mut bytes = text.as_bytes()[range].to_vec();
    for (open, close) in [("<!--", "-->"), ("`", "`"), ("](", ")")] {
        let mut at = 0;
        while let Some(start) = find(&bytes, open.as_bytes(), at) {
            let inside = start + open.len();
            let end =
                find(&bytes, close.as_bytes(), inside).map_or(bytes.len(), |end| end + close.len());
            bytes[start..end].fill(b' ');
            at = end;
        }
    }
    bytes
}

fn find(bytes: &[u8], wanted: &[u8], from: usize) -> Option<usize> {
    let rest = bytes.get(from..)?;
    rest.windows(wanted.len()).position(|window| window == wanted).map(|at| from + at)
}

/// The markers within `range`, with their places.
fn markers(text: &str, range: &Range<usize>) -> Vec<(usize, Marker)> {
    let block = &text[range.clone()];
    block
        .match_indices("<!--")
        .filter_map(|(at, open)| {
            let (comment, _) = block[at + open.len()..].split_once("-->")?;
            let comment = comment.trim();
            let marker = match comment.strip_prefix("= ") {
                Some(cited) => Marker::Cited(words(cited)),
                None if comment.starts_with("not measured: ") => Marker::NotMeasured,
                None => return None,
            };
            Some((range.start + at, marker))
        })
        .collect()
}

/// The cells of a table's line.
fn cells(text: &str, line: &Range<usize>) -> Vec<Range<usize>> {
    let row = &text[line.clone()];
    let bars: Vec<usize> =
        row.match_indices('|').map(|(at, _)| at).filter(|at| !row[..*at].ends_with('\\')).collect();
    bars.windows(2).map(|pair| line.start + pair[0] + 1..line.start + pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(text: &str) -> Vec<String> {
        read(text).bare.into_iter().map(|at| text[at].to_owned()).collect()
    }

    fn claims(text: &str) -> Vec<(String, String, usize)> {
        let shown = |claim: Claim| {
            let levels = claim.levels.iter().map(|level| {
                level.iter().map(|word| word.text.clone()).collect::<Vec<_>>().join(" ")
            });
            (text[claim.at].to_owned(), levels.collect::<Vec<_>>().join(" | "), claim.place)
        };
        read(text).claims.into_iter().map(shown).collect()
    }

    fn claim(number: &str, levels: &str, place: usize) -> (String, String, usize) {
        (number.to_owned(), levels.to_owned(), place)
    }

    #[test]
    fn every_figure_with_a_unit_needs_a_marker() {
        for figure in
            ["410k tokens/s", "20.0 ms", "6.77 GiB", "35 %", "1.15x", "1.5 times", "26\ns."]
        {
            assert_eq!(bare(&format!("It makes {figure}\n")).len(), 1, "{figure}");
        }
        assert_eq!(bare("It takes 0.10 / 0.32 ms, 3 to 4 s.\n"), ["0.10", "0.32", "3", "4"]);
    }

    #[test]
    fn sizes_names_versions_and_code_are_no_figures() {
        let text = "GPT-2 on an H200: 8192 x 768, Burn 0.22.1, B8T1024, 12 layers, `20 ms`,\n\
                    2026-11-22, [x](y-20 ms).\n\n```text\n20 ms\n```\n";
        assert_eq!(bare(text), Vec::<String>::new());
        assert!(claims(text).is_empty());
    }

    #[test]
    fn a_marker_is_for_the_number_in_front_of_it() {
        let text = "In 3 of 4 runs 410k tokens/s<!-- = gpt2 --> and 5 ms.\n";
        assert_eq!(claims(text), [claim("410k", "gpt2", 0)]);
        assert_eq!(bare(text), ["5"]);
        let two = "It takes 0.1 / 0.3 ms<!-- = gelu forward;backward -->.\n";
        let words = "gelu forward;backward";
        assert_eq!(claims(two), [claim("0.1", words, 0), claim("0.3", words, 1)]);
    }

    #[test]
    fn what_was_not_measured_says_so() {
        assert!(bare("At most 64 MiB<!-- not measured: a default --> are taken.\n").is_empty());
        assert_eq!(bare("64 MiB<!-- not measured: a default --> in 3 s.\n"), ["3"]);
    }

    #[test]
    fn cells_take_the_words_of_table_column_row_and_their_own() {
        let text = "<!-- = h200 gpt2 -->\n\
                    | | tokens/s | GiB<!-- = note:\"#\" --> |\n|---|---|---|\n\
                    | 8 rows<!-- = B8 --> | 410k | 6.8 |\n\
                    | 64<!-- = B64 --> | 480k (519k)<!-- = a;b --> | - |\n";
        let expected = [
            claim("410k", "h200 gpt2 | B8", 0),
            claim("6.8", "h200 gpt2 | note:# | B8", 0),
            claim("480k", "h200 gpt2 | B64 | a;b", 0),
            claim("519k", "h200 gpt2 | B64 | a;b", 1),
        ];
        assert_eq!(claims(text), expected);
        assert!(bare(text).is_empty());
    }

    #[test]
    fn a_table_with_a_unit_in_its_header_needs_markers() {
        let table = "| | ms |\n|---|---|\n| matmul | 10.6 |\n";
        assert_eq!(bare(table), ["10.6"]);
        assert_eq!(bare(&table.replace("| | ms", "| ms | time")), ["10.6"]);
        assert!(bare(&table.replace("ms", "layers")).is_empty());
        assert_eq!(bare(&table.replace("ms", "GPT-2").replace("10.6", "410k")), ["410k"]);
        assert!(bare(&format!("<!-- not measured: a plan -->\n{table}")).is_empty());
        // A marker is for the table right behind it, not for the next one.
        assert_eq!(bare(&format!("<!-- = gpt2 -->\n\nText.\n\n{table}")), ["10.6"]);
    }
}
