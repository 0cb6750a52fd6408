//! What was measured for a kernel, what is wrong with it, and the table of it all.

use super::{disassembly::Instructions, manifest::Kernel, ptxas::Usage};
use serde::Serialize;
use std::collections::BTreeMap;

/// The outcome for one kernel on one architecture.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Verdict {
    pub(crate) kernel: String,
    pub(crate) architecture: String,
    pub(crate) registers: u32,
    pub(crate) spill_bytes: u64,
    pub(crate) stack_bytes: u64,
    /// Loads and stores of local memory in the machine code.
    pub(crate) local_accesses: u32,
    /// Static and dynamic.
    pub(crate) shared_memory_bytes: u64,
    pub(crate) tensor_core: BTreeMap<String, u32>,
    /// Empty if the kernel passed.
    pub(crate) faults: Vec<String>,
    /// A compiler's message, if there was an error.
    pub(crate) log: Option<String>,
}

impl Verdict {
    /// A kernel that did not compile.
    pub(crate) fn refused(kernel: &Kernel, architecture: &str, by: &str, log: String) -> Self {
        Self {
            kernel: kernel.name.clone(),
            architecture: architecture.to_owned(),
            faults: vec![format!("{by} refuses it")],
            log: Some(log),
            ..Self::default()
        }
    }

    /// Judges what was measured by what the manifest asks for.
    pub(crate) fn judge(kernel: &Kernel, arch: &str, usage: Usage, code: &Instructions) -> Self {
        let mut faults = Vec::new();
        let calls: Vec<_> = code.calls().collect();
        if usage.spill_bytes > kernel.spill_bytes {
            faults.push("registers spill".to_owned());
        } else if usage.spill_bytes == 0 && code.local_memory() > 0 && calls.is_empty() {
            faults.push("local memory is used (an array with a run-time index?)".to_owned());
        }
        if !calls.is_empty() {
            faults.push(format!("{} is called", calls.join(", ")));
        }
        if usage.slowed_down {
            faults.push("ptxas warns of a loss of performance".to_owned());
        }
        if let Some(name) = kernel.tensor_core.as_deref().filter(|name| code.count(name) == 0) {
            faults.push(format!("no {name}"));
        }
        if let Some(limit) = kernel.max_registers.filter(|limit| usage.registers > *limit) {
            faults.push(format!("more than {limit} registers"));
        }
        let shared = usage.shared_bytes + kernel.shared_memory_bytes;
        if let Some(limit) = max_shared_memory(arch).filter(|limit| shared > *limit) {
            faults.push(format!("more than {limit} bytes of shared memory"));
        }
        if code.is_empty() {
            faults.push("nvdisasm's output is not understood".to_owned());
        }
        Self {
            kernel: kernel.name.clone(),
            architecture: arch.to_owned(),
            registers: usage.registers,
            spill_bytes: usage.spill_bytes,
            stack_bytes: usage.stack_bytes,
            local_accesses: code.local_memory(),
            shared_memory_bytes: shared,
            tensor_core: code.tensor_core(),
            faults,
            log: None,
        }
    }
}

/// The most shared memory a block may ask for (CUDA C++ Programming Guide, "Technical
/// Specifications per Compute Capability": the multiprocessor's less 1 KiB that the system keeps).
fn max_shared_memory(architecture: &str) -> Option<u64> {
    let version = architecture.strip_prefix("sm_")?.trim_end_matches(['a', 'f']);
    let kib = match version.parse().ok()? {
        80 | 87 => 163,
        86 | 89 | 120 | 121 => 99,
        90 | 100 | 103 | 110 => 227,
        _ => return None,
    };
    Some(kib * 1024)
}

/// The verdicts in aligned columns.
pub(crate) fn table(verdicts: &[Verdict]) -> String {
    let header =
        ["kernel", "arch", "registers", "spills", "local", "shared", "tensor cores", "verdict"];
    let mut rows = vec![header.map(str::to_owned)];
    for verdict in verdicts {
        let families = verdict.tensor_core.iter().map(|(family, n)| format!("{n} {family}"));
        let families = families.collect::<Vec<_>>().join(", ");
        let numbers = match verdict.log {
            Some(_) => [const { String::new() }; 4],
            None => [
                verdict.registers.to_string(),
                verdict.spill_bytes.to_string(),
                verdict.local_accesses.to_string(),
                verdict.shared_memory_bytes.to_string(),
            ],
        };
        let [registers, spills, local, shared] = numbers;
        rows.push([
            verdict.kernel.clone(),
            verdict.architecture.clone(),
            registers,
            spills,
            local,
            shared,
            if families.is_empty() { "-".to_owned() } else { families },
            match verdict.faults.as_slice() {
                [] => "ok".to_owned(),
                faults => format!("FAIL: {}", faults.join("; ")),
            },
        ]);
    }
    aligned(&rows, &[2, 3, 4, 5])
}

