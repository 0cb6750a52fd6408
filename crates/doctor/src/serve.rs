//! The process that runs cases: it opens the device, takes names of groups from its input, and answers.

use crate::{
    check::{Check, Stop},
    draw::Draw,
    groups::{self, Extent, Group},
    process::answer,
    target::Target,
    tune::{Tuned, Tuning, tune},
};
use cubecl::client::Client;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    any::Any,
    io::{self, BufRead},
    panic::{self, AssertUnwindSafe},
    sync::mpsc::{self, Receiver},
    thread,
};

/// What a process is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The group's name.
    pub group: String,
    /// How many of its cases.
    pub extent: Extent,
}

/// What it answers. `M` describes the machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<M> {
    /// The device is open, and this is what it is.
    Ready(M),
    /// The device is not to be had, and why.
    Failed(String),
    /// A case of the group begins.
    Case(usize),
    /// The group has ended.
    Done(Outcome),
}

/// How a group ended, in the process that ran it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Everything was within its bounds.
    Passed {
        /// Cases that ran.
        cases: usize,
        /// Elements that were compared.
        elements: usize,
        /// The largest error, as a share of its bound.
        worst: f64,
    },
    /// No case is served here, and why: the device lacks the type or the instructions.
    NotOffered(String),
    /// A case was wrong: which, and what was seen.
    Wrong(String),
    /// Plans were measured: what each product came to.
    Tuned(Vec<Tuned>),
}

/// Runs groups until the input ends, and then ends the process. `open` gives the device and describes it.
pub fn serve<M>(open: impl FnOnce() -> Result<(Client, M), String>) -> !
where
    M: Serialize + DeserializeOwned,
{
    #[cfg(feature = "faults")]
    crate::faults::at_start();
    let opened = panic::catch_unwind(AssertUnwindSafe(open));
    match opened.unwrap_or_else(|panic| Err(message_of(&*panic))) {
        Ok((client, machine)) => {
            say(&Answer::Ready(machine));
            let on = Target::new(client);
            for line in requests() {
                let done = match serde_json::from_str::<Request>(&line) {
                    Ok(request) => run(&on, &request),
                    Err(error) => Outcome::Wrong(format!("`{line}` asks nothing: {error}")),
                };
                say(&Answer::<M>::Done(done));
            }
        }
        Err(reason) => say(&Answer::<M>::Failed(reason)),
    }
    leave()
}

/// Lines of the input. When it ends, so does the process, in the middle of a kernel that hangs, too: whoever asked
/// is gone.
fn requests() -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
        leave()
    });
    lines
}

/// Ends the process at once: drivers' handlers at an ordinary exit would wait for kernels that hang.
fn leave() -> ! {
    #[cfg(unix)]
    // SAFETY: nothing is left to do that an exit handler would do.
    unsafe {
        libc::_exit(0)
    }
    #[cfg(not(unix))]
    std::process::exit(0)
}

fn say<M: Serialize>(what: &Answer<M>) {
    // Without an answer, the other side takes the process for broken.
    if let Ok(text) = serde_json::to_string(what) {
        answer(&text);
    }
}

fn run(on: &Target, request: &Request) -> Outcome {
    if let Some(tuning) = Tuning::named(&request.group) {
        return measure(on, tuning);
    }
    let Some(group) = groups::named(&request.group, request.extent) else {
        return Outcome::Wrong(format!("no group is called `{}`", request.group));
    };
    if !on.storages.contains(&group.storage) {
        return Outcome::NotOffered(format!("the device does not compute in {:?}", group.storage));
    }
    let on = Target { family: Some(group.family), ..on.clone() };
    let (mut cases, mut elements, mut worst, mut reason) = (0, 0, 0.0, None);
    for index in 0..group.cases.len() {
        say(&Answer::<()>::Case(index));
        match case(&on, &group, index) {
            Ok(check) => {
                cases += 1;
                elements += check.compared();
                worst = check.worst().map_or(worst, |(share, _)| share.max(worst));
            }
            Err(Stop::Declined(why)) => reason = Some(why),
            Err(Stop::Wrong(what)) => return Outcome::Wrong(what),
        }
    }
    match reason {
        Some(reason) if cases == 0 => Outcome::NotOffered(reason),
        _ if elements == 0 => Outcome::Wrong("nothing was compared".into()),
        _ => Outcome::Passed { cases, elements, worst },
    }
}

/// Measures the plans of a layer.
fn measure(on: &Target, tuning: Tuning) -> Outcome {
    let attempt = || tune(on, tuning, |index| say(&Answer::<()>::Case(index)));
    let ended = panic::catch_unwind(AssertUnwindSafe(attempt));
    match ended.unwrap_or_else(|panic| Err(Stop::Wrong(message_of(&*panic)))) {
        Ok(tuned) => Outcome::Tuned(tuned),
        Err(Stop::Declined(why)) => Outcome::NotOffered(why),
        Err(Stop::Wrong(what)) => Outcome::Wrong(what),
    }
}

/// One case of a group.
///
/// # Errors
///
/// Why it went no further; what is wrong is told with what the case is made of.
pub fn case(on: &Target, group: &Group, index: usize) -> Result<Check, Stop> {
    let mut draw = Draw::of(&group.cases[index], index as u64);
    let mut check = Check::new(None);
    let attempt = || {
        #[cfg(feature = "faults")]
        crate::faults::at_case(on, &group.name(), &mut check)?;
        (group.op.case)(on, &mut draw, &mut check)
    };
    let ended = panic::catch_unwind(AssertUnwindSafe(attempt));
    let ended = ended.unwrap_or_else(|panic| Err(Stop::Wrong(message_of(&*panic))));
    let unheeded = draw.unheeded();
    match ended {
        // What a case was told and did not ask for was not tried.
        Ok(()) if !unheeded.is_empty() => {
            Err(Stop::Wrong(format!("case {index} was told in vain: {}", unheeded.join(" "))))
        }
        Ok(()) => Ok(check),
        Err(Stop::Wrong(what)) => {
            Err(Stop::Wrong(format!("case {index}: {what} ({})", draw.told())))
        }
        Err(declined) => Err(declined),
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a panic: {}", text.unwrap_or("no message"))
}
