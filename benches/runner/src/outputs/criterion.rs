//! What criterion estimates, by the files that it leaves for each benchmark.

use crate::row::{OURS, Row};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::{
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// `benchmark.json`.
#[derive(Deserialize)]
struct Benchmark {
    group_id: String,
    function_id: Option<String>,
    value_str: Option<String>,
    throughput: Option<Throughput>,
}

/// What one iteration does; benches count FLOPs as elements.
#[derive(Deserialize)]
enum Throughput {
    Bytes(f64),
    Elements(f64),
}

/// `estimates.json`, in nanoseconds.
#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    point_estimate: f64,
    confidence_interval: Interval,
}

#[derive(Deserialize)]
struct Interval {
    lower_bound: f64,
    upper_bound: f64,
}

const DTYPES: [&str; 4] = ["f32", "f16", "bf16", "e4m3"];
/// Longer names first.
const PASSES: [&str; 3] = ["forward_backward", "forward", "backward"];
const OPTIMIZERS: [&str; 2] = ["adamw", "sgd"];

/// The rows of all benchmarks below criterion's folder, in the order in which they were measured.
pub(super) fn read(folder: &Path) -> Result<Vec<Row>> {
    let mut found = Vec::new();
    collect(folder, &mut found).with_context(|| format!("read {}", folder.display()))?;
    found.sort();
    found.into_iter().map(|(_, path)| row(&path)).collect()
}

/// Folders named `new` that hold estimates, with the time that they are of.
fn collect(folder: &Path, found: &mut Vec<(SystemTime, PathBuf)>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        let estimates = path.join("estimates.json");
        if path.ends_with("new") && estimates.is_file() {
            found.push((estimates.metadata()?.modified()?, path));
        } else {
            collect(&path, found)?;
        }
    }
    Ok(())
}

fn row(folder: &Path) -> Result<Row> {
    let text = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let broken =
        |name: &str| format!("{} is not what criterion writes", folder.join(name).display());
    let benchmark: Benchmark =
        serde_json::from_str(&text("benchmark.json")?).with_context(|| broken("benchmark.json"))?;
    let Estimates { median } =
        serde_json::from_str(&text("estimates.json")?).with_context(|| broken("estimates.json"))?;
    let Interval { lower_bound, upper_bound } = median.confidence_interval;
    let mut row = named(&benchmark);
    [row.median_ms, row.min_ms, row.max_ms] = [median.point_estimate, lower_bound, upper_bound]
        .map(|nanoseconds| format!("{:.4}", nanoseconds / 1e6));
    let rate = |done: f64, scale: f64| format!("{:.0}", done / median.point_estimate / scale);
    match benchmark.throughput {
        Some(Throughput::Bytes(bytes)) => {
            (row.metric, row.unit) = (rate(bytes, 1.0), "GB/s".into());
        }
        Some(Throughput::Elements(flops)) => {
            (row.metric, row.unit) = (rate(flops, 1e3), "TFLOP/s".into());
        }
        None => {}
    }
    row.note = "by criterion, median and its bounds".into();
    Ok(row)
}

/// `softmax/BF16/65536x4096` and `forward` as op, dtype, shape and pass. What differs stands behind the shape.
fn named(benchmark: &Benchmark) -> Row {
    let mut parts: Vec<&str> = benchmark.group_id.split('/').collect();
    let op = parts.remove(0);
    let dtype = parts.first().map(|part| part.to_lowercase());
    let dtype = dtype.filter(|dtype| DTYPES.contains(&dtype.as_str()));
    if dtype.is_some() {
        parts.remove(0);
    }
    // The sizes stand last, and in front of them what differs.
    parts.reverse();
    let function = benchmark.function_id.as_deref().unwrap_or_default();
    let known = PASSES.iter().find(|pass| function.starts_with(**pass));
    let (pass, rest) = match known {
        Some(pass) => (*pass, &function[pass.len()..]),
        None if OPTIMIZERS.contains(&op) => ("step", function),
        None if parts.is_empty() => ("forward", function),
        None => (function, ""),
    };
    let rest = rest.replace('_', " ");
    let words = [rest.trim(), benchmark.value_str.as_deref().unwrap_or_default()];
    let shape = parts.into_iter().chain(words).filter(|word| !word.is_empty());
    let shape = shape.collect::<Vec<_>>().join(" ");
    let dtype = dtype.as_deref().unwrap_or("-");
    match (op, function) {
        // The kernel of a decoded token is a pass of attention's.
        ("attention_decode", _) => {
            Row::blank("attention", "decode", dtype, &decoded(&shape).unwrap_or(shape), OURS)
        }
        ("linear_gelu", "linear") => Row::blank("linear", "forward", dtype, &shape, OURS),
        _ => Row::blank(op, pass, dtype, &shape, OURS),
    }
}

