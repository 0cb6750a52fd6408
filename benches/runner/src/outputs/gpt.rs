//! A run of `gpt train`, by the metrics in its folder.

use crate::row::{OURS, Row};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::{fs, path::Path};

/// Steps that are not counted: kernels are compiled and passes recorded in them.
const WARM_UP: u64 = 20;

/// The lines of `metrics.jsonl` that matter here.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Record {
    Run {
        settings: Settings,
        parameters: f64,
        attention: String,
    },
    Train {
        step: u64,
        tokens_per_second: f64,
        seconds: f64,
        reserved_bytes: Option<u64>,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Settings {
    preset: String,
    precision: String,
    masters: String,
    batch: usize,
    accumulate: usize,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    context: usize,
}

/// The median, fastest and slowest of the intervals behind the warm-up, the time until step ten, and the memory that the
/// device's pools reserved.
pub(super) fn read(folder: &Path) -> Result<Vec<Row>> {
    let path = folder.join("metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let mut run = None;
    let mut steps = Vec::new();
    // A process that was ended may have left half a line.
    for record in text.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        match record {
            Record::Run { settings, parameters, attention } => {
                run = Some((settings, parameters, attention));
            }
            Record::Train { step, tokens_per_second, seconds, reserved_bytes } => {
                steps.push((step, tokens_per_second, seconds, reserved_bytes));
            }
            Record::Other => {}
        }
    }
    let (settings, parameters, attention) =
        run.with_context(|| format!("{} has no record of its run", path.display()))?;
    let mut speeds: Vec<f64> = steps
        .iter()
        .filter(|(step, speed, ..)| *step > WARM_UP && *speed > 0.0)
        .map(|(_, speed, ..)| *speed)
        .collect();
    ensure!(!speeds.is_empty(), "{} has no interval behind step {WARM_UP}", path.display());
    speeds.sort_by(f64::total_cmp);
    // Of an even number the slower one.
    let median = speeds[(speeds.len() - 1) / 2];
    let tokens = (settings.batch * settings.accumulate * settings.model.context) as f64;
    let op = if settings.preset == "gpt2" { "gpt2" } else { "gpt" };
    let shape = format!("B{}T{}", settings.batch, settings.model.context);
    let mut row = Row::blank(op, "step", &settings.precision, &shape, OURS);
    [row.median_ms, row.min_ms, row.max_ms] = [median, speeds[speeds.len() - 1], speeds[0]]
        .map(|speed| format!("{:.3}", 1e3 * tokens / speed));
    row.metric = format!("{median:.0}");
    row.unit = "tokens/s".into();
    row.note = format!(
        "{:.1}M parameters, masters {}, {attention} attention",
        parameters / 1e6,
        settings.masters
    );
    let last = steps.last().map_or(0, |(step, ..)| *step);
    row.add_note(&format!("{last} steps of text; intervals behind step {WARM_UP}"));
    if let Some((_, _, seconds, _)) = steps.iter().find(|(step, ..)| *step == 10) {
        row.add_note(&format!("first ten steps {seconds:.1} s"));
    }
    if let Some(bytes) = steps.iter().filter_map(|(.., reserved)| *reserved).max() {
        row.add_note(&format!("{:.2} GiB reserved", bytes as f64 / (1u64 << 30) as f64));
    }
    Ok(vec![row])
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#"{"kind":"run","settings":{"preset":"gpt2","precision":"bf16","masters":"f32","batch":8,"accumulate":1,"model":{"context":1024,"layers":12}},"parameters":163037184,"attention":"flash","seed":42}"#;

    fn train(step: u64, speed: f64) -> String {
        format!(
            r#"{{"kind":"train","step":{step},"loss":3.0,"tokens_per_second":{speed},"seconds":9.96,"reserved_bytes":7269258035}}"#
        )
    }

    fn written(lines: &[String]) -> Result<Vec<Row>> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("metrics.jsonl"), lines.join("\n"))?;
        read(folder.path())
    }

    #[test]
    fn the_warm_up_is_not_counted() {
        let speeds = [(10, 5e3), (20, 6e4), (30, 4.0e5), (40, 4.2e5), (50, 4.1e5)];
        let mut lines = vec![RUN.to_owned()];
        lines.extend(speeds.map(|(step, speed)| train(step, speed)));
        lines.push(r#"{"kind":"checkpoint","step":50}"#.into());
        lines.push(r#"{"kind":"train","st"#.into());
        let row = &written(&lines).unwrap()[0];
        assert_eq!(
            row.line().replace('\t', "|"),
            "-|-|gpt2|step|bf16|B8T1024|blackburn|19.980|19.505|20.480|410000|tokens/s|163.0M parameters, masters f32, \
             flash attention; 50 steps of text; intervals behind step 20; first ten steps 10.0 s; 6.77 GiB reserved"
        );
    }

    #[test]
    fn a_run_without_an_interval_behind_the_warm_up_is_an_error() {
        let error = |lines: &[String]| written(lines).unwrap_err().to_string();
        assert!(error(&[RUN.into(), train(10, 1e5)]).contains("no interval behind step 20"));
        assert!(error(&[train(30, 1e5)]).contains("has no record of its run"));
        assert!(read(Path::new("/nowhere")).is_err());
    }
}
