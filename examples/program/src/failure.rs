//! Failures of the device, which Burn and its runtimes report by panicking, as errors.

use anyhow::{Error, Result, anyhow};
use blackburn::train::auto_batch::names_lack_of_memory;
use std::{
    any::Any,
    env,
    io::{self, Write as _},
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
};

/// Lines of a panic's message that are shown; backtraces follow them.
const LINES: usize = 6;

/// Runs `work`; a panic in it comes back as an error that says what to do. `smaller` says what takes less memory.
///
/// The panic's own report, with its backtrace, is shown where `RUST_BACKTRACE` asks for it.
///
/// # Errors
///
/// When `work` fails or panics.
pub fn catch<T>(smaller: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if env::var_os("RUST_BACKTRACE").is_none() {
        panic::set_hook(Box::new(|_| {}));
    }
    panic::catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(described(&*panic, smaller)))
}

/// The exit code of a program that has ended so. An error is written to standard error at once, in one piece: several
/// ranks may write there.
pub fn ended(done: Result<ExitCode>) -> ExitCode {
    let error = match done {
        Ok(code) => return code,
        Err(error) => error,
    };
    // Where standard error is closed, the code alone tells.
    let _ = io::stderr().write_all(format!("error: {error:#}\n").as_bytes());
    ExitCode::FAILURE
}

fn described(panic: &(dyn Any + Send), smaller: &str) -> Error {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it left no message");
    if let Some(line) = message.lines().find(|line| names_lack_of_memory(line)) {
        let line = line.trim();
        return anyhow!(
            "the device ran out of memory ({line}). Checkpoints are intact. Use {smaller}"
        );
    }
    // Runtimes append backtraces, or say that there are none; the first lines say what happened.
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty()).take(LINES);
    anyhow!(
        "the device or the program failed: {}. Checkpoints are intact; RUST_BACKTRACE=1 shows more",
        lines.collect::<Vec<_>>().join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_deep_in_a_message_is_named_first() {
        let message = "Error while reading data: Execution(An error happened\nCaused by:\n  \
                       skipped `ReduceKernel`\nCaused by:\n  out of device memory allocating 42 \
                       bytes\nNo backtrace available)";
        let text = described(&message.to_string(), "a smaller --batch").to_string();
        let expected = "ran out of memory (out of device memory allocating 42 bytes)";
        assert!(text.contains(expected) && text.ends_with("Use a smaller --batch"), "{text}");
    }

    #[test]
    fn other_panics_keep_what_they_say() {
        let text = described(&"index 3 is out of range\n\nstack", "a smaller --batch").to_string();
        assert!(text.contains("index 3 is out of range stack"), "{text}");
        assert!(!text.contains("--batch"), "{text}");
    }
}
