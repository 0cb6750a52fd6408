//! Instructions in the output of `nvdisasm -c`.

use std::collections::BTreeMap;

/// How often each instruction occurs, by its full name (`HMMA.16816.F32.BF16`).
pub(crate) struct Instructions(BTreeMap<String, u32>);

impl Instructions {
    /// Reads lines such as `/*0090*/  @!P0 LDL.64 R4, [R1+0x8] ;`. Every other line is a label, a
    /// directive or a comment.
    pub(crate) fn parse(disassembly: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in disassembly.lines() {
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
        }
        Self(counts)
    }

    /// Occurrences of `name` with any suffix: `HMMA` counts `HMMA.16816.F32`, not `HMMAX`.
    pub(crate) fn count(&self, name: &str) -> u32 {
        let named = |full: &str| {
            full.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.0.iter().filter(|(full, _)| named(full)).map(|(_, count)| count).sum()
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
        for (full, count) in &self.0 {
            let family = full.split('.').next().unwrap_or_default();
            if family.ends_with("MMA") {
                *families.entry(family.to_owned()).or_default() += count;
            }
        }
        families
    }

    /// No instruction at all: the format is not the one understood here.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
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

    #[test]
    fn data_sections_hold_no_instructions() {
        assert!(Instructions::parse("        /*0000*/ \t.byte\t0x04, 0x2f\n").is_empty());
    }
}
