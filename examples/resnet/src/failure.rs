//! Failures of the device, which Burn and its runtimes report by panicking, as errors.

use anyhow::{Result, anyhow};
use blackburn::train::auto_batch::names_lack_of_memory;
use std::{
    env,
    panic::{self, AssertUnwindSafe},
};

/// Lines of a panic's message that are shown; backtraces follow them.
const LINES: usize = 6;

/// Runs `work`; a panic in it comes back as an error that says what to do. The panic's own report is shown where
/// `RUST_BACKTRACE` asks for it.
pub(crate) fn catch<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    if env::var_os("RUST_BACKTRACE").is_none() {
        panic::set_hook(Box::new(|_| {}));
    }
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(anyhow!(advice(text.unwrap_or("it left no message"))))
    })
}

fn advice(message: &str) -> String {
    if let Some(line) = message.lines().find(|line| names_lack_of_memory(line)) {
        return format!(
            "the device ran out of memory ({}). Checkpoints are intact. Use a smaller --batch with a \
             larger --accumulate, or a smaller --size",
            line.trim()
        );
    }
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty()).take(LINES);
    format!(
        "the device or the program failed: {}. Checkpoints are intact; RUST_BACKTRACE=1 shows more",
        lines.collect::<Vec<_>>().join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_is_named_with_what_helps_and_other_panics_keep_their_words() {
        let text = advice("reading failed\nCaused by:\n  out of device memory allocating 42 bytes");
        assert!(text.contains("(out of device memory allocating 42 bytes)"), "{text}");
        assert!(text.contains("--accumulate"), "{text}");
        let text = advice("index 3 is out of range\n\nstack");
        assert!(
            text.contains("index 3 is out of range stack") && !text.contains("--batch"),
            "{text}"
        );
    }
}
