//! Many cases on many threads, and smaller ones where one fails.

use super::{
    Op,
    target::{Found, Target},
};
use blackburn_doctor::{
    check::{Check, Flaw, Stop},
    draw::{Draw, plan_of},
};
use serde::{Deserialize, Serialize};
use std::{
    any::Any,
    cell::RefCell,
    collections::BTreeMap,
    ops::Range,
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Which cases to run, and how.
#[derive(Clone, Debug)]
pub struct Run {
    /// What cases are drawn from.
    pub seed: u64,
    /// Plans to draw from.
    pub plans: u64,
    /// The cases, by their index.
    pub cases: Range<u64>,
    /// Threads.
    pub threads: usize,
    /// After this time no other case begins.
    pub limit: Option<Duration>,
    /// Whether each case gets a fault.
    pub plant: bool,
    /// Which of the cases are this process's.
    pub part: Part,
}

/// A process of some that share the cases of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which one, from 0.
    pub job: u64,
    /// How many there are.
    pub of: u64,
}

impl Part {
    /// A process that runs all cases.
    pub const ALL: Self = Self { job: 0, of: 1 };
}

impl Run {
    /// Whether case `index` is this process's. Those of a plan belong to one process, which alone compiles its
    /// kernels, unless there are fewer plans than processes.
    fn is_mine(&self, index: u64) -> bool {
        let Part { job, of } = self.part;
        let number = if self.plans >= of { plan_of(self.seed, self.plans, index) } else { index };
        number % of.max(1) == job
    }
}

/// How a case ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// Everything is within its bounds, or was refused as it had to be.
    Right,
    /// No kernel serves it here.
    Declined(String),
    /// Something is wrong.
    Wrong(String),
}

/// A case that was run.
#[derive(Clone, Debug)]
pub struct Ran {
    /// How it ended.
    pub ending: Ending,
    /// What it was made of.
    pub told: String,
    /// How many sizes it has.
    pub sizes: usize,
    /// What was compared.
    pub check: Check,
}

/// A case with a wrong answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finding {
    /// The case.
    pub index: u64,
    /// What is wrong.
    pub message: String,
    /// What it was made of.
    pub told: String,
}

/// What a run came to.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Cases that were run.
    pub cases: u64,
    /// Elements that were compared.
    pub compared: usize,
    /// Calls that were refused, as they had to be.
    pub refused: usize,
    /// Cases that no kernel serves, by the reason.
    pub declined: BTreeMap<String, u64>,
    /// Cases with a wrong answer, in their order.
    pub wrong: Vec<Finding>,
    /// Cases that got a fault.
    pub planted: u64,
    /// Those of them that did not fail.
    pub unseen: u64,
    /// The error that is largest by its bound: its share of it, the result and the case.
    pub worst: Option<(f64, String, u64)>,
}

impl Summary {
    /// Adds what another process came to.
    pub fn join(&mut self, other: Self) {
        self.cases += other.cases;
        self.compared += other.compared;
        self.refused += other.refused;
        for (reason, count) in other.declined {
            *self.declined.entry(reason).or_default() += count;
        }
        self.wrong.extend(other.wrong);
        self.wrong.sort_by_key(|finding| finding.index);
        self.planted += other.planted;
        self.unseen += other.unseen;
        if let Some(worst) = other.worst {
            self.add_worst(worst);
        }
    }

    fn add_worst(&mut self, other: (f64, String, u64)) {
        if self.worst.as_ref().is_none_or(|(worst, ..)| other.0 > *worst) {
            self.worst = Some(other);
        }
    }

    fn add(&mut self, index: u64, ran: Ran) {
        self.cases += 1;
        self.compared += ran.check.compared();
        self.refused += ran.check.refused();
        if ran.check.planted() {
            self.planted += 1;
            self.unseen += u64::from(!matches!(ran.ending, Ending::Wrong(_)));
        }
        if let Some((share, what)) = ran.check.worst() {
            self.add_worst((*share, what.clone(), index));
        }
        match ran.ending {
            Ending::Right => {}
            Ending::Declined(reason) => {
                // Reasons that differ in sizes alone are one.
                let reason = reason.replace(|c: char| c.is_ascii_digit(), "#");
                *self.declined.entry(reason).or_default() += 1;
            }
            Ending::Wrong(message) => {
                self.wrong.push(Finding { index, message, told: ran.told });
            }
        }
    }
}

thread_local! {
    /// Where the last panic of this thread came from.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Notes where panics come from instead of printing them: a case that panics is a wrong answer like others.
pub fn note_panics() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        PANIC.with(|noted| *noted.borrow_mut() = place);
    }));
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let place = PANIC.with(|noted| noted.borrow().clone());
    format!("a panic at {place}: {}", text.unwrap_or("no message"))
}

