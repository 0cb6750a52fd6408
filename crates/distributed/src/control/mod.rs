//! What ranks tell each other besides numbers: that they are alive, what they agree on, and that one has failed.
//!
//! Each rank keeps one connection to rank 0. A thread for each connection reads it, and one more thread for each
//! process sends a sign of life and looks for ranks that have sent none. So a process that is stopped, hangs in
//! the kernel or loses its machine is noticed within the timeout, one that dies at once, and a rank that computes
//! for long is not taken for dead.
//!
//! The first failure is passed on to all ranks by rank 0; where rank 0 itself fails, each notices that alone.
//! Whoever waits for others then returns the failure. A process that does not come back from what it does (a
//! collective of a library that knows no failures, say) is ended by the watching thread.

mod frame;
mod join;
mod watch;

pub(crate) use join::{Joined, join};

use crate::error::{DistributedError, Failure};
use frame::Message;
use std::{
    collections::BTreeMap,
    fmt,
    io::ErrorKind,
    net::{Shutdown, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a rank that leaves waits until the others have taken note.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long a rank that ends by a failure waits until the others have read of it.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How patient a rank is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Without a sign of life.
    pub(crate) silence: Duration,
    /// For another rank that is alive to come to the same point.
    pub(crate) patience: Duration,
    /// Whether a process that does not react to a failure is ended.
    pub(crate) ends_process: bool,
}

/// This rank's connections.
pub(crate) struct Control {
    rank: usize,
    size: usize,
    hosts: Vec<String>,
    limits: Limits,
    /// To rank 0; those of rank 0 to each other rank. By rank.
    streams: Vec<Option<Mutex<TcpStream>>>,
    state: Mutex<State>,
    changed: Condvar,
    /// What frees whoever waits for numbers.
    on_failure: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

struct State {
    failure: Option<Noted>,
    /// What ranks have given to a round, by its number. Of rank 0.
    given: BTreeMap<u64, Given>,
    /// What all ranks have given to a round.
    complete: BTreeMap<u64, Vec<Vec<u8>>>,
    rounds: u64,
    heard: Vec<Instant>,
    steps: Vec<usize>,
    checkpoint: Option<String>,
    /// Ranks that have ended as they should.
    left: Vec<bool>,
    /// Ranks that know that this one is about to.
    released: Vec<bool>,
    is_leaving: bool,
}

struct Noted {
    failure: Failure,
    since: Instant,
    /// Whether the program has been told.
    is_told: bool,
}

struct Given {
    what: String,
    since: Instant,
    parts: Vec<Option<Vec<u8>>>,
}

impl Control {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The machine of each rank.
    pub(crate) fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Has `action` run when a rank fails.
    pub(crate) fn on_failure(&self, action: impl Fn() + Send + 'static) {
        lock(&self.on_failure).push(Box::new(action));
    }

    /// Notes that this rank begins `step`.
    pub(crate) fn at_step(&self, step: usize) {
        self.locked().steps[self.rank] = step;
    }

    /// Tells all ranks of a new checkpoint.
    pub(crate) fn saved(&self, path: &str) {
        self.locked().checkpoint = Some(path.to_owned());
        self.tell_others(&Message::Saved { path: path.to_owned() });
    }

    /// The failure, if there was one, as an error for the program.
    pub(crate) fn check(&self) -> Result<(), DistributedError> {
        told(&mut self.locked()).map_or(Ok(()), Err)
    }

    /// What each rank gives, in the order of ranks, to all of them. `what` says what it is for, and all ranks
    /// have to come to the same point.
    pub(crate) fn share(
        &self,
        what: &str,
        part: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, DistributedError> {
        let mut state = self.locked();
        if let Some(error) = told(&mut state) {
            return Err(error);
        }
        let number = state.rounds;
        state.rounds += 1;
        if self.rank == 0 {
            self.take(&mut state, number, 0, what.to_owned(), part);
        } else {
            let step = state.steps[self.rank];
            drop(state);
            self.send(0, &Message::Part { number, step, what: what.to_owned() }, &part);
            state = self.locked();
        }
        loop {
            if let Some(parts) = state.complete.remove(&number) {
                return Ok(parts);
            }
            if let Some(error) = told(&mut state) {
                return Err(error);
            }
            state = self.wait(state, Duration::from_millis(200));
        }
    }

    /// Takes what `rank` gives to a round. At rank 0.
    fn take(&self, state: &mut State, number: u64, rank: usize, what: String, part: Vec<u8>) {
        let given =
            state.given.entry(number).or_insert_with(|| Given::new(what.clone(), self.size));
        if given.what != what {
            let others = given.what.clone();
            let what = format!("has come to {what}, while others have come to {others}");
            return self.note(state, rank, what);
        }
        given.parts[rank] = Some(part);
        let gone = given.missing().into_iter().find(|rank| state.left[*rank]);
        if let Some(gone) = gone {
            return self.note(state, gone, format!("has ended, and others have come to {what}"));
        }
        if !state.given.get(&number).is_some_and(|given| given.missing().is_empty()) {
            return;
        }
        let Some(given) = state.given.remove(&number) else { return };
        let parts: Vec<Vec<u8>> = given.parts.into_iter().flatten().collect();
        let lengths = parts.iter().map(Vec::len).collect();
        let message = Message::Complete { number, lengths };
        let all = parts.concat();
        for other in 1..self.size {
            self.send_from(state, other, &message, &all);
        }
        state.complete.insert(number, parts);
        self.changed.notify_all();
    }

    /// Notes that `rank` has failed, unless a failure is known, and tells all who can be told.
    pub(crate) fn fail(&self, rank: usize, what: String) {
        self.note(&mut self.locked(), rank, what);
    }

    fn note(&self, state: &mut State, rank: usize, what: String) {
        let failure = Failure {
            rank,
            size: self.size,
            host: self.hosts.get(rank).cloned().unwrap_or_default(),
            step: state.steps.get(rank).copied().unwrap_or(0),
            what,
            checkpoint: state.checkpoint.clone(),
        };
        self.spread(state, failure);
    }

    fn spread(&self, state: &mut State, failure: Failure) {
        if state.failure.is_some() || state.is_leaving {
            return;
        }
        let message = Message::Failed(failure.clone());
        state.failure = Some(Noted { failure, since: Instant::now(), is_told: false });
        self.changed.notify_all();
        for other in 0..self.size {
            self.send_from(state, other, &message, &[]);
        }
        for action in lock(&self.on_failure).iter() {
            action();
        }
    }

    /// What is wrong where numbers from or to `rank` did not come through: what is known by then, or that.
    pub(crate) fn explain(&self, rank: usize, what: &str) -> DistributedError {
        let since = Instant::now();
        // Rank 0 may be about to say which rank was the first.
        let patience = self.limits.silence.min(Duration::from_secs(2));
        let mut state = self.locked();
        while state.failure.is_none() && since.elapsed() < patience {
            state = self.wait(state, Duration::from_millis(50));
        }
        let what = match state.left.get(rank) {
            Some(true) => format!("has ended, and others go on ({what})"),
            _ => what.to_owned(),
        };
        self.note(&mut state, rank, what);
        told(&mut state).unwrap_or_else(|| DistributedError::Refused {
            rank: self.rank,
            reason: "it is about to end".into(),
        })
    }

    /// Says farewell, so that the others do not take this rank's end for a failure.
    pub(crate) fn leave(&self) {
        if std::thread::panicking() {
            self.fail(self.rank, "panicked; its own output says where".into());
        }
        let mut state = self.locked();
        if state.failure.is_some() {
            // The others may lose the message with the connection.
            drop(state);
            std::thread::sleep(LAST_WORDS);
            state = self.locked();
        } else {
            state.is_leaving = true;
            let step = state.steps[self.rank];
            for other in 0..self.size {
                self.send_from(&mut state, other, &Message::Leave { step }, &[]);
            }
            let since = Instant::now();
            // Connections that are closed before the last message was read take it with them.
            while since.elapsed() < FAREWELL.min(self.limits.silence) && !self.is_released(&state) {
                state = self.wait(state, Duration::from_millis(20));
            }
        }
        state.is_leaving = true;
        drop(state);
        for stream in self.streams.iter().flatten() {
            // It may be closed already.
            let _ = lock(stream).shutdown(Shutdown::Both);
        }
    }

    fn is_released(&self, state: &State) -> bool {
        let has_stream = |rank: &usize| self.streams[*rank].is_some();
        (0..self.size).filter(has_stream).all(|rank| state.released[rank] || state.left[rank])
    }

    fn tell_others(&self, message: &Message) {
        for other in 0..self.size {
            self.send(other, message, &[]);
        }
    }

    /// Sends to `rank`, if there is a connection.
    fn send(&self, rank: usize, message: &Message, blob: &[u8]) {
        if let Err(what) = self.try_send(rank, message, blob) {
            self.fail(rank, what);
        }
    }

    /// As [`send`](Self::send), while the state is locked.
    fn send_from(&self, state: &mut State, rank: usize, message: &Message, blob: &[u8]) {
        if state.left[rank] {
            return;
        }
        if let Err(what) = self.try_send(rank, message, blob) {
            self.note(state, rank, what);
        }
    }

    fn try_send(&self, rank: usize, message: &Message, blob: &[u8]) -> Result<(), String> {
        let Some(stream) = &self.streams[rank] else { return Ok(()) };
        match frame::write(&mut *lock(stream), message, blob) {
            // What it said before it went is still to be read, and says more.
            Err(error)
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                Ok(())
            }
            written => written.map_err(|error| format!("cannot be reached: {error}")),
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Given {
    fn new(what: String, size: usize) -> Self {
        Self { what, since: Instant::now(), parts: vec![None; size] }
    }

    fn missing(&self) -> Vec<usize> {
        let missing = |(rank, part): (usize, &Option<Vec<u8>>)| part.is_none().then_some(rank);
        self.parts.iter().enumerate().filter_map(missing).collect()
    }
}

impl State {
    fn new(size: usize) -> Self {
        Self {
            failure: None,
            given: BTreeMap::new(),
            complete: BTreeMap::new(),
            rounds: 0,
            heard: vec![Instant::now(); size],
            steps: vec![0; size],
            checkpoint: None,
            left: vec![false; size],
            released: vec![false; size],
            is_leaving: false,
        }
    }
}

fn told(state: &mut State) -> Option<DistributedError> {
    let noted = state.failure.as_mut()?;
    noted.is_told = true;
    Some(DistributedError::Failed(Box::new(noted.failure.clone())))
}

/// What a thread that panicked has left is as good as what it would have left.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Leaves when the last one who has it lets it go.
#[derive(Debug)]
pub(crate) struct Membership(pub(crate) Arc<Control>);

impl Drop for Membership {
    fn drop(&mut self) {
        self.0.leave();
    }
}
