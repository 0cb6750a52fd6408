//! The threads that listen to other ranks, and look for those that are silent.

use super::{Control, Limits, Noted, State, frame, frame::Message};
use std::{
    net::TcpStream,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

/// Looks in each timeout.
const LOOKS: u32 = 10;
/// How long a program has, once a rank has failed, to end by itself.
const GRACE: Duration = Duration::from_secs(3);

/// Starts the threads. They end with the connections.
pub(super) fn start(control: &Arc<Control>, readers: Vec<(usize, TcpStream)>) {
    for (rank, stream) in readers {
        let control = control.clone();
        std::thread::spawn(move || listen(&control, rank, stream));
    }
    let (watched, pause) = (Arc::downgrade(control), control.limits.silence / LOOKS);
    let pause = pause.clamp(Duration::from_millis(10), Duration::from_secs(1));
    std::thread::spawn(move || watch(&watched, pause));
}

fn listen(control: &Control, rank: usize, mut stream: TcpStream) {
    loop {
        match frame::read(&mut stream) {
            Ok((message, blob)) => control.hear(rank, message, blob),
            Err(error) => return control.lost(rank, &error),
        }
    }
}

fn watch(control: &Weak<Control>, pause: Duration) {
    while let Some(control) = control.upgrade() {
        if !control.look() {
            return;
        }
        drop(control);
        std::thread::sleep(pause);
    }
}

/// Ends the process after a failure, unless it is to live whatever happens. Nothing is cleaned up: libraries that wait
/// for the device, which waits for ranks that are gone, would never come to an end.
fn end(noted: &Noted, limits: Limits) {
    if !limits.ends_process {
        return;
    }
    if !noted.is_told {
        eprintln!("error: {}", noted.failure);
    }
    #[cfg(unix)]
    // SAFETY: it does not return.
    unsafe {
        libc::_exit(1)
    }
    #[cfg(not(unix))]
    std::process::exit(1)
}

impl Control {
    /// Ends the process if there was a failure, which the program has heard of or not.
    #[cfg(feature = "cuda")]
    pub(crate) fn end_process(&self) {
        if let Some(noted) = &self.locked().failure {
            end(noted, self.limits);
        }
    }

    fn hear(&self, rank: usize, message: Message, blob: Vec<u8>) {
        let mut state = self.locked();
        state.heard[rank] = Instant::now();
        match message {
            Message::Alive { step } => state.steps[rank] = step,
            Message::Part { number, step, what } => {
                state.steps[rank] = step;
                self.take(&mut state, number, rank, what, blob);
            }
            Message::Complete { number, lengths } => {
                let mut rest = blob.as_slice();
                let parts = lengths.iter().map(|length| {
                    let (part, others) = rest.split_at_checked(*length).unwrap_or((rest, &[]));
                    rest = others;
                    part.to_vec()
                });
                let parts = parts.collect();
                state.complete.insert(number, parts);
                self.changed.notify_all();
            }
            Message::Saved { path } => {
                if self.rank == 0 {
                    for other in (1..self.size).filter(|other| *other != rank) {
                        let message = Message::Saved { path: path.clone() };
                        self.send_from(&mut state, other, &message, &[]);
                    }
                }
                state.checkpoint = Some(path);
            }
            Message::Failed(failure) => self.spread(&mut state, failure),
            Message::Leave { step } => {
                state.steps[rank] = step;
                self.send_from(&mut state, rank, &Message::Farewell, &[]);
                state.left[rank] = true;
                let waiting = state.given.values().find(|given| given.parts[rank].is_none());
                if let Some(what) = waiting.map(|given| given.what.clone()) {
                    let what = format!("has ended, and others have come to {what}");
                    self.note(&mut state, rank, what);
                }
                self.changed.notify_all();
            }
            Message::Farewell => {
                state.released[rank] = true;
                self.changed.notify_all();
            }
            Message::Hello { .. }
            | Message::Expected
            | Message::OtherJob
            | Message::Welcome { .. }
            | Message::Refused { .. } => {}
        }
    }

    /// The connection to `rank` is no more.
    fn lost(&self, rank: usize, error: &std::io::Error) {
        let mut state = self.locked();
        if state.left[rank] || state.is_leaving {
            state.released[rank] = true;
            return self.changed.notify_all();
        }
        let what = match error.kind() {
            std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => {
                "has died: its process or its machine is gone".into()
            }
            _ => format!("cannot be heard: {error}"),
        };
        self.note(&mut state, rank, what);
    }

    /// Gives a sign of life, and looks for those who give none. Whether there is more to look for.
    fn look(&self) -> bool {
        let mut state = self.locked();
        if let Some(noted) = &state.failure {
            let waited = noted.since.elapsed();
            let limit = if noted.is_told { 10 * GRACE } else { GRACE.min(self.limits.silence) };
            if waited > limit {
                end(noted, self.limits);
            }
            return self.limits.ends_process;
        }
        if state.is_leaving {
            return false;
        }
        let step = state.steps[self.rank];
        let silence = self.limits.silence;
        for rank in 0..self.size {
            if self.streams[rank].is_none() || state.left[rank] {
                continue;
            }
            self.send_from(&mut state, rank, &Message::Alive { step }, &[]);
            if state.heard[rank].elapsed() > silence {
                let what = format!("has given no sign of life for {} s", silence.as_secs_f64());
                self.note(&mut state, rank, what);
            }
        }
        self.look_for_late_ones(&mut state);
        true
    }

    /// Ends the wait for ranks that are alive and do not come. Rank 0 knows of all waits, its own or not.
    fn look_for_late_ones(&self, state: &mut State) {
        let patience = self.limits.patience;
        let Some(given) = state.given.values().find(|given| given.since.elapsed() > patience)
        else {
            return;
        };
        let missing = given.missing();
        let first = missing.first().copied().unwrap_or(self.rank);
        // One that has become silent is soon found to be.
        let is_alive = state.heard[first].elapsed() < 3 * self.limits.silence / LOOKS;
        if first != self.rank && !is_alive {
            return;
        }
        let others = if missing.len() > 1 { ", nor have others" } else { "" };
        let (what, waited) = (&given.what, patience.as_secs_f64());
        let what = format!("is alive and has not come to {what} within {waited} s{others}");
        self.note(state, first, what);
    }
}
