//! The command line.

use super::{
    Op, jobs, ops,
    run::{self, Ending, Part, Run, Summary},
    target::Found,
};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    num::NonZero,
    path::PathBuf,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

const HEADER: &str = "date\tcommit\tdevice\top\tcases\twrong\tseed";

/// Draw random shapes, layouts, types and options of an operation, and compare what the device computes, forward
/// and backward, with the f64 reference.
#[derive(Debug, Parser)]
#[command(name = "fuzz")]
pub struct Arguments {
    /// The operation, or `all`: matmul, `fp8_matmul`, conv, attention, `conv_depthwise`, `attention_decode`,
    /// `attention_append`, norm, `batch_norm`, `group_norm`, pool, interpolate, `cross_entropy`, softmax, gelu, swiglu,
    /// rotary, `column_sum`, `row_sum`, `square_sum`, dropout, embedding, adamw, sgd, `fp8_cast`, linear.
    op: String,
    /// How many cases to draw of each operation.
    #[arg(long, default_value_t = 1000)]
    cases: u64,
    /// What cases are drawn from: the same seed draws the same cases. By default another one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// Run this case alone, and tell what it is made of.
    #[arg(long)]
    case: Option<u64>,
    /// With --case: halve its sizes so often, in the order in which they are drawn, as a failing run says.
    #[arg(long, value_delimiter = ',', requires = "case")]
    cut: Vec<u32>,
    /// The device: webgpu (a software adapter will do) or cuda. By default `BLACKBURN_REQUIRE_DEVICE`, or webgpu.
    #[arg(long)]
    device: Option<String>,
    /// Combinations of what kernels are compiled for. Each compiles its kernels, so that more take longer and
    /// see more.
    #[arg(long)]
    plans: Option<u64>,
    /// Threads, each with a stream of its own. By default one a core.
    #[arg(long)]
    threads: Option<usize>,
    /// Processes that share the cases: for a GPU, where compiling kernels takes most of the time, one after another
    /// in each process. The cases of a plan stay together, so choose no more processes than plans.
    #[arg(long, conflicts_with_all = ["case", "threads"])]
    jobs: Option<NonZero<u64>>,
    /// Run the cases of one such process.
    #[arg(long, hide = true, value_parser = jobs::part)]
    job: Option<Part>,
    /// Begin no other case of an operation after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Move one element of each case's first result out of its bound: proves that the comparison can fail. The
    /// run succeeds when every fault was found; nothing is recorded.
    #[arg(long)]
    plant: bool,
    /// Append a row for each operation to this file, whether it failed or not.
    #[arg(long, requires = "commit")]
    record: Option<PathBuf>,
    /// The commit, for the record.
    #[arg(long)]
    commit: Option<String>,
}

/// Runs the command line, of which the first word is the program's name, and tells whether everything is right.
/// `init` prepares Burn.
pub fn run(
    arguments: impl IntoIterator<Item = String>,
    init: impl FnOnce() -> Result<(), ()>,
) -> bool {
    let arguments = Arguments::parse_from(arguments);
    let is_ready = init().is_ok();
    is_ready
        && fuzz(&arguments).unwrap_or_else(|error| {
            eprintln!("error: {error}");
            false
        })
}

/// Whether everything is right.
fn fuzz(arguments: &Arguments) -> Result<bool, String> {
    let required = std::env::var("BLACKBURN_REQUIRE_DEVICE").ok().filter(|name| !name.is_empty());
    let device = arguments.device.clone().or(required).unwrap_or_else(|| "webgpu".into());
    let found = Found::new(&device)?;
    run::note_panics();
    let seed = arguments.seed.unwrap_or_else(seed_of_the_clock);
    let mut is_right = true;
    for op in chosen(&arguments.op, device == "cuda")? {
        let run = Run {
            seed,
            plans: arguments.plans.unwrap_or(op.plans),
            cases: 0..arguments.cases,
            threads: arguments
                .threads
                .unwrap_or_else(|| thread::available_parallelism().map_or(1, NonZero::get)),
            limit: arguments.seconds.map(Duration::from_secs),
            plant: arguments.plant,
            part: arguments.job.unwrap_or(Part::ALL),
        };
        is_right &= match arguments.case {
            Some(index) => one(&op, &found, &run, index, &arguments.cut),
            None if arguments.job.is_some() => {
                let summary = run::cases(&op, &found, &run, |_| {});
                jobs::report(&summary)?;
                summary.wrong.is_empty()
            }
            None => many(&op, &found, &run, (arguments, &device))?,
        };
    }
    Ok(is_right)
}

