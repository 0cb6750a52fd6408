//! Our launchers on simulated GPUs: kernels are compiled by NVRTC, and their PTX is interpreted.

mod attention;
mod batches;
mod block_scaled;
mod convolutions;
mod decoding;
mod dump;
mod exact_attention;
mod machine;
mod mutations;
mod packed_attention;
mod products;
mod rounded_blocks;
mod rows;
mod tensors;
mod wide_attention;

use blackburn_kernels::recorder::{Gpu, Recorder};
use libtest_mimic::{Arguments, Failed, Trial};
use machine::{Compiler, Recording, Recordings, Simulated};
use mutations::{Fault, Suite, Verdict};
use std::{env, mem, path::Path, thread};

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

    fn full_name(self) -> String {
        format!("{}::{}", self.gpu.architecture, self.name)
    }

    fn trial(self) -> Trial {
        Trial::test(self.full_name(), move || {
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
    [
        rows::cases(),
        products::cases(),
        batches::cases(),
        block_scaled::cases(),
        rounded_blocks::cases(),
        convolutions::cases(),
        attention::cases(),
        decoding::cases(),
        wide_attention::cases(),
    ]
    .concat()
}

/// What cases launch, in their order.
fn recorded(cases: &[Case]) -> Result<Vec<Vec<Recording>>, Failed> {
    let mut launches = Vec::new();
    for pair in cases.chunks(2) {
        let found = thread::scope(|scope| {
            let started: Vec<_> = pair
                .iter()
                .map(|case| {
                    scope.spawn(|| {
                        let recordings = Recordings::default();
                        case.run(1, Some(recordings.clone()))?;
                        let mut recordings =
                            recordings.lock().map_err(|error| error.to_string())?;
                        Ok::<_, Failed>(mem::take(&mut *recordings))
                    })
                })
                .collect();
            let joined = started
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err("a case panicked".into())));
            joined.collect::<Result<Vec<_>, _>>()
        })?;
        launches.extend(found);
    }
    Ok(launches)
}

/// Plants faults in a kernel: a row for each, and the faults that nobody noticed.
fn mutate(name: &str, suite: &Suite, places: usize) -> (Vec<String>, Vec<Fault>) {
    let kernel = &suite.launches[0].launch.kernel;
    let (mut rows, mut survivors) = (Vec::new(), Vec::new());
    for mutation in suite.mutations(places) {
        let verdict = suite.judge(&mutation, 4);
        if verdict == Verdict::Survived {
            survivors.push(mutation.fault);
        }
        let (fault, line) = (mutation.fault, mutation.line);
        rows.push(format!("{name}\t{kernel}\t{fault:?}\t{line}\t{verdict}"));
    }
    (rows, survivors)
}

/// A trial for each kernel that the asked cases launch: faults are planted in it, and every launch of it by any
/// case may notice them.
fn mutation_trials(asked: &[Case], places: usize) -> Result<Vec<Trial>, Failed> {
    let mut known: Vec<(String, Suite)> = Vec::new();
    for (case, launches) in asked.iter().zip(recorded(asked)?) {
        for suite in Suite::by_kernel(launches) {
            match known.iter_mut().find(|(_, known)| known.ptx == suite.ptx) {
                Some((_, known)) => known.launches.extend(suite.launches),
                None => known.push((case.full_name(), suite)),
            }
        }
    }
    // No kernel is compiled for two architectures, and recordings of all take gigabytes.
    let is_other = |case: &Case| {
        let mut of_same = asked.iter().filter(|a| a.gpu.architecture == case.gpu.architecture);
        let first = of_same.next();
        first.is_some() && first.into_iter().chain(of_same).all(|asked| asked.name != case.name)
    };
    let others: Vec<_> = cases().into_iter().filter(is_other).collect();
    for pair in others.chunks(2) {
        for launch in recorded(pair)?.into_iter().flatten() {
            if let Some((_, suite)) = known.iter_mut().find(|(_, suite)| suite.ptx == launch.ptx) {
                suite.launches.push(launch);
            }
        }
    }
    let trials = known.into_iter().enumerate().map(|(number, (name, suite))| {
        Trial::test(format!("mutations_of_{name}_{number}"), move || {
            let (rows, survivors) = mutate(&name, &suite, places);
            let (planted, noticed) = (rows.len(), rows.len() - survivors.len());
            rows.iter().for_each(|row| println!("{row}"));
            println!("{name}: {planted} faults planted, {noticed} noticed");
            Ok(())
        })
    });
    Ok(trials.collect())
}

/// The simulator has to notice what is wrong, too.
fn negative_control() -> Trial {
    Trial::test("planted_faults_in_a_pipeline_are_noticed", || {
        let case = cases().into_iter().find(|case| case.name == products::PIPELINE);
        let case = case.ok_or("the case has another name")?;
        let suites = Suite::by_kernel(recorded(&[case])?.into_iter().flatten());
        let judged = suites.iter().map(|suite| mutate(&case.full_name(), suite, 1));
        let (rows, survivors): (Vec<_>, Vec<_>) = judged.unzip();
        let (rows, survivors) = (rows.concat(), survivors.concat());
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
        Some(places) => {
            // The filter chooses whose kernels get faults, not who may notice them.
            let filter = arguments.filter.take().unwrap_or_default();
            let cases: Vec<_> = cases.filter(|case| case.full_name().contains(&filter)).collect();
            mutation_trials(&cases, places).unwrap_or_else(|error| {
                eprintln!("{}", error.message().unwrap_or("a case failed"));
                std::process::exit(1)
            })
        }
        None => cases.map(Case::trial).chain([negative_control()]).collect(),
    };
    libtest_mimic::run(&arguments, trials).exit();
}