/// Batch, queries, keys, heads, heads of keys and size of a head as rows of attention have them.
fn decoded(shape: &str) -> Option<String> {
    let (sizes, rest) = shape.split_at(shape.find(' ').unwrap_or(shape.len()));
    let sizes: Vec<&str> = sizes.split('x').collect();
    let [batch, queries, keys, heads, shared, size] = sizes[..] else { return None };
    Some(format!("B{batch}H{heads}Q{queries}K{keys}D{size} kv{shared}{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, group: &str, function: &str, throughput: &str) {
        let folder = folder.join(group.replace('/', "_")).join(function).join("new");
        fs::create_dir_all(&folder).unwrap();
        let benchmark = format!(
            r#"{{"group_id":"{group}","function_id":"{function}","value_str":null,"throughput":{throughput},"full_id":"x","directory_name":"x","title":"x"}}"#
        );
        fs::write(folder.join("benchmark.json"), benchmark).unwrap();
        let estimate = |low, point, high| {
            format!(
                r#"{{"confidence_interval":{{"confidence_level":0.95,"lower_bound":{low},"upper_bound":{high}}},"point_estimate":{point},"standard_error":1.0}}"#
            )
        };
        let (mean, median) = (estimate(1.0, 2.0, 3.0), estimate(183_000.0, 183_500.0, 184_000.0));
        let estimates = format!(r#"{{"mean":{mean},"median":{median},"slope":null}}"#);
        fs::write(folder.join("estimates.json"), estimates).unwrap();
    }

    #[test]
    fn a_benchmark_is_a_row_of_its_median_and_its_bounds() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "swiglu/BF16/16384x5632", "forward", r#"{"Bytes":553648128}"#);
        let rows = read(folder.path()).unwrap();
        let lines: Vec<_> = rows.iter().map(|row| row.line().replace('\t', "|")).collect();
        assert_eq!(
            lines,
            [
                "-|-|swiglu|forward|bf16|16384x5632|blackburn|0.1835|0.1830|0.1840|3017|GB/s|by criterion, median and its bounds"
            ]
        );
    }

    #[test]
    fn names_of_benchmarks_become_those_of_rows() {
        for (group, function, expected) in [
            (
                "gelu/Bf16/8192x3072",
                "backward_with_sums_in_one_kernel",
                "gelu backward bf16 8192x3072 with sums in one kernel",
            ),
            (
                "layer_norm/F32/8192x768",
                "forward_backward_of_burn",
                "layer_norm forward_backward f32 8192x768 of burn",
            ),
            (
                "rotary/F16/Headed/8x12x1024x64",
                "backward",
                "rotary backward f16 8x12x1024x64 Headed",
            ),
            (
                "adamw/F32 by BF16/163037184",
                "plan, one launch each",
                "adamw step - 163037184 F32 by BF16 plan, one launch each",
            ),
            ("matmul/Bf16", "gpt2 mlp up, wgrad", "matmul forward bf16 gpt2 mlp up, wgrad"),
            ("linear_gelu/bf16/8x768x3072", "linear", "linear forward bf16 8x768x3072"),
            ("batch_norm/F32/8192x64", "statistics", "batch_norm statistics f32 8192x64"),
            (
                "attention_decode/F32/8x1x8192x32x8x128",
                "forward",
                "attention decode f32 B8H32Q1K8192D128 kv8",
            ),
            (
                "attention_decode/BF16/8x2x8192x32x8x64",
                "forward_by_portable",
                "attention decode bf16 B8H32Q2K8192D64 kv8 by portable",
            ),
        ] {
            let benchmark = Benchmark {
                group_id: group.into(),
                function_id: Some(function.into()),
                value_str: None,
                throughput: None,
            };
            assert_eq!(named(&benchmark).name(), expected);
        }
    }

    #[test]
    fn flops_are_elements_and_a_broken_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "matmul/Bf16", "square", r#"{"Elements":36700000000}"#);
        let rows = read(folder.path()).unwrap();
        assert_eq!((rows[0].metric.as_str(), rows[0].unit.as_str()), ("200", "TFLOP/s"));
        fs::write(folder.path().join("matmul_Bf16/square/new/benchmark.json"), "{").unwrap();
        let error = format!("{:#}", read(folder.path()).unwrap_err());
        assert!(error.contains("benchmark.json is not what criterion writes"), "{error}");
    }
}