/// Runs case `index`, with its sizes cut by `shifts`.
pub fn case(op: &Op, on: &Target, run: &Run, index: u64, shifts: &[u32]) -> Ran {
    let mut draw = Draw::new(run.seed, run.plans, index, shifts);
    let mut check = Check::new(run.plant.then_some(Flaw::OutOfBounds));
    let ended = panic::catch_unwind(AssertUnwindSafe(|| op.case(on, &mut draw, &mut check)));
    let ending = match ended {
        Ok(Ok(())) => Ending::Right,
        Ok(Err(Stop::Declined(reason))) => Ending::Declined(reason),
        Ok(Err(Stop::Wrong(message))) => Ending::Wrong(message),
        Err(panic) => Ending::Wrong(message_of(&*panic)),
    };
    Ran { ending, told: draw.told(), sizes: draw.sizes(), check }
}

/// Runs all cases of `run`; `done` is told of each, and whether it is wrong.
pub fn cases(op: &Op, found: &Found, run: &Run, done: impl Fn(bool) + Sync) -> Summary {
    let (next, start) = (AtomicU64::new(run.cases.start), Instant::now());
    let is_over = || run.limit.is_some_and(|limit| start.elapsed() >= limit);
    let summary = Mutex::new(Summary::default());
    thread::scope(|scope| {
        for _ in 0..run.threads.max(1) {
            scope.spawn(|| {
                let on = found.target();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= run.cases.end || is_over() {
                        return;
                    }
                    if !run.is_mine(index) {
                        continue;
                    }
                    let ran = case(op, &on, run, index, &[]);
                    done(matches!(ran.ending, Ending::Wrong(_)));
                    summary.lock().unwrap_or_else(PoisonError::into_inner).add(index, ran);
                }
            });
        }
    });
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.wrong.sort_by_key(|finding| finding.index);
    summary
}

/// The smallest case with the same draws that is wrong, too: each size halved as often as that holds.
pub fn shrink(op: &Op, on: &Target, run: &Run, index: u64) -> (Vec<u32>, Ran) {
    const MOST_HALVINGS: u32 = 12;
    let mut best = case(op, on, run, index, &[]);
    let mut shifts = vec![0; best.sizes];
    for place in 0..shifts.len() {
        for halvings in (1..=MOST_HALVINGS).rev() {
            let mut tried = shifts.clone();
            tried[place] = halvings;
            let ran = case(op, on, run, index, &tried);
            if matches!(ran.ending, Ending::Wrong(_)) {
                (shifts, best) = (tried, ran);
                break;
            }
        }
    }
    (shifts, best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(plans: u64, part: Part) -> Run {
        Run { seed: 3, plans, cases: 0..500, threads: 1, limit: None, plant: false, part }
    }

    #[test]
    fn each_case_belongs_to_one_process_and_those_of_a_plan_to_the_same() {
        for plans in [2, 4, 9] {
            let mut of_plan = BTreeMap::new();
            for index in 0..500 {
                let is_mine = |job: &u64| run(plans, Part { job: *job, of: 4 }).is_mine(index);
                let jobs: Vec<u64> = (0..4).filter(is_mine).collect();
                assert_eq!(jobs.len(), 1, "case {index}");
                let job = of_plan.entry(plan_of(3, plans, index)).or_insert(jobs[0]);
                assert!(plans < 4 || *job == jobs[0]);
            }
            assert_eq!(of_plan.len() as u64, plans);
        }
        assert!((0..500).all(|index| run(9, Part::ALL).is_mine(index)));
    }

    #[test]
    fn summaries_add_up() {
        let finding = |index| Finding { index, message: "wrong".into(), told: String::new() };
        let summary = |index, share| Summary {
            cases: 3,
            compared: 10,
            refused: 1,
            declined: BTreeMap::from([("no".into(), 2)]),
            wrong: vec![finding(index)],
            planted: 2,
            unseen: 1,
            worst: Some((share, "y".into(), index)),
        };
        let mut joined = summary(7, 0.5);
        joined.join(summary(4, 0.75));
        let Summary { cases, compared, refused, declined, wrong, planted, unseen, worst } = joined;
        assert_eq!((cases, compared, refused, planted, unseen), (6, 20, 2, 4, 2));
        assert_eq!((declined["no"], worst), (4, Some((0.75, "y".into(), 4))));
        assert_eq!(wrong.iter().map(|finding| finding.index).collect::<Vec<_>>(), [4, 7]);
    }
}
