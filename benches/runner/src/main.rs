//! `bench`: runs benchmarks beside their peers, compares rows with stored ones, draws them.

use anyhow::{Context, Result, bail, ensure};
use blackburn_bench::{
    compare::{Thresholds, Verdict, compare, table},
    device::{Device, table_of},
    drawing::{self, bars::Bars, roofline::Roofline},
    plan::{BENCHES, Dtype, Group, Plan, Selection, Size},
    results::words,
    row::{self, Row},
    run::{self, Places, ROWS, Settings, Summary},
};
use clap::{Parser, Subcommand, ValueEnum};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

/// Benchmarks beside their peers: run them, compare them with stored results, draw them.
///
/// Exit codes: 0 all is well; 1 something failed, or became too slow; 2 it could not be done as asked; 3 nothing failed,
/// and something was left out, which the output names.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    Run(Box<RunArguments>),
    Compare(CompareArguments),
    Draw {
        #[command(subcommand)]
        picture: Picture,
    },
}

/// Measure, ours and the peer in turns, and write rows of benches/results.
///
/// Programs are looked for beside this one, as `cargo xtask gpu --bench-runner` packs them: the peers in `peers`, the
/// commit in `commit`, text for GPT-2 in `text`. Each finished part's rows go to OUT/rows.tsv at once, what programs
/// print to OUT/logs.
#[derive(clap::Args)]
struct RunArguments {
    /// Groups (models, matmul, attention, conv, kernels, ops) or single criterion benches, such as `softmax`
    /// [default: all groups]. What matters most is measured first, whatever the order here.
    #[arg(value_parser = what)]
    what: Vec<What>,
    /// The fewest shapes, and one round.
    #[arg(long)]
    quick: bool,
    /// Sizes of tensors, where a program knows them: operations, attention, convolutions [default: each part's own].
    #[arg(long, value_enum, value_delimiter = ',')]
    sizes: Vec<Size>,
    /// What is computed in, where a program knows it [default: bf16, and f32 for operations].
    #[arg(long, value_enum, value_delimiter = ',')]
    dtypes: Vec<Dtype>,
    /// How often both sides of a part run; the median counts [default: 3, with --quick 1].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Seconds for all. What is not begun by then is left out.
    #[arg(long, value_name = "SECONDS")]
    budget_s: Option<u64>,
    /// Seconds for one process [default: 300].
    #[arg(long, value_name = "SECONDS")]
    limit_s: Option<u64>,
    /// Folder for rows, logs and pictures.
    #[arg(long, default_value = "bench-run")]
    out: PathBuf,
    /// Compare the rows with the stored ones afterwards.
    #[arg(long)]
    compare: bool,
    /// Draw the rows afterwards: OUT/bars and OUT/roofline, as SVG and PNG.
    #[arg(long)]
    draw: bool,
    /// Print the parts in their order, and measure nothing.
    #[arg(long)]
    list: bool,
    /// Text for GPT-2, a file or a folder [default: `text` beside this program].
    #[arg(long)]
    text: Option<PathBuf>,
    /// Folder of our programs [default: this program's].
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Folder of the peers' Python files [default: `peers` beside this program].
    #[arg(long)]
    peers: Option<PathBuf>,
    /// What runs them.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Commit of the rows [default: what `commit` beside this program says].
    #[arg(long)]
    commit: Option<String>,
    #[command(flatten)]
    stored: Stored,
}

/// Compare rows with the newest stored ones of the same op, pass, dtype, shape and subject.
///
/// Rows are judged by their ratio to the peer where both runs have it, so that a slow machine is not taken for a slow
/// kernel.
#[derive(clap::Args)]
struct CompareArguments {
    /// What `bench run` wrote.
    #[arg(default_value = "bench-run/rows.tsv")]
    rows: PathBuf,
    /// Name of the device, as nvidia-smi has it [default: what the rows' notes say].
    #[arg(long)]
    device: Option<String>,
    /// Print all rows as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stored: Stored,
}

/// What is compared with, and what is too slow.
#[derive(clap::Args)]
struct Stored {
    /// Table of stored rows, or a folder of tables that are named after devices [default: `results` beside this
    /// program].
    #[arg(long, value_name = "PATH")]
    against: Option<PathBuf>,
    /// Percent slower that are a warning.
    #[arg(long, default_value_t = 10.0, value_name = "PERCENT")]
    warn: f64,
    /// Percent slower that are a failure.
    #[arg(long, default_value_t = 25.0, value_name = "PERCENT")]
    fail: f64,
}

/// Draw rows, as SVG and as PNG.
#[derive(Subcommand)]
enum Picture {
    /// Bars of Blackburn and its peers, of whatever was measured of both.
    Bars {
        #[command(flatten)]
        rows: Drawn,
        /// The most groups of bars.
        #[arg(long, default_value_t = 20)]
        most: usize,
    },
    /// Products, attention, convolutions and norms beside what the device could do at best.
    Roofline {
        #[command(flatten)]
        rows: Drawn,
        /// Name of the device, as nvidia-smi has it [default: what the rows' notes say].
        #[arg(long)]
        device: Option<String>,
    },
}

