//! A profile for people.

use super::{Clock, ServedBy, StepProfile, Verdict};
use std::fmt;

/// Rows of a table; the rest is summed up in one line.
const ROWS: usize = 20;
/// Letters of a name.
const NAME: usize = 44;

impl fmt::Display for ServedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Blackburn => "Blackburn",
            Self::BurnFused => "Burn, fused",
            Self::Burn => "Burn",
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::HostBound => "host-bound: the device waits for the host",
            Self::DeviceBound => "device-bound: the device is the limit",
            Self::Unknown => "unknown",
        })
    }
}

impl fmt::Display for StepProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_summary(f)?;
        if !self.kernels.is_empty() {
            self.write_kernels(f)?;
            self.write_blocks(f)?;
        }
        self.write_recommendations(f)
    }
}

impl StepProfile {
    fn write_summary(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: String| writeln!(f, "{name:<16} {value}");
        let ms = |us: f64| format!("{:.3} ms", us / 1e3);
        line("device", self.device.clone())?;
        let recorded =
            if self.eager_wall_us.is_some() { ", replaying a recorded graph" } else { "" };
        line("step", format!("{}{recorded}", ms(self.wall_us)))?;
        if let Some(eager) = self.eager_wall_us {
            line("", format!("{} without the recording", ms(eager)))?;
        }
        let Some(launches) = self.launches else {
            return line("kernels", "none to see: device times and operations need a GPU".into());
        };
        match (self.device_us, self.gap_us) {
            (Some(device), Some(gap)) => {
                let share = |part: f64| 100.0 * part / self.wall_us;
                line(
                    "kernels",
                    format!("{} in {launches:.0} launches ({:.0} %)", ms(device), share(device)),
                )?;
                if device > self.wall_us {
                    line(
                        "",
                        "more than the step: in it they overlap, or find data in caches".into(),
                    )?;
                }
                line("gaps", format!("{} ({:.0} %)", ms(gap), share(gap)))?;
            }
            _ => {
                line("kernels", format!("{launches:.0} launches, which the runtime does not time"))?
            }
        }
        line("verdict", self.verdict.to_string())?;
        if let Some(floor) = self.launch_floor_us {
            let text = "each kernel timed by itself, the host waiting for it";
            line("times", format!("{text}; {floor:.1} us, the smallest kernel's, taken off each"))?;
        }
        if self.clock == Some(Clock::Host) {
            line(
                "",
                "by the host's clock: they hold handing kernels over and waiting for them".into(),
            )?;
        }
        if self.untimed_launches > 0.0 {
            line(
                "",
                format!("{:.1} launches of a step could not be timed", self.untimed_launches),
            )?;
        }
        if let Some(peaks) = &self.peaks {
            let rate = |flops: f64| match flops {
                1e12.. => format!("{:.1} TFLOP/s", flops / 1e12),
                _ => format!("{:.2} GFLOP/s", flops / 1e9),
            };
            let bandwidth = format!("{:.1} GB/s", peaks.bytes_per_second / 1e9);
            let sixteen = peaks.flops_16_bit.map_or("none".into(), rate);
            let f32 = rate(peaks.flops_f32);
            line("peaks", format!("{bandwidth}, 16-bit products {sixteen}, f32 products {f32}"))?;
        }
        Ok(())
    }

    fn write_kernels(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<NAME$} {:<11} {:>8} {:>11} {:>10} {:>7} {:>9} {:>9} {:>8}",
            "kernel",
            "of",
            "launches",
            "total us",
            "mean us",
            "share",
            "GB/s",
            "GFLOP/s",
            "roofline"
        )?;
        for row in self.kernels.iter().take(ROWS) {
            let rate = |count: Option<f64>, unit: f64| {
                let time = row.total_us.filter(|time| *time > 0.0)?;
                Some(count.filter(|count| *count > 0.0)? / (time * 1e-6) / unit)
            };
            writeln!(
                f,
                "{:<NAME$} {:<11} {:>8} {:>11} {:>10} {:>7} {:>9} {:>9} {:>8}",
                shorten(&row.name),
                row.of,
                count(row.launches),
                number(row.total_us, 1),
                number(row.mean_us, 2),
                percent(row.share),
                number(rate(row.bytes, 1e9), 1),
                number(rate(row.flops, 1e9), 1),
                percent(row.roofline)
            )?;
        }
        let rest = self.kernels.iter().skip(ROWS);
        write_rest(f, rest.len(), rest.map(|row| row.total_us).sum())
    }

    fn write_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<NAME$} {:<11} {:>8} {:>11} {:>7} {:>10} {:>10} {:>8}",
            "operations", "of", "blocks", "total us", "share", "MB", "GFLOP", "roofline"
        )?;
        for row in self.blocks.iter().take(ROWS) {
            let operations =
                if row.operations.is_empty() { "(no operation)" } else { &row.operations };
            writeln!(
                f,
                "{:<NAME$} {:<11} {:>8} {:>11} {:>7} {:>10} {:>10} {:>8}",
                shorten(operations),
                row.served_by,
                count(row.count),
                number(row.device_us, 1),
                percent(row.share),
                number(row.bytes.map(|bytes| bytes / 1e6), 2),
                number(row.flops.map(|flops| flops / 1e9), 2),
                percent(row.roofline)
            )?;
        }
        let rest = self.blocks.iter().skip(ROWS);
        write_rest(f, rest.len(), rest.map(|row| row.device_us).sum())
    }

    fn write_recommendations(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.recommendations.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nrecommendations, by what they gain of a step at most (gains overlap)")?;
        for (index, recommendation) in self.recommendations.iter().enumerate() {
            let gain = recommendation
                .gain_us
                .map_or("not known".into(), |gain| format!("{:.3} ms", gain / 1e3));
            writeln!(f, "{:>2}. {gain:>11}  {}", index + 1, recommendation.text)?;
        }
        Ok(())
    }
}

fn write_rest(f: &mut fmt::Formatter<'_>, rows: usize, time_us: Option<f64>) -> fmt::Result {
    if rows == 0 {
        return Ok(());
    }
    let more = format!("and {rows} more");
    writeln!(f, "{more:<NAME$} {:<11} {:>8} {:>11}", "", "", number(time_us, 1))
}

/// The beginning of what is too long.
fn shorten(name: &str) -> String {
    if name.chars().count() <= NAME {
        return name.to_owned();
    }
    let beginning: String = name.chars().take(NAME - 3).collect();
    format!("{beginning}...")
}

fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.decimals$}"))
}

/// Whole in most profiles; steps may differ.
fn count(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share))
}
