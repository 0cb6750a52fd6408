//! Of rows that measured the same, the one that counts.

use crate::row::{Key, Row};
use std::collections::HashMap;

/// Of each key one row: of the newest run that has it, the fastest. A run may have tried alternatives, and stored what
/// they cost beside what is taken.
pub(crate) struct Newest<'a> {
    rows: HashMap<Key, &'a Row>,
    /// As they were measured.
    order: Vec<Key>,
}

impl<'a> Newest<'a> {
    pub(crate) fn of(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut newest = Self { rows: HashMap::new(), order: Vec::new() };
        for row in rows {
            let key = row.key();
            let Some(known) = newest.rows.get_mut(&key) else {
                newest.order.push(key.clone());
                newest.rows.insert(key, row);
                continue;
            };
            let is_same_run = known.date == row.date && known.commit == row.commit;
            let takes_its_place = match is_same_run {
                true => row.cost().is_some_and(|new| known.cost().is_none_or(|old| new < old)),
                // Tables grow at their end.
                false => row.date >= known.date,
            };
            if takes_its_place {
                *known = row;
            }
        }
        newest
    }

    /// The row of a key.
    pub(crate) fn get(&self, key: &Key) -> Option<&'a Row> {
        self.rows.get(key).copied()
    }

    /// All of them, in the order in which their keys came first.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'a Row> + '_ {
        self.order.iter().map(|key| self.rows[key])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::tests::row;

    fn of(date: &str, commit: &str, median: &str) -> Row {
        let sum = row(["sum", "forward", "bf16", "8x8", "blackburn", median, "-", "GB/s", ""]);
        Row { date: date.into(), commit: commit.into(), ..sum }
    }

    #[test]
    fn the_fastest_of_the_newest_run_counts() {
        let mut rows = vec![
            of("2026-01-02", "new", "1.0"),
            of("2026-01-02", "new", "3.0"),
            of("2026-01-02", "new", "-"),
            of("2026-01-01", "old", "0.1"),
        ];
        let median = |rows: &[Row]| {
            let newest: Vec<_> = Newest::of(rows).rows().map(|row| row.median_ms.clone()).collect();
            newest.join(" ")
        };
        assert_eq!(median(&rows), "1.0");
        rows.push(of("2026-01-02", "newer", "2.0"));
        assert_eq!(median(&rows), "2.0");
        rows.push(Row { shape: "9x9".into(), ..of("2026-01-01", "old", "5.0") });
        assert_eq!(median(&rows), "2.0 5.0");
    }
}
