//! Rows of a run beside the newest stored ones of the same.

use crate::{newest::Newest, row::Row};
use anyhow::{Result, ensure};
use serde::Serialize;

/// Percent from which a row is told, and from which the comparison fails.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Thresholds {
    /// A warning.
    pub warn: f64,
    /// A failure.
    pub fail: f64,
}

impl Thresholds {
    /// Of a row that is so many percent slower than before, and is judged by so many.
    fn verdict(&self, slower: f64, judged: f64) -> Verdict {
        if judged >= self.fail {
            Verdict::Failure
        } else if judged >= self.warn {
            Verdict::Warning
        } else if slower.max(judged) <= -self.warn {
            // Both: a peer that slowed does not make this faster.
            Verdict::Faster
        } else {
            Verdict::Same
        }
    }
}

/// What a ratio is more than one.
fn percent(ratio: f64) -> f64 {
    // Rounded, since 100 (0.9 - 1) is not -10 in binary numbers.
    (1e8 * (ratio - 1.0)).round() / 1e6
}

/// What a row came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Slower than the larger threshold, or not measured any more.
    Failure,
    /// Slower than the smaller one.
    Warning,
    /// As slow as a warning or a failure, and so was the peer.
    Host,
    /// Within the thresholds.
    Same,
    /// Faster by more than the smaller one.
    Faster,
    /// Not stored so far.
    New,
}

/// A row of ours, and what it is compared with.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Op, pass, dtype, shape and layout.
    pub name: String,
    /// What it came to.
    pub verdict: Verdict,
    /// Milliseconds, or those of a million items where only a rate is known.
    pub now: Option<f64>,
    /// The stored figure in the same unit.
    pub before: Option<f64>,
    /// Commit of the stored row.
    pub commit: Option<String>,
    /// Percent more than before; negative when faster.
    pub slower: Option<f64>,
    /// The same of the peer, where both runs have it.
    pub peer_slower: Option<f64>,
    /// Percent more than before, beside the peer's: what is judged where there is a peer.
    pub judged: Option<f64>,
    /// What else is to be known.
    pub remark: String,
}

/// Compares every row of ours with the stored ones. Sorted by verdict, the worst first.
///
/// # Errors
///
/// When the run has no row of ours.
pub fn compare(run: &[Row], stored: &[Row], thresholds: Thresholds) -> Result<Vec<Comparison>> {
    let (run, stored) = (Newest::of(run), Newest::of(stored));
    let mut compared: Vec<Comparison> = run
        .rows()
        .filter(|row| row.is_ours())
        .filter_map(|row| one(row, &run, &stored, thresholds))
        .collect();
    ensure!(!compared.is_empty(), "the run has no rows of Blackburn that could be compared");
    let badness = |one: &Comparison| -one.judged.unwrap_or(f64::NEG_INFINITY);
    compared.sort_by(|a, b| a.verdict.cmp(&b.verdict).then(badness(a).total_cmp(&badness(b))));
    Ok(compared)
}

/// Both costs, of the same kind.
fn costs(now: &Row, before: &Row) -> Option<(f64, f64)> {
    if let (Some(now), Some(before)) = (now.median(), before.median()) {
        return Some((now, before));
    }
    let [now, before] = [now, before].map(|row| Row { median_ms: "-".into(), ..row.clone() });
    let is_one_unit = now.unit == before.unit;
    Some((now.cost()?, before.cost()?)).filter(|_| is_one_unit)
}

/// Rows of others that a row of ours may be judged by: of the same pass before those of both passes, of the same
/// shape before those that differ by what stands behind it in a step.
fn peers<'a>(run: &Newest<'a>, ours: &Row) -> Vec<&'a Row> {
    let first = |shape: &str| shape.split([' ', ',']).next().unwrap_or_default().to_owned();
    let distance = |row: &Row| {
        if row.is_ours() || row.op != ours.op || row.dtype != ours.dtype {
            return None;
        }
        let passes = match row.pass == ours.pass {
            true => 0,
            false if row.pass == "forward_backward" => 2,
            false => return None,
        };
        let shapes = match row.shape == ours.shape && row.layout() == ours.layout() {
            true => 0,
            false if ours.pass == "step" && first(&row.shape) == first(&ours.shape) => 1,
            false => return None,
        };
        Some(passes + shapes)
    };
    let mut found: Vec<(usize, &Row)> =
        run.rows().filter_map(|row| Some((distance(row)?, row))).collect();
    found.sort_by_key(|(distance, _)| *distance);
    found.into_iter().map(|(_, row)| row).collect()
}

