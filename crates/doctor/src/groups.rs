//! Which cases an examination runs: of each operation, by each family that serves it, in each type.
//!
//! Shapes are ragged: no tile, vector or block of k divides them. Where several plans serve a problem, cases go through
//! them; where an epilogue or an option is compiled apart, there is a case of it. What is not told here is drawn, the
//! same each time.

use crate::{
    cases::cases,
    draw::Told,
    ops::{KernelOp, OPS},
};
use blackburn_kernels::Family;
use blackburn_reference::storage::Storage;
use serde::{Deserialize, Serialize};

/// How much is examined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// Every case.
    #[default]
    Full,
    /// A few small cases of each group: whether anything runs at all.
    Quick,
}

/// Cases of an operation by one family in one type.
#[derive(Clone, Debug)]
pub struct Group {
    /// The operation.
    pub op: KernelOp,
    /// The family: [`Family::Portable`] where the operation has no choice.
    pub family: Family,
    /// The type of its tensors.
    pub storage: Storage,
    /// Its cases.
    pub cases: Vec<Told>,
}

impl Group {
    /// What it is called: operation, family and type, as in `matmul/wgmma/bf16`.
    pub fn name(&self) -> String {
        format!("{}/{}/{}", self.op.name, self.family, dtype_name(self.storage))
    }
}

/// What names of groups call a type.
pub fn dtype_name(storage: Storage) -> &'static str {
    match storage {
        Storage::F32 => "f32",
        Storage::F16 => "f16",
        Storage::Bf16 => "bf16",
    }
}

/// All groups, in the order of [`OPS`].
pub fn groups(extent: Extent) -> Vec<Group> {
    let mut all = Vec::new();
    for op in OPS {
        for family in families(op.name) {
            for storage in Storage::ALL {
                let mut cases = cases(op.name, *family, storage, extent);
                if extent == Extent::Quick {
                    cases.truncate(MOST_WHEN_QUICK);
                }
                all.push(Group { op, family: *family, storage, cases });
            }
        }
    }
    all
}

/// The group of that name.
pub fn named(name: &str, extent: Extent) -> Option<Group> {
    groups(extent).into_iter().find(|group| group.name() == name)
}

const MOST_WHEN_QUICK: usize = 2;

fn families(op: &str) -> &'static [Family] {
    match op {
        "matmul" | "attention" => &Family::ALL,
        "conv" => &[Family::Wgmma, Family::Mma, Family::Portable],
        "fp8_matmul" => &[Family::Tcgen05, Family::Wgmma, Family::Mma],
        _ => &[Family::Portable],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_operation_has_a_group_for_each_family_and_type_with_cases_in_it() {
        for extent in [Extent::Quick, Extent::Full] {
            let all = groups(extent);
            let names: BTreeSet<String> = all.iter().map(Group::name).collect();
            assert_eq!(names.len(), all.len());
            for op in OPS {
                let count = all.iter().filter(|group| group.op.name == op.name).count();
                assert_eq!(count, 3 * families(op.name).len(), "{}", op.name);
            }
            assert!(all.iter().all(|group| !group.cases.is_empty()));
            assert!(names.contains("matmul/wgmma/bf16") && names.contains("norm/portable/f16"));
        }
    }

    #[test]
    fn a_group_is_found_by_its_name() {
        let found = named("attention/mma/f16", Extent::Full).unwrap();
        assert_eq!((found.op.name, found.family), ("attention", Family::Mma));
        assert!(named("attention/mma/f64", Extent::Full).is_none());
    }

    #[test]
    fn quick_groups_have_few_cases_and_fewer_than_full_ones() {
        for quick in groups(Extent::Quick) {
            assert!(quick.cases.len() <= MOST_WHEN_QUICK);
            let full = named(&quick.name(), Extent::Full).unwrap();
            assert!(full.cases.len() >= quick.cases.len());
        }
    }
}