#[derive(clap::Args)]
struct Drawn {
    /// Rows, as `bench run` writes them or as benches/results has them.
    file: PathBuf,
    /// Only rows that all of these words name, as markers do: `60414e4 step`, `op=matmul dtype=bf16 "*causal"`.
    #[arg(long, default_value = "", value_name = "WORDS")]
    rows: String,
    /// Title of the picture [default: the file's name and the words].
    #[arg(long)]
    title: Option<String>,
    /// Where to write it; the extensions are added.
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
}

#[derive(Clone)]
enum What {
    Group(Group),
    Bench(String),
}

fn what(name: &str) -> Result<What, String> {
    if let Ok(group) = Group::from_str(name, false) {
        return Ok(What::Group(group));
    }
    if BENCHES.iter().any(|(bench, _)| *bench == name) {
        return Ok(What::Bench(name.to_owned()));
    }
    let groups = Group::value_variants().iter().filter_map(Group::to_possible_value);
    let groups = groups.map(|group| group.get_name().to_owned()).collect::<Vec<_>>().join(", ");
    let benches = BENCHES.map(|(bench, _)| bench).join(", ");
    Err(format!("expected a group ({groups}) or a criterion bench ({benches})"))
}

const FAILED: u8 = 1;
const WRONG_CALL: u8 = 2;
const INCOMPLETE: u8 = 3;

fn main() -> ExitCode {
    let code = match Arguments::parse().chore {
        Chore::Run(arguments) => measure(&arguments),
        Chore::Compare(arguments) => {
            let CompareArguments { rows, device, json, stored } = &arguments;
            compared(rows, device.as_deref(), stored, *json)
        }
        Chore::Draw { picture } => draw(&picture).map(|()| 0),
    };
    match code {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(WRONG_CALL)
        }
    }
}

/// What lies beside this program.
fn beside(name: &str) -> Result<PathBuf> {
    let program = env::current_exe().context("find this program's folder")?;
    Ok(program.with_file_name(name))
}

fn measure(arguments: &RunArguments) -> Result<u8> {
    let mut selection = Selection {
        quick: arguments.quick,
        sizes: arguments.sizes.clone(),
        dtypes: arguments.dtypes.clone(),
        text: match &arguments.text {
            Some(text) => {
                ensure!(text.exists(), "--text {}: there is no such file", text.display());
                Some(fs::canonicalize(text)?)
            }
            None => Some(beside("text")?).filter(|text| text.exists()),
        },
        ..Selection::default()
    };
    for what in &arguments.what {
        match what {
            What::Group(group) => selection.groups.push(*group),
            What::Bench(name) => selection.benches.push(name.clone()),
        }
    }
    let plan = selection.plan();
    if arguments.list {
        list(&plan);
        return Ok(0);
    }
    let device = match Device::ask() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("skipped: {error:#}. Benchmarks need an NVIDIA GPU and its driver");
            return Ok(INCOMPLETE);
        }
    };
    let places = Places {
        programs: match &arguments.programs {
            Some(programs) => programs.clone(),
            None => beside("")?,
        },
        peers: match &arguments.peers {
            Some(peers) => peers.clone(),
            None => beside("peers")?,
        },
        python: arguments.python.clone(),
    };
    let rounds = arguments.rounds.unwrap_or(if arguments.quick { 1 } else { 3 });
    let settings = Settings {
        places,
        folder: arguments.out.clone(),
        date: time::OffsetDateTime::now_utc().date().to_string(),
        commit: commit(arguments)?,
        device,
        rounds: usize::from(rounds),
        budget: arguments.budget_s.map(Duration::from_secs),
        limit: arguments.limit_s.map(Duration::from_secs),
    };
    let summary = run::run(&plan, &settings)?;
    let rows = arguments.out.join(ROWS);
    let mut code = tell(&summary, &rows);
    if summary.measured == 0 {
        return Ok(code);
    }
    if arguments.draw {
        draw_run(&rows, &settings)?;
    }
    if arguments.compare {
        let device = Some(settings.device.name.as_str());
        if compared(&rows, device, &arguments.stored, false)? == FAILED {
            code = FAILED;
        }
    }
    Ok(code)
}

fn list(plan: &Plan) {
    for part in &plan.parts {
        let peer = part.peer.as_ref().map_or("no peer", |peer| peer.program.as_str());
        let ours = &part.ours;
        println!("{}\t{} {}\t{peer}", part.name, ours.program, ours.arguments.join(" "));
    }
    for reason in &plan.left_out {
        println!("left out: {reason}");
    }
}