fn one(
    row: &Row,
    run: &Newest<'_>,
    stored: &Newest<'_>,
    thresholds: Thresholds,
) -> Option<Comparison> {
    let before = stored.get(&row.key());
    let mut comparison = Comparison {
        name: row.name(),
        verdict: Verdict::New,
        now: row.cost(),
        before: before.and_then(Row::cost),
        commit: before.map(|before| before.commit.clone()),
        slower: None,
        peer_slower: None,
        judged: None,
        remark: String::new(),
    };
    let Some(before) = before.filter(|before| before.cost().is_some()) else {
        // What never had a time has nothing to tell.
        return comparison.now.is_some().then_some(comparison);
    };
    if comparison.now.is_none() {
        comparison.verdict = Verdict::Failure;
        comparison.remark = format!("it was measured before: {}", row.note);
        return Some(comparison);
    }
    let Some((now, past)) = costs(row, before) else {
        comparison.remark =
            format!("the stored row has {}, and this one {}", before.unit, row.unit);
        return Some(comparison);
    };
    let ratio = now / past;
    (comparison.now, comparison.before) = (Some(now), Some(past));
    comparison.slower = Some(percent(ratio));
    let peer = peers(run, row).into_iter().find_map(|peer| {
        let past = stored.get(&peer.key())?;
        let is_same =
            version(&peer.note).is_none_or(|new| version(&past.note).is_none_or(|old| old == new));
        let (now, past) = costs(peer, past).filter(|_| is_same)?;
        Some((peer.subject.as_str(), now / past))
    });
    let judged = ratio / peer.map_or(1.0, |(_, ratio)| ratio);
    comparison.peer_slower = peer.map(|(_, ratio)| percent(ratio));
    comparison.judged = Some(percent(judged));
    comparison.verdict = thresholds.verdict(percent(ratio), percent(judged));
    if let Some((subject, peer_ratio)) = peer {
        let is_slow = percent(ratio) >= thresholds.warn;
        if is_slow && comparison.verdict > Verdict::Warning {
            comparison.verdict = Verdict::Host;
            comparison.remark =
                format!("{subject} slowed by {:.0} % too: host or clocks", percent(peer_ratio));
        } else if !is_slow && comparison.verdict <= Verdict::Warning {
            // A peer that was slow when it was stored is no fault of ours.
            comparison.verdict = Verdict::Warning;
            comparison.remark =
                format!("{subject} is faster by {:.0} %, and this is not", -percent(peer_ratio));
        }
    }
    let is_of_host = [row, before].iter().any(|row| row.note.contains("the host's time"));
    if is_of_host && comparison.verdict == Verdict::Failure {
        comparison.verdict = Verdict::Warning;
        comparison.remark = "the host's time, which differs from machine to machine".into();
    }
    Some(comparison)
}

/// Of PyTorch, as far as a note tells it: `2.11` of `2.11.0+cu130; AMP`, and of `2.11, cuDNN`.
fn version(note: &str) -> Option<String> {
    let numbers = |word: &str| {
        let parts: Vec<&str> = word.split('+').next()?.split('.').collect();
        let are_numbers = parts.iter().all(|part| part.parse::<u32>().is_ok());
        (are_numbers && parts.len() >= 2).then(|| parts[..2].join("."))
    };
    // A number without its CUDA, beside other words, is a measurement.
    let mut words = note.split([';', ',', ' ']).filter(|word| word.contains("+cu"));
    let mut pieces = note.split([';', ',']).map(str::trim);
    words.find_map(numbers).or_else(|| pieces.find_map(numbers))
}

/// A table for people, and what it comes to.
pub fn table(compared: &[Comparison], thresholds: Thresholds) -> String {
    let shown =
        |percent: Option<f64>| percent.map_or("-".into(), |percent| format!("{percent:+.1}"));
    let time = |time: Option<f64>| time.map_or("-".into(), |time| format!("{time:.4}"));
    let mut text = format!(
        "{:<8} {:>11} {:>11} {:>8} {:>8} {:>8}  what\n",
        "", "ms", "stored", "slower %", "peer %", "judged %"
    );
    let count = |verdict| compared.iter().filter(|one| one.verdict == verdict).count();
    // What is as it was is told by its number.
    for one in compared.iter().filter(|one| one.verdict != Verdict::Same) {
        let verdict = match one.verdict {
            Verdict::Failure => "FAILURE",
            Verdict::Warning => "warning",
            Verdict::Host => "host",
            Verdict::Same => "same",
            Verdict::Faster => "faster",
            Verdict::New => "new",
        };
        text += &format!(
            "{verdict:<8} {:>11} {:>11} {:>8} {:>8} {:>8}  {}{}{}\n",
            time(one.now),
            time(one.before),
            shown(one.slower),
            shown(one.peer_slower),
            shown(one.judged),
            one.name,
            one.commit.as_ref().map_or(String::new(), |commit| format!(", stored at {commit}")),
            if one.remark.is_empty() { String::new() } else { format!("; {}", one.remark) },
        );
    }
    let Thresholds { warn, fail } = thresholds;
    text += &format!(
        "\n{} rows: {} slower by {fail} % or more, {} by {warn} %, {} with their peer, {} as before, {} faster, {} new",
        compared.len(),
        count(Verdict::Failure),
        count(Verdict::Warning),
        count(Verdict::Host),
        count(Verdict::Same),
        count(Verdict::Faster),
        count(Verdict::New),
    );
    text
}

#[cfg(test)]
mod tests;