/// The operation of that name, or all that the device has kernels for.
fn chosen(name: &str, has_cuda: bool) -> Result<Vec<Op>, String> {
    let mut chosen = ops();
    chosen.retain(|op| op.name == name || (name == "all" && (has_cuda || !op.needs_cuda)));
    if chosen.is_empty() {
        let names: Vec<_> = ops().iter().map(|op| op.name).collect();
        let names = names.join(", ");
        return Err(format!("no operation is called `{name}`; there are {names}, and all"));
    }
    Ok(chosen)
}

fn seed_of_the_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs() ^ u64::from(since.subsec_nanos())
}

fn one(op: &Op, found: &Found, run: &Run, index: u64, shifts: &[u32]) -> bool {
    let ran = run::case(op, &found.target(), run, index, shifts);
    println!("{} case {index} of seed {}: {}", op.name, run.seed, ran.told);
    println!("{} elements compared, {} calls refused", ran.check.compared(), ran.check.refused());
    if let Some((share, what)) = ran.check.worst() {
        println!("largest error: {share:.3} of its bound, in {what}");
    }
    match ran.ending {
        Ending::Right => println!("right"),
        Ending::Declined(reason) => println!("declined: {reason}"),
        Ending::Wrong(message) => {
            println!("WRONG: {message}");
            return run.plant && ran.check.planted();
        }
    }
    !(run.plant && ran.check.planted())
}

fn many(
    op: &Op,
    found: &Found,
    run: &Run,
    (arguments, device): (&Arguments, &str),
) -> Result<bool, String> {
    let start = Instant::now();
    let summary = match arguments.jobs {
        Some(jobs) => jobs::run(op.name, jobs, &options(run, device))?,
        None => {
            let bar = progress(op, run);
            let summary = run::cases(op, found, run, |is_wrong| {
                bar.inc(1);
                if is_wrong && !run.plant {
                    bar.set_message("wrong answers");
                }
            });
            bar.finish_and_clear();
            summary
        }
    };
    tell(op, run, &summary, start.elapsed().as_secs_f64());
    if run.plant {
        println!("  {} faults planted, {} unseen", summary.planted, summary.unseen);
        return Ok(summary.planted > 0 && summary.unseen == 0);
    }
    if let (Some(path), Some(commit)) = (&arguments.record, &arguments.commit) {
        record(path, commit, &found.name(), op, run, &summary)?;
    }
    tell_wrong(op, found, run, &summary);
    if summary.compared == 0 {
        println!("  nothing was compared");
    }
    Ok(summary.wrong.is_empty() && summary.compared > 0)
}

/// What a process is told that runs a part of the cases.
fn options(run: &Run, device: &str) -> Vec<String> {
    let Run { seed, plans, cases, limit, plant, .. } = run;
    let mut options: Vec<String> = vec!["--device".into(), device.into()];
    for (name, value) in [("--seed", *seed), ("--plans", *plans), ("--cases", cases.end)] {
        options.extend([name.into(), value.to_string()]);
    }
    if let Some(limit) = limit {
        options.extend(["--seconds".into(), limit.as_secs().to_string()]);
    }
    if *plant {
        options.push("--plant".into());
    }
    options
}

