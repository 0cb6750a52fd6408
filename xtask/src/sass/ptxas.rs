//! What `ptxas -v` reports.

use anyhow::{Result, bail};

/// Resources of a compiled kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) registers: u32,
    /// Bytes that spilled registers occupy, stores and loads together, in all functions.
    pub(crate) spill_bytes: u64,
    pub(crate) stack_bytes: u64,
    /// Shared memory the source declares statically.
    pub(crate) shared_bytes: u64,
    /// ptxas warns of a loss of performance: it made `wgmma` instructions wait for each other, or left
    /// out a change of the number of registers.
    pub(crate) slowed_down: bool,
}

/// Reads the report of a file. Registers and shared memory are those of the kernel `entry`, or the
/// largest of all kernels if it is empty; a spill counts wherever it happens, since device
/// functions that were not inlined are reported on their own.
pub(crate) fn parse(report: &str, entry: &str) -> Result<Usage> {
    let mut usage = Usage::default();
    let mut current = "";
    let mut seen = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            current = rest.split('\'').next().unwrap_or_default();
            seen.push(current);
        } else if line.contains("Potential Performance Loss") {
            usage.slowed_down = true;
        } else if line.contains("bytes stack frame") {
            usage.stack_bytes = usage.stack_bytes.max(before(line, "bytes stack frame"));
            usage.spill_bytes += before(line, "bytes spill stores");
            usage.spill_bytes += before(line, "bytes spill loads");
        } else if line.contains(": Used ") && (entry.is_empty() || entry == current) {
            usage.registers = usage.registers.max(before(line, "registers") as u32);
            usage.shared_bytes = usage.shared_bytes.max(before(line, "bytes smem"));
        }
    }
    if seen.is_empty() {
        bail!("the compiled file holds no kernel");
    }
    if !entry.is_empty() && !seen.contains(&entry) {
        bail!("the compiled file holds no kernel `{entry}`, but {}", seen.join(", "));
    }
    Ok(usage)
}

/// The number before `unit`, or 0 if the line does not mention it.
fn before(line: &str, unit: &str) -> u64 {
    let Some(at) = line.find(unit) else { return 0 };
    let words = line[..at].split_whitespace();
    words.last().and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gelu' for 'sm_90a'
ptxas info    : Function properties for gelu
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 26 registers, used 1 barriers, 4096 bytes smem, 552 bytes cmem[0]
ptxas info    : Compile time = 8.216 ms
";

    const SPILLING: &str = "\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function 'small' for 'sm_80'
ptxas info    : Function properties for small
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'large' for 'sm_80'
ptxas info    : Function properties for large
    248 bytes stack frame, 244 bytes spill stores, 300 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 248 bytes cumulative stack size, 360 bytes cmem[0]
";

    #[test]
    fn a_clean_report_is_read_in_full() {
        let expected = Usage { registers: 26, shared_bytes: 4096, ..Usage::default() };
        assert_eq!(parse(CLEAN, "").unwrap(), expected);
        assert_eq!(parse(CLEAN, "gelu").unwrap(), expected);
    }

    #[test]
    fn spills_are_added_up() {
        let usage = parse(SPILLING, "large").unwrap();
        assert_eq!((usage.spill_bytes, usage.stack_bytes), (544, 248));
    }

    #[test]
    fn registers_are_those_of_the_entry_but_a_spill_counts_anywhere() {
        let usage = parse(SPILLING, "small").unwrap();
        assert_eq!((usage.registers, usage.spill_bytes), (10, 544));
        assert_eq!(parse(SPILLING, "").unwrap().registers, 32);
    }

    #[test]
    fn a_warning_of_lost_performance_is_seen() {
        let warning = "ptxas info    : (C7513) Potential Performance Loss: wgmma.mma_async \
                       instructions are serialized due to";
        assert!(parse(&format!("{CLEAN}{warning}"), "gelu").unwrap().slowed_down);
        assert!(!parse(CLEAN, "gelu").unwrap().slowed_down);
    }

    #[test]
    fn a_missing_kernel_is_an_error() {
        assert!(parse(CLEAN, "softmax").unwrap_err().to_string().contains("no kernel `softmax`"));
        assert!(parse("", "").is_err());
    }
}
