//! Rows of `benches/results`, and the table at the end.

use crate::{cases::Label, measure::Times};

/// What is compared with.
#[derive(Clone, Copy)]
pub(crate) struct Yardstick {
    /// Bytes that a copy of a large tensor reads and writes, in GB/s.
    pub(crate) copy: f64,
    /// Milliseconds that a call of the smallest tensor takes: the host's.
    pub(crate) host: f64,
}

/// Ends of the rows that a run shares.
pub(crate) struct Origin {
    pub(crate) date: String,
    pub(crate) commit: String,
    pub(crate) subject: &'static str,
    pub(crate) note: String,
}

/// What is told of a case.
pub(crate) struct Row {
    pub(crate) label: Label,
    pub(crate) outcome: Result<Times, String>,
}

impl Row {
    /// Bytes a second, in 10^9.
    fn rate(&self, times: &Times) -> f64 {
        self.label.bytes as f64 / times.median / 1e6
    }

    /// How many times as long as a copy of the same bytes.
    fn ratio(&self, times: &Times, yardstick: &Yardstick) -> f64 {
        yardstick.copy / self.rate(times)
    }

    /// As `benches/results` has it.
    pub(crate) fn print(&self, yardstick: &Yardstick, origin: &Origin) {
        let Self { label: Label { op, pass, dtype, shape, .. }, outcome } = self;
        let Origin { date, commit, subject, note } = origin;
        let dtype = dtype.name();
        let head = format!("{date}\t{commit}\t{op}\t{pass}\t{dtype}\t{shape}\t{subject}");
        match outcome {
            Ok(times) => {
                let Times { median, least, most } = times;
                let (rate, ratio) = (self.rate(times), self.ratio(times, yardstick));
                let host = if is_host(times, yardstick) { "; the host's time" } else { "" };
                let Yardstick { copy, .. } = yardstick;
                println!(
                    "{head}\t{median:.4}\t{least:.4}\t{most:.4}\t{rate:.1}\tGB/s\tops_sweep; {ratio:.2} times a copy \
                     of its bytes, which makes {copy:.0} GB/s{host}; {note}"
                );
            }
            Err(reason) => {
                // A reason of several lines would end the row.
                let reason = reason.split_whitespace().take(40).collect::<Vec<_>>().join(" ");
                println!("{head}\t-\t-\t-\t-\tGB/s\tops_sweep; {reason}; {note}");
            }
        }
    }
}

/// The least that a call costs hides what the device takes.
fn is_host(times: &Times, yardstick: &Yardstick) -> bool {
    times.median < 1.5 * yardstick.host
}

/// All that was timed, the slowest beside their bytes first, on the standard error.
pub(crate) fn print_table(mut rows: Vec<Row>, yardstick: &Yardstick) {
    let ratio = |row: &Row| match &row.outcome {
        Ok(times) => row.ratio(times, yardstick),
        Err(_) => f64::INFINITY,
    };
    rows.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    let Yardstick { copy, host } = yardstick;
    eprintln!("\na copy makes {copy:.0} GB/s; a call costs the host {:.1} us", host * 1e3);
    eprintln!(
        "{:>9} {:>10} {:>8}  {:<21} {:<16} {:<4}  shape",
        "times", "ms", "GB/s", "operation", "pass", "type"
    );
    for row in &rows {
        let Label { op, pass, dtype, shape, .. } = &row.label;
        let dtype = dtype.name();
        let name = format!("{op:<21} {pass:<16} {dtype:<4}  {shape}");
        match &row.outcome {
            Ok(times) => {
                let host = if is_host(times, yardstick) { "  (host)" } else { "" };
                eprintln!(
                    "{:>9.2} {:>10.4} {:>8.0}  {name}{host}",
                    ratio(row),
                    times.median,
                    row.rate(times)
                );
            }
            Err(reason) => {
                let line = reason.lines().next().unwrap_or_default();
                eprintln!("{:>9} {:>10} {:>8}  {name}  {line}", "-", "-", "-");
            }
        }
    }
}
