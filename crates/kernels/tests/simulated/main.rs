//! Our launchers on simulated GPUs: kernels are compiled by NVRTC, and their PTX is interpreted.

mod attention;
mod convolutions;
mod dump;
mod exact_attention;
mod machine;
mod mutations;
mod products;
mod rows;
mod tensors;

use blackburn_kernels::recorder::{Gpu, Recorder};
use libtest_mimic::{Arguments, Failed, Trial};
use machine::{Compiler, Recordings, Simulated};
use mutations::{Fault, Verdict};
use std::{env, path::Path};

/// A launcher and what it has to compute, on a device of the recorder's.
type Body = fn(&Recorder) -> Result<(), Failed>;

/// A test body and the GPU that it runs on.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    gpu: Gpu,
    /// Whether it runs where time is short.
    quick: bool,
    body: Body,
}

/// A number that `cargo xtask simulate` sets.
fn asked(what: &str) -> Option<usize> {
    env::var(format!("BLACKBURN_SIMULATE_{what}")).ok()?.parse().ok()
}

impl Case {
    /// Runs it under `schedules` schedules; what is launched goes to `recordings`.
    fn run(self, schedules: u64, recordings: Option<Recordings>) -> Result<(), Failed> {
        let machine = Simulated::new(self.gpu.architecture, schedules, recordings)?;
        let recorder = Recorder::on(self.gpu, machine);
        (self.body)(&recorder)?;
        Ok(recorder.check().map_err(|error| error.to_string())?)
    }

    fn trial(self) -> Trial {
        let name = format!("{}::{}", self.gpu.architecture, self.name);
        Trial::test(name, move || {
            let schedules = asked("SCHEDULES").unwrap_or(3) as u64;
            let Some(folder) = env::var_os("BLACKBURN_SIMULATE_DUMP") else {
                return self.run(schedules, None);
            };
            let recordings = Recordings::default();
            self.run(schedules, Some(recordings.clone()))?;
            Ok(dump::write(Path::new(&folder), self, &recordings)?)
        })
    }
}

fn cases() -> Vec<Case> {
    [rows::cases(), products::cases(), convolutions::cases(), attention::cases()].concat()
}

/// Plants faults in everything that a case launches: a row for each, and the faults that nobody noticed.
fn mutate(case: Case, places: usize) -> Result<(Vec<String>, Vec<Fault>), Failed> {
    let recordings = Recordings::default();
    case.run(1, Some(recordings.clone()))?;
    let recordings = recordings.lock().map_err(|error| error.to_string())?;
    let (mut rows, mut survivors) = (Vec::new(), Vec::new());
    for recording in recordings.iter() {
        for mutation in mutations::mutations(recording, places) {
            // Enough for a kernel that waits in a loop, and little enough that one that never ends is noticed.
            let most = 20 * recording.instructions + 100_000;
            let verdict = mutation.judge(recording, 4, most);
            if verdict == Verdict::Survived {
                survivors.push(mutation.fault);
            }
            let (kernel, line) = (&recording.launch.kernel, mutation.line);
            let (name, gpu) = (case.name, case.gpu.architecture);
            rows.push(format!("{gpu}\t{name}\t{kernel}\t{:?}\t{line}\t{verdict}", mutation.fault));
        }
    }
    Ok((rows, survivors))
}

/// Tells what became of each fault that is planted in what a case launches.
fn mutation_trial(case: Case, places: usize) -> Trial {
    let name = format!("{}::mutations_of_{}", case.gpu.architecture, case.name);
    Trial::test(name, move || {
        let (rows, survivors) = mutate(case, places)?;
        let (planted, noticed) = (rows.len(), rows.len() - survivors.len());
        rows.iter().for_each(|row| println!("{row}"));
        println!("{}: {planted} faults planted, {noticed} noticed", case.name);
        Ok(())
    })
}

/// The simulator has to notice what is wrong, too.
fn negative_control() -> Trial {
    Trial::test("planted_faults_in_a_pipeline_are_noticed", || {
        let case = cases().into_iter().find(|case| case.name == products::PIPELINE);
        let (rows, survivors) = mutate(case.ok_or("the case has another name")?, 1)?;
        if rows.len() < 15 {
            return Err(format!("only {} faults were planted", rows.len()).into());
        }
        match survivors.first() {
            None => Ok(()),
            Some(fault) => Err(format!("{fault:?} was not noticed").into()),
        }
    })
}

fn main() {
    let mut arguments = Arguments::from_args();
    // A launch fills a core; devices are apart, but NVRTC is one.
    arguments.test_threads.get_or_insert(2);
    if let Err(reason) = Compiler::find() {
        eprintln!("No kernel can be simulated: {reason}");
        let required = env::var_os("BLACKBURN_REQUIRE_SIMULATOR").is_some();
        std::process::exit(i32::from(required));
    }
    let all = env::var_os("BLACKBURN_SIMULATE_ALL").is_some();
    let cases = cases().into_iter().filter(|case| all || case.quick);
    let trials = match asked("MUTATIONS") {
        Some(places) => cases.map(|case| mutation_trial(case, places)).collect(),
        None => cases.map(Case::trial).chain([negative_control()]).collect(),
    };
    libtest_mimic::run(&arguments, trials).exit();
}
