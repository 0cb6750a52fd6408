//! Failures of the device, which Burn and its runtimes report by panicking, as errors.

use anyhow::{Error, Result, anyhow};
use blackburn::train::auto_batch::names_lack_of_memory;
use std::{
    any::Any,
    env,
    panic::{self, AssertUnwindSafe},
};

/// Runs `work`; a panic in it comes back as an error that says what to do.
///
/// The panic's own report, with its backtrace, is shown where `RUST_BACKTRACE` asks for it.
pub(crate) fn catch<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    if env::var_os("RUST_BACKTRACE").is_none() {
        panic::set_hook(Box::new(|_| {}));
    }
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(describe(&*panic)))
}

fn describe(panic: &(dyn Any + Send)) -> Error {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it left no message");
    if let Some(line) = message.lines().find(|line| names_lack_of_memory(line)) {
        return anyhow!(
            "the device ran out of memory ({}). Checkpoints are intact. Use a smaller --batch with \
             a larger --accumulate, or a smaller --context",
            line.trim()
        );
    }
    // Runtimes append backtraces, or say that there are none; the first lines say what happened.
    let lines: Vec<&str> =
        message.lines().map(str::trim).filter(|line| !line.is_empty()).take(6).collect();
    anyhow!(
        "the device or the program failed: {}. Checkpoints are intact; RUST_BACKTRACE=1 shows more",
        lines.join(" ")
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
        let text = describe(&message.to_string()).to_string();
        assert!(
            text.contains("ran out of memory (out of device memory allocating 42 bytes)"),
            "{text}"
        );
        assert!(text.contains("--batch"), "{text}");
    }

    #[test]
    fn other_panics_keep_what_they_say() {
        let text = describe(&"index 3 is out of range\n\nstack").to_string();
        assert!(text.contains("index 3 is out of range stack"), "{text}");
        assert!(!text.contains("--batch"), "{text}");
    }
}
