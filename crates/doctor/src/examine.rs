//! The process that asks: it starts others, hands out groups, and makes a verdict of whatever becomes of them.

use crate::{
    groups::Extent,
    process::{Heard, Process},
    serve::{Answer, Outcome, Request},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    collections::VecDeque,
    process::Command,
    sync::{
        Mutex, PoisonError,
        mpsc::{self, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// What became of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It ran to its end.
    Ran(Outcome),
    /// The process ended without a word: its status, and the last that it printed.
    Crashed {
        /// How it ended.
        status: String,
        /// The last that it printed.
        output: String,
    },
    /// A case took longer than a case may.
    Hung {
        /// The case, from 0; none where the process did not come as far.
        case: Option<usize>,
        /// After how many seconds it was ended.
        seconds: f64,
    },
    /// The process could not be started, could not have the device, or talked nonsense: how.
    Broken(String),
}

impl Verdict {
    /// Whether nothing is wrong: it passed, or the device has no such thing.
    pub fn is_well(&self) -> bool {
        use Outcome::{NotOffered, Passed, Tuned};
        matches!(self, Self::Ran(Passed { .. } | NotOffered(_) | Tuned(_)))
    }
}

/// A group with its verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct Examined {
    /// The group's name.
    pub group: String,
    /// What became of it.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// How to examine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Examination {
    /// The names of the groups, in the order in which they begin.
    pub groups: Vec<String>,
    /// How many cases of each.
    pub extent: Extent,
    /// Processes side by side.
    pub jobs: usize,
    /// How long a case may take, with compiling its kernels, and a process until it has the device.
    pub limit: Duration,
}

/// Asks a process that `start` makes what the machine is.
///
/// # Errors
///
/// Why the device is not to be had there.
pub fn machine<M: DeserializeOwned>(
    start: impl Fn() -> Command,
    limit: Duration,
) -> Result<M, String> {
    match Asked::<M>::start(start(), limit) {
        Ok((_, machine)) => Ok(machine),
        Err(Verdict::Broken(reason)) => Err(reason),
        Err(Verdict::Hung { seconds, .. }) => Err(format!("it did not open within {seconds:.0} s")),
        Err(Verdict::Crashed { status, output }) => {
            Err(format!("the process that opened it ended: {status}\n{output}"))
        }
        Err(Verdict::Ran(outcome)) => Err(format!("it was not asked yet and answered {outcome:?}")),
    }
}

/// Runs the groups in processes that `start` makes, tells of each as it ends, and returns all in the order asked.
///
/// A process whose group was not well is not asked again: what a wrong kernel has done to it is not known.
pub fn examine<M: DeserializeOwned>(
    asked: &Examination,
    start: impl Fn() -> Command + Sync,
    mut tell: impl FnMut(&Examined),
) -> Vec<Examined> {
    let queue: VecDeque<(usize, &String)> = asked.groups.iter().enumerate().collect();
    let queue = Mutex::new(queue);
    let (sender, receiver) = mpsc::channel();
    let mut all: Vec<(usize, Examined)> = thread::scope(|scope| {
        for _ in 0..asked.jobs.clamp(1, asked.groups.len().max(1)) {
            let (queue, start, sender) = (&queue, &start, sender.clone());
            scope.spawn(move || work::<M>(asked, queue, start, &sender));
        }
        drop(sender);
        receiver.iter().inspect(|(_, examined)| tell(examined)).collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, examined)| examined).collect()
}

fn work<M: DeserializeOwned>(
    asked: &Examination,
    queue: &Mutex<VecDeque<(usize, &String)>>,
    start: &(impl Fn() -> Command + Sync),
    done: &Sender<(usize, Examined)>,
) {
    let mut running: Option<Asked<M>> = None;
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some((index, group)) = next else { return };
        let began = Instant::now();
        let process = match running.take() {
            Some(process) => Ok(process),
            None => Asked::start(start(), asked.limit).map(|(process, _)| process),
        };
        let verdict = match process {
            Err(verdict) => verdict,
            Ok(mut process) => {
                let request = Request { group: group.clone(), extent: asked.extent };
                let verdict = process.run(&request, asked.limit);
                running = verdict.is_well().then_some(process);
                verdict
            }
        };
        let examined = Examined { group: group.clone(), verdict, took: began.elapsed() };
        if done.send((index, examined)).is_err() {
            return;
        }
    }
}

/// A process that has the device.
struct Asked<M> {
    process: Process,
    /// The end of what it printed.
    output: String,
    answers: std::marker::PhantomData<M>,
}

impl<M: DeserializeOwned> Asked<M> {
    fn start(command: Command, limit: Duration) -> Result<(Self, M), Verdict> {
        let process = Process::start(command)
            .map_err(|error| Verdict::Broken(format!("a process did not start: {error}")))?;
        let mut asked = Self { process, output: String::new(), answers: std::marker::PhantomData };
        match asked.hear(limit, None)? {
            Answer::Ready(machine) => Ok((asked, machine)),
            Answer::Failed(reason) => Err(Verdict::Broken(reason)),
            Answer::Case(_) | Answer::Done(_) => {
                Err(Verdict::Broken("a process answered before it was asked".into()))
            }
        }
    }

    fn run(&mut self, request: &Request, limit: Duration) -> Verdict {
        self.output.clear();
        let line = match serde_json::to_string(request) {
            Ok(line) => line,
            Err(error) => return Verdict::Broken(error.to_string()),
        };
        if self.process.ask(&line).is_err() {
            return Verdict::Crashed { status: self.process.status(), output: String::new() };
        }
        let mut case = None;
        loop {
            match self.hear(limit, case) {
                // Each case has the time anew.
                Ok(Answer::Case(index)) => case = Some(index),
                Ok(Answer::Done(outcome)) => return Verdict::Ran(outcome),
                Ok(Answer::Ready(_)) => {
                    return Verdict::Broken("a process started in the middle of a group".into());
                }
                Ok(Answer::Failed(reason)) => return Verdict::Broken(reason),
                Err(verdict) => return verdict,
            }
        }
    }

    /// The next answer.
    fn hear(&mut self, limit: Duration, case: Option<usize>) -> Result<Answer<M>, Verdict> {
        /// Bytes that are kept of what a process prints.
        const MOST_OUTPUT: usize = 2000;
        let until = Instant::now() + limit;
        loop {
            match self.process.hear(until) {
                Heard::Answer(text) => {
                    return serde_json::from_str(&text).map_err(|error| {
                        Verdict::Broken(format!("a process answered `{text}`: {error}"))
                    });
                }
                Heard::Printed(line) => {
                    self.output.push_str(&line);
                    let mut cut = self.output.len().saturating_sub(MOST_OUTPUT);
                    while !self.output.is_char_boundary(cut) {
                        cut += 1;
                    }
                    self.output.drain(..cut);
                }
                Heard::Silence => {
                    return Err(Verdict::Hung { case, seconds: limit.as_secs_f64() });
                }
                Heard::End(status) => {
                    let output = self.output.trim().to_owned();
                    return Err(Verdict::Crashed { status, output });
                }
            }
        }
    }
}