fn commit(arguments: &RunArguments) -> Result<String> {
    if let Some(commit) = &arguments.commit {
        return Ok(commit.clone());
    }
    let path = beside("commit")?;
    let commit = fs::read_to_string(&path).with_context(|| {
        format!(
            "{} should say of which commit the programs are: `cargo xtask gpu --bench-runner` writes it, --commit \
             names one",
            path.display()
        )
    })?;
    ensure!(!commit.trim().is_empty(), "{} is empty: --commit names the commit", path.display());
    Ok(commit.trim().to_owned())
}

/// Says what came of a run; the exit code.
fn tell(summary: &Summary, rows: &Path) -> u8 {
    let Summary { measured, untimed, failed, left_out } = summary;
    println!("{measured} rows with times in {}", rows.display());
    if *untimed > 0 {
        println!("{untimed} rows without: their notes say why");
    }
    for (what, reasons) in [("failed", failed), ("left out", left_out)] {
        for reason in reasons {
            println!("{what}: {reason}");
        }
    }
    if !failed.is_empty() || *measured == 0 {
        FAILED
    } else if !left_out.is_empty() {
        INCOMPLETE
    } else {
        0
    }
}

/// Pictures of a run. Rows of which there is nothing to draw are told.
fn draw_run(file: &Path, settings: &Settings) -> Result<()> {
    let rows = Row::read(file)?;
    let Settings { folder, device, commit, date, .. } = settings;
    let title = format!("{}, {commit}, {date}", device.name);
    let drawn = [
        Bars::of_rows(&rows, title.clone(), usize::MAX)
            .and_then(|(bars, _)| drawing::write(&bars, &folder.join("bars"))),
        Roofline::of_rows(&rows, &device.name, title)
            .and_then(|roofline| drawing::write(&roofline, &folder.join("roofline"))),
    ];
    for (name, drawn) in ["bars", "roofline"].into_iter().zip(drawn) {
        match drawn {
            Ok(()) => println!("{}.svg and .png", folder.join(name).display()),
            Err(error) => println!("no {name}: {error:#}"),
        }
    }
    Ok(())
}

fn compared(file: &Path, device: Option<&str>, stored: &Stored, json: bool) -> Result<u8> {
    let Stored { against, warn, fail } = stored;
    ensure!(
        *warn > 0.0 && warn <= fail,
        "--warn {warn} and --fail {fail}: expected percents above 0, the warning not above the failure"
    );
    let rows = Row::read(file)?;
    let against = match against {
        Some(path) => path.clone(),
        None => beside("results")?,
    };
    let against = match against.is_dir() {
        false => against,
        true => table_of(&against, &device_of(&rows, device)?)?,
    };
    let thresholds = Thresholds { warn: *warn, fail: *fail };
    let compared = compare(&rows, &Row::read(&against)?, thresholds)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&compared)?);
    } else {
        println!("{}\ncompared with {}", table(&compared, thresholds), against.display());
    }
    let has = |verdict| compared.iter().any(|one| one.verdict == verdict);
    Ok(if has(Verdict::Failure) {
        FAILED
    } else if compared.iter().all(|one| one.verdict == Verdict::New) {
        // Nothing was compared, which is no agreement.
        INCOMPLETE
    } else {
        0
    })
}

/// The name that was given, or that the newest note ends with.
fn device_of(rows: &[Row], named: Option<&str>) -> Result<String> {
    if let Some(name) = named {
        return Ok(name.to_owned());
    }
    let of_note = |row: &Row| {
        let mut pieces = row.note.split([';', ',']).map(str::trim);
        pieces.next_back().filter(|name| name.starts_with("NVIDIA ")).map(str::to_owned)
    };
    rows.iter().rev().find_map(of_note).context(
        "no note of the rows ends with its device, as `driver VERSION, NVIDIA NAME`: --device names it",
    )
}

fn draw(picture: &Picture) -> Result<()> {
    let read = |drawn: &Drawn| {
        let Drawn { file, rows: named, title, .. } = drawn;
        let rows = Row::of_table(&row::table(file)?.named(&words(named)))?;
        if rows.is_empty() {
            bail!("no row of {} is `{named}`", file.display());
        }
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let title = title.clone().unwrap_or_else(|| format!("{stem} {named}").trim().to_owned());
        Ok((rows, title))
    };
    let to = match picture {
        Picture::Bars { rows: drawn, most } => {
            let (rows, title) = read(drawn)?;
            let (bars, besides) = Bars::of_rows(&rows, title, *most)?;
            drawing::write(&bars, &drawn.to)?;
            if besides > 0 {
                println!("{besides} more groups than --most {most} are not drawn");
            }
            &drawn.to
        }
        Picture::Roofline { rows: drawn, device } => {
            let (rows, title) = read(drawn)?;
            let device = device_of(&rows, device.as_deref())?;
            drawing::write(&Roofline::of_rows(&rows, &device, title)?, &drawn.to)?;
            &drawn.to
        }
    };
    println!("{}.svg and .png", to.display());
    Ok(())
}