/// A bar where somebody watches: indicatif draws none elsewhere.
fn progress(op: &Op, run: &Run) -> ProgressBar {
    let bar = ProgressBar::new(run.cases.end - run.cases.start);
    let style = ProgressStyle::with_template("{prefix} {bar:40} {pos}/{len} {eta} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(op.name);
    bar
}

fn tell(op: &Op, run: &Run, summary: &Summary, seconds: f64) {
    let Summary { cases, compared, refused, declined, wrong, worst, .. } = summary;
    println!(
        "{}: {cases} cases of {} plans, {} wrong, seed {}; {compared} elements compared, {refused} \
         calls refused as they had to be, {} cases declined; {seconds:.1} s",
        op.name,
        run.plans,
        wrong.len(),
        run.seed,
        declined.values().sum::<u64>(),
    );
    if let Some((share, what, index)) = worst {
        println!("  largest error within bounds: {share:.3} of its bound, {what}, case {index}");
    }
    let mut reasons: Vec<_> = declined.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (reason, count) in reasons.into_iter().take(5) {
        println!("  declined {count}: {reason}");
    }
}

fn tell_wrong(op: &Op, found: &Found, run: &Run, summary: &Summary) {
    const MOST_TOLD: usize = 20;
    const MOST_SHRUNK: usize = 3;
    let on = found.target();
    for (place, finding) in summary.wrong.iter().take(MOST_TOLD).enumerate() {
        println!("  WRONG case {}: {}\n    {}", finding.index, finding.message, finding.told);
        if place < MOST_SHRUNK {
            let (shifts, ran) = run::shrink(op, &on, run, finding.index);
            if let Ending::Wrong(message) = ran.ending {
                println!("    made smaller: {message}\n    {}", ran.told);
            }
            let cuts: Vec<String> = shifts.iter().map(ToString::to_string).collect();
            println!(
                "    again: cargo xtask fuzz {} --seed {} --plans {} --case {} --cut {}",
                op.name,
                run.seed,
                run.plans,
                finding.index,
                cuts.join(",")
            );
        }
    }
}

fn record(
    path: &PathBuf,
    commit: &str,
    device: &str,
    op: &Op,
    run: &Run,
    summary: &Summary,
) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let is_new = fs::metadata(path).map_or(true, |metadata| metadata.len() == 0);
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
    if is_new {
        writeln!(file, "{HEADER}").map_err(failed)?;
    }
    let (date, name, wrong) = (date_of_the_clock(), op.name, summary.wrong.len());
    writeln!(file, "{date}\t{commit}\t{device}\t{name}\t{}\t{wrong}\t{}", summary.cases, run.seed)
        .map_err(failed)
}

/// Year, month and day in UTC.
fn date_of_the_clock() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date((since.as_secs() / 86_400) as i64)
}

/// The date so many days after 1970-01-01, by Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms":
/// years that begin in March, in eras of 400.
fn date(days: i64) -> String {
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * era + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        let dates = [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29")];
        for (days, expected) in dates {
            assert_eq!(date(days), expected);
        }
        assert_eq!(date(20_779), "2026-11-22");
    }

    #[test]
    fn a_process_is_told_all_of_a_run_that_its_cases_depend_on() {
        let (part, limit) = (Part::ALL, Some(Duration::from_secs(140)));
        let run = Run { seed: 17, plans: 8, cases: 0..50, threads: 1, limit, plant: true, part };
        let line = ["fuzz".to_string(), "matmul".into()].into_iter().chain(options(&run, "cuda"));
        let read = Arguments::try_parse_from(line).unwrap();
        assert_eq!((read.seed, read.plans, read.cases), (Some(17), Some(8), 50));
        assert_eq!((read.seconds, read.device.as_deref()), (Some(140), Some("cuda")));
        assert!(read.plant && read.record.is_none());
    }

    #[test]
    fn an_unknown_operation_is_named_with_those_that_there_are() {
        let error = chosen("matmull", true).unwrap_err();
        assert!(error.contains("`matmull`") && error.contains("matmul, fp8_matmul"), "{error}");
        assert_eq!(chosen("all", true).unwrap().len(), ops().len());
        assert_eq!(chosen("all", false).unwrap().len(), ops().len() - 1);
        assert_eq!(chosen("fp8_matmul", false).unwrap().len(), 1);
    }
}