/// `right` names the columns of numbers.
fn aligned<const N: usize>(rows: &[[String; N]], right: &[usize]) -> String {
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            line += &match right.contains(&column) {
                true => format!("{cell:>width$}  "),
                false => format!("{cell:<width$}  "),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel() -> Kernel {
        Kernel {
            name: "matmul".into(),
            file: "matmul.cu".into(),
            entry: String::new(),
            architectures: vec!["sm_89".into()],
            tensor_core: Some("HMMA".into()),
            max_registers: Some(128),
            spill_bytes: 0,
            shared_memory_bytes: 65_536,
        }
    }

    const USAGE: Usage = Usage {
        registers: 96,
        spill_bytes: 0,
        stack_bytes: 0,
        shared_bytes: 1024,
        slowed_down: false,
    };
    const CODE: &str = "/*0010*/ HMMA.16816.F32 R4, R8, R12, R4 ;\n/*0020*/ EXIT ;\n";

    fn faults(kernel: &Kernel, usage: Usage, code: &str) -> Vec<String> {
        Verdict::judge(kernel, "sm_89", usage, &Instructions::parse(code)).faults
    }

    #[test]
    fn a_kernel_that_keeps_its_promises_passes() {
        assert_eq!(faults(&kernel(), USAGE, CODE), Vec::<String>::new());
    }

    #[test]
    fn a_spill_fails() {
        let usage = Usage { spill_bytes: 8, ..USAGE };
        assert_eq!(faults(&kernel(), usage, CODE), ["registers spill"]);
    }

    #[test]
    fn a_spill_that_is_known_passes_and_more_fails() {
        let kernel = Kernel { spill_bytes: 8, ..kernel() };
        let code = format!("{CODE}/*0030*/ STL [R1], R5 ;\n");
        let spilling = |spill_bytes| faults(&kernel, Usage { spill_bytes, ..USAGE }, &code);
        assert_eq!(spilling(8), Vec::<String>::new());
        assert_eq!(spilling(16), ["registers spill"]);
    }

    #[test]
    fn a_call_fails_by_the_name_of_the_function() {
        let code = format!("{CODE}/*0030*/ CALL.REL.NOINC `($k$_Z5twicefi) ;\n");
        assert_eq!(faults(&kernel(), USAGE, &code), ["$k$_Z5twicefi is called"]);
    }

    #[test]
    fn a_warning_of_lost_performance_fails() {
        let usage = Usage { slowed_down: true, ..USAGE };
        assert_eq!(faults(&kernel(), usage, CODE), ["ptxas warns of a loss of performance"]);
    }

    #[test]
    fn local_memory_fails_even_without_a_spill() {
        let code = format!("{CODE}/*0030*/ STL [R1], R5 ;\n");
        assert!(faults(&kernel(), USAGE, &code)[0].starts_with("local memory is used"));
    }

    #[test]
    fn a_missing_tensor_core_instruction_fails() {
        let code = "/*0010*/ FFMA R4, R8, R12, R4 ;\n";
        assert_eq!(faults(&kernel(), USAGE, code), ["no HMMA"]);
    }

    #[test]
    fn too_many_registers_fail() {
        let usage = Usage { registers: 129, ..USAGE };
        assert_eq!(faults(&kernel(), usage, CODE), ["more than 128 registers"]);
    }

    #[test]
    fn more_shared_memory_than_a_block_may_have_fails() {
        let kernel = Kernel { shared_memory_bytes: 101_376, ..kernel() };
        assert_eq!(faults(&kernel, USAGE, CODE), ["more than 101376 bytes of shared memory"]);
    }

    #[test]
    fn an_unreadable_disassembly_fails() {
        let kernel = Kernel { tensor_core: None, ..kernel() };
        assert_eq!(faults(&kernel, USAGE, ""), ["nvdisasm's output is not understood"]);
    }

    #[test]
    fn columns_are_aligned_and_faults_are_spelled_out() {
        let good = Verdict::judge(&kernel(), "sm_89", USAGE, &Instructions::parse(CODE));
        let bad = Verdict::refused(&kernel(), "sm_120a", "NVRTC", "error".into());
        assert_eq!(
            table(&[good, bad]),
            "\
kernel  arch     registers  spills  local  shared  tensor cores  verdict
matmul  sm_89           96       0      0   66560  1 HMMA        ok
matmul  sm_120a                                    -             FAIL: NVRTC refuses it
"
        );
    }
}
