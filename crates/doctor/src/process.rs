//! A process that is asked things, a line at a time, and may crash or hang over them.

use std::{
    io::{self, BufRead, BufReader, PipeReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// Begins a line that answers. What else a process prints does not begin with it.
pub const MARK: char = '\x1e';

/// Prints an answer, on a line of its own.
pub fn answer(text: &str) {
    println!("\n{MARK}{text}");
    let _ = io::stdout().flush();
}

/// What came from a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// An answer.
    Answer(String),
    /// A line of something else, with its end.
    Printed(String),
    /// Nothing, until the time was up.
    Silence,
    /// Its end, with its status.
    End(String),
}

/// A process at work. Dropped, it is ended, and on Unix what it started with it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    /// Starts it, with its input and both of its outputs here.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        command.stdin(Stdio::piped()).stdout(writer.try_clone()?).stderr(writer);
        // A group of its own, so that what it starts ends with it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn()?;
        // The command holds the writing ends; with them open, the end of the process goes unseen.
        drop(command);
        let input = child.stdin.take().ok_or_else(|| io::Error::other("it has no input"))?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || read(reader, &sender));
        Ok(Self { child, input, lines })
    }

    /// Sends a line.
    ///
    /// # Errors
    ///
    /// What the system says, such as where it has ended.
    pub fn ask(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush())
    }

    /// The next line, if it comes in time.
    pub fn hear(&mut self, until: Instant) -> Heard {
        let left = until.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => match line.trim_end().strip_prefix(MARK) {
                Some(answer) => Heard::Answer(answer.to_owned()),
                None => Heard::Printed(line),
            },
            Err(RecvTimeoutError::Timeout) => Heard::Silence,
            Err(RecvTimeoutError::Disconnected) => Heard::End(self.status()),
        }
    }

    /// How it ended, of one that talks no more.
    pub fn status(&mut self) -> String {
        // It may take a moment to end after its output did.
        for _ in 0..50 {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(100)),
                Ok(Some(status)) => return status.to_string(),
                Err(error) => return error.to_string(),
            }
        }
        "it talks no more".into()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Ok(group) = i32::try_from(self.child.id()) {
            // SAFETY: a plain system call. The process was not waited for unless it ended, and then
            // what it may have left in its group is to end as well.
            unsafe { libc::kill(-group, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(reader: PipeReader, lines: &mpsc::Sender<String>) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while let Ok(1..) = reader.read_until(b'\n', &mut line) {
        if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
            return;
        }
        line.clear();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::start(command).unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn answers_are_told_from_what_else_is_printed() {
        let mut process = shell("read word; echo heard $word; printf '\\036yes\\n'; exit 3");
        process.ask("this").unwrap();
        assert_eq!(process.hear(soon()), Heard::Printed("heard this\n".into()));
        assert_eq!(process.hear(soon()), Heard::Answer("yes".into()));
        let Heard::End(status) = process.hear(soon()) else { panic!("it has not ended") };
        assert!(status.contains('3'), "{status}");
    }

    #[test]
    fn one_that_hangs_is_silent_and_ends_with_what_it_started_when_it_is_dropped() {
        let mut process = shell("sleep 1000 & echo $!; wait");
        let Heard::Printed(child) = process.hear(soon()) else { panic!("it said nothing") };
        assert_eq!(process.hear(Instant::now() + Duration::from_millis(50)), Heard::Silence);
        drop(process);
        let is_there = || {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", child.trim()));
            // Ended and not yet waited for by whoever has inherited it.
            state.is_ok_and(|state| !state.contains(") Z "))
        };
        let until = soon();
        while is_there() && Instant::now() < until {
            thread::sleep(Duration::from_millis(20));
        }
        assert!(!is_there());
    }
}
