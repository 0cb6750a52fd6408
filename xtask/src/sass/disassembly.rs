//! Instructions in the output of `nvdisasm -c`.

use std::collections::{BTreeMap, BTreeSet};

/// What of the machine code the check looks at.
pub(crate) struct Instructions {
    /// How often each instruction occurs, by its full name (`HMMA.16816.F32.BF16`).
    counts: BTreeMap<String, u32>,
    /// Functions that are called, and addresses in registers.
    calls: BTreeSet<String>,
}

impl Instructions {
    /// Reads lines such as `/*0090*/  @!P0 LDL.64 R4, [R1+0x8] ;`. Every other line is a label, a
    /// directive or a comment.
    pub(crate) fn parse(disassembly: &str) -> Self {
        let (mut counts, mut calls) = (BTreeMap::new(), BTreeSet::new());
        for line in disassembly.lines() {
            // A function of the driver's that stands for an instruction which the GPU does not have.
            if let Some((_, rest)) = line.split_once("__cuda_syscall") {
                let is_in_name = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
                let rest: String = rest.chars().take_while(is_in_name).collect();
                calls.insert(format!("__cuda_syscall{rest}"));
            }
            let Some((address, rest)) =
                line.trim_start().strip_prefix("/*").and_then(|rest| rest.split_once("*/"))
            else {
                continue;
            };
            if address.is_empty() || !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                continue;
            }
            // A guard (`@P0`, `@!UP1`) stands before the name.
            let mut words = rest.split_whitespace().skip_while(|word| word.starts_with('@'));
            let name = words.next().unwrap_or_default().trim_end_matches(';');
            if name.starts_with(|c: char| c.is_ascii_uppercase()) {
                *counts.entry(name.to_owned()).or_default() += 1;
            }
            if name == "CALL" || name.starts_with("CALL.") {
                let target: String = words.collect();
                calls.extend(called(&target).map(str::to_owned));
            }
        }
        Self { counts, calls }
    }

    /// Functions that are called and not part of the kernel, by name or by the register with their address.
    pub(crate) fn calls(&self) -> impl Iterator<Item = &str> {
        self.calls.iter().map(String::as_str)
    }

    /// Occurrences of `name` with any suffix: `HMMA` counts `HMMA.16816.F32`, not `HMMAX`.
    pub(crate) fn count(&self, name: &str) -> u32 {
        let named = |full: &str| {
            full.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.counts.iter().filter(|(full, _)| named(full)).map(|(_, count)| count).sum()
    }

    /// Loads and stores of local memory: spilled registers, and arrays that could not be kept in
    /// registers because their index is not known at compile time.
    pub(crate) fn local_memory(&self) -> u32 {
        self.count("LDL") + self.count("STL")
    }

    /// Tensor-core instructions by family. All end in MMA: HMMA, IMMA, QMMA (mma.sync), HGMMA,
    /// QGMMA (wgmma), UTCHMMA, UTCQMMA (tcgen05).
    pub(crate) fn tensor_core(&self) -> BTreeMap<String, u32> {
        let mut families = BTreeMap::new();
        for (full, count) in &self.counts {
            let family = full.split('.').next().unwrap_or_default();
            if family.ends_with("MMA") {
                *families.entry(family.to_owned()).or_default() += count;
            }
        }
        families
    }

    /// No instruction at all: the format is not the one understood here.
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

/// The function that an instruction calls. ptxas also writes calls within a kernel: to a label of its code, to
/// the rare cases of a division or root, and to traps of what it checks of tensor memory, which it appends to the
/// kernel.
fn called(target: &str) -> Option<&str> {
    let name = target.trim_matches(['`', '(', ')', ';']);
    let is_within = name.starts_with(".L_")
        || name.starts_with("$__internal_")
            && name.contains("$__cuda_sm")
            && (name.ends_with("_slowpath") || name.contains("_tcgen05_guardrail_trap_"));
    (!is_within).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = r#"
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM80"
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0030*/              @!P0 LDL.64 R4, [R1+0x8] ;
        /*0040*/               @P1 STL [R1], R5 ;
        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0060*/                   LDL.LU R3, [R1] ;
        /*0070*/                   EXIT ;
.L_x_0:
        /*0080*/                   BRA `(.L_x_0);
        /*0000*/ 	.byte	0x04, 0x2f
"#;

    #[test]
    fn instructions_are_counted_with_and_without_a_guard() {
        let found = Instructions::parse(SAMPLE);
        assert_eq!(found.local_memory(), 3);
        assert_eq!((found.count("EXIT"), found.count("BRA")), (1, 1));
    }

    #[test]
    fn a_family_does_not_count_another_that_begins_alike() {
        let found = Instructions::parse(SAMPLE);
        assert_eq!((found.count("HMMA"), found.count("HGMMA"), found.count("HM")), (2, 1, 0));
        assert_eq!(found.count("HGMMA.64x256x16"), 1);
        assert_eq!(found.count("HGMMA.64x128x16"), 0);
    }

    #[test]
    fn tensor_core_instructions_are_grouped_by_family() {
        let families = Instructions::parse(SAMPLE).tensor_core();
        assert_eq!(families, BTreeMap::from([("HGMMA".to_owned(), 1), ("HMMA".to_owned(), 2)]));
    }

    fn calls(code: &str) -> Vec<String> {
        Instructions::parse(code).calls().map(str::to_owned).collect()
    }

    #[test]
    fn calls_of_functions_are_found() {
        let function = "/*00a0*/ @P0 CALL.REL.NOINC `($noinline$_Z5twicefi) ;";
        assert_eq!(calls(function), ["$noinline$_Z5twicefi"]);
        let multicast = "/*0150*/ CALL.ABS.NOINC R2 ;\n\
                         .type __cuda_syscall_cp_async_bulk_tensor_2d_tile_multicast,@function";
        assert_eq!(
            calls(multicast),
            ["R2", "__cuda_syscall_cp_async_bulk_tensor_2d_tile_multicast"]
        );
    }

    #[test]
    fn what_ptxas_calls_within_a_kernel_is_no_call() {
        let within = "/*1e30*/ @P0 CALL.REL.NOINC `(.L_x_3) ;\n\
                      /*0480*/ CALL.REL.NOINC `($__internal_1_$__cuda_sm10x_tcgen05_guardrail_trap_phase_invalid_during_alloc) ;\n\
                      /*0110*/ CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;";
        assert_eq!(calls(within), Vec::<String>::new());
    }

    #[test]
    fn data_sections_hold_no_instructions() {
        assert!(Instructions::parse("        /*0000*/ \t.byte\t0x04, 0x2f\n").is_empty());
    }
}
