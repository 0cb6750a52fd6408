//! The rows of several rounds as one each.

use crate::row::{Key, Row};

/// Of each case the row of the middle round, of an even number the slower of the two in the middle, with the least and
/// most of all rounds. A case that no round timed keeps its reason.
pub(super) fn merged(rounds: Vec<Vec<Row>>) -> Vec<Row> {
    let mut cases: Vec<(Key, Vec<Row>)> = Vec::new();
    for row in rounds.into_iter().flatten() {
        let key = row.key();
        match cases.iter_mut().find(|(known, _)| *known == key) {
            Some((_, rows)) => rows.push(row),
            None => cases.push((key, vec![row])),
        }
    }
    cases.into_iter().filter_map(|(_, rows)| middle(rows)).collect()
}

fn middle(mut rows: Vec<Row>) -> Option<Row> {
    // Stable, so that rows without a time stay in front.
    rows.sort_by(|a, b| a.median().unwrap_or(0.0).total_cmp(&b.median().unwrap_or(0.0)));
    let untimed = rows.iter().filter(|row| row.median().is_none()).count();
    let timed = &rows[untimed..];
    let Some(mut row) = timed.get(timed.len() / 2).cloned() else {
        return rows.into_iter().next();
    };
    let field = |field: fn(&Row) -> &String| {
        let mut fields: Vec<&String> = timed.iter().map(field).collect();
        let number = |text: &&String| text.parse().unwrap_or(f64::NAN);
        fields.sort_by(|a, b| number(a).total_cmp(&number(b)));
        fields
    };
    row.min_ms = field(|row| &row.min_ms)[0].clone();
    row.max_ms = field(|row| &row.max_ms)[timed.len() - 1].clone();
    match (timed.len(), untimed) {
        (1, 0) => {}
        (rounds, 0) => row.add_note(&format!("median of {rounds} rounds in turns")),
        (rounds, failed) => {
            row.add_note(&format!("median of {rounds} rounds, {failed} more failed"));
        }
    }
    Some(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(shape: &str, [least, median, most]: [&str; 3], rate: &str) -> Row {
        let mut row = Row::blank("sum", "forward", "f32", shape, "blackburn");
        [row.min_ms, row.median_ms, row.max_ms, row.metric] =
            [least, median, most, rate].map(str::to_owned);
        row
    }

    #[test]
    fn the_middle_round_counts_with_the_least_and_most_of_all() {
        let rows = merged(vec![
            vec![timed("a", ["0.9", "1.0", "9.0"], "30"), timed("b", ["5", "5", "5"], "1")],
            vec![timed("a", ["2.9", "3.0", "3.1"], "10")],
            vec![timed("a", ["1.9", "2.0", "10.1"], "15")],
        ]);
        let [a, b] = &rows[..] else { panic!("{rows:?}") };
        let times = [&a.min_ms, &a.median_ms, &a.max_ms, &a.metric, &a.note].map(String::as_str);
        assert_eq!(times, ["0.9", "2.0", "10.1", "15", "median of 3 rounds in turns"]);
        assert_eq!((b.median_ms.as_str(), b.note.as_str()), ("5", ""));
    }

    #[test]
    fn of_two_rounds_the_slower_counts() {
        let [fast, slow] = ["1.0", "2.0"].map(|time| vec![timed("a", [time; 3], "1")]);
        assert_eq!(merged(vec![slow, fast])[0].median_ms, "2.0");
    }

    #[test]
    fn rounds_that_failed_are_told_and_hide_no_time() {
        let failed = || vec![timed("a", ["-", "-", "-"], "-")];
        let rows = merged(vec![failed(), vec![timed("a", ["1.0"; 3], "30")], failed()]);
        assert_eq!(rows[0].median_ms, "1.0");
        assert_eq!(rows[0].note, "median of 1 rounds, 2 more failed");
        assert_eq!(merged(vec![failed(), failed()])[0].median_ms, "-");
    }
}
