//! Families of instructions, and which of them a device is offered.
//!
//! Compiling proves little. So a GPU is offered a family on tensor cores where that family has run and been found
//! right: on the architectures of [`PROVEN`] by the project's own tests, elsewhere by an examination of the user's
//! own machine, whose outcome a program hands in by [`offer`]. Until then plans are those of [`Family::Portable`].
//! What examines kernels calls [`offer_unproven`] first.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

/// Which instructions multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Products of Blackwell's data-center GPUs, whose sums lie in tensor memory.
    Tcgen05,
    /// Hopper's asynchronous warpgroup products.
    Wgmma,
    /// Warp products of Ampere and later.
    Mma,
    /// Ordinary arithmetic.
    Portable,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Tcgen05, Self::Wgmma, Self::Mma, Self::Portable];
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcgen05 => "tcgen05",
            Self::Wgmma => "wgmma",
            Self::Mma => "mma",
            Self::Portable => "portable",
        })
    }
}

/// An operation that several families serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FamilyOp {
    /// Matrix products of operands of 16 and 32 bits.
    Matmul,
    /// Matrix products of operands of 8 bits.
    Fp8Matmul,
    /// Attention.
    Attention,
    /// Convolutions that are no plain products.
    Conv,
}

impl FamilyOp {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Matmul, Self::Fp8Matmul, Self::Attention, Self::Conv];
}

impl fmt::Display for FamilyOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Matmul => "matmul",
            Self::Fp8Matmul => "fp8_matmul",
            Self::Attention => "attention",
            Self::Conv => "conv",
        })
    }
}

/// The families on tensor cores that a device is offered, for each operation. [`Family::Portable`] always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Families(u16);

impl Families {
    /// None: ordinary arithmetic is left.
    pub const PORTABLE: Self = Self(0);
    /// All that the device has instructions for.
    pub const ALL: Self = Self(u16::MAX);

    /// These, and a family for an operation.
    #[must_use]
    pub fn with(self, op: FamilyOp, family: Family) -> Self {
        Self(self.0 | Self::bit(op, family))
    }

    /// Whether a family is offered for an operation.
    pub fn has(self, op: FamilyOp, family: Family) -> bool {
        let bit = Self::bit(op, family);
        self.0 & bit == bit
    }

    /// None for ordinary arithmetic.
    fn bit(op: FamilyOp, family: Family) -> u16 {
        match family {
            Family::Wgmma => 1 << (3 * op as u16),
            Family::Mma => 2 << (3 * op as u16),
            Family::Tcgen05 => 4 << (3 * op as u16),
            Family::Portable => 0,
        }
    }
}

/// Compute capabilities, times ten, of the GPUs on which the project's own tests have run on every family.
pub const PROVEN: [u32; 1] = [90];

static OFFERED: RwLock<BTreeMap<u32, Families>> = RwLock::new(BTreeMap::new());
static UNPROVEN: AtomicBool = AtomicBool::new(false);

/// Whether GPUs of a compute capability (times ten) are offered all families without an examination.
pub fn is_proven(capability: u32) -> bool {
    PROVEN.contains(&capability)
}

/// Offers GPUs of a compute capability (times ten) those families from now on. A capability of [`PROVEN`] keeps
/// all of them.
pub fn offer(capability: u32, families: Families) {
    let mut offered = OFFERED.write().unwrap_or_else(PoisonError::into_inner);
    offered.insert(capability, families);
}

/// Offers every GPU in this process all families, proven there or not: for what examines and measures kernels,
/// and for who asks for it.
pub fn offer_unproven() {
    UNPROVEN.store(true, Ordering::Relaxed);
}

/// What GPUs of a compute capability (times ten) are offered.
pub fn offered(capability: u32) -> Families {
    if is_proven(capability) || UNPROVEN.load(Ordering::Relaxed) {
        return Families::ALL;
    }
    let offered = OFFERED.read().unwrap_or_else(PoisonError::into_inner);
    offered.get(&capability).copied().unwrap_or(Families::PORTABLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_told_apart_by_operation() {
        let some = Families::PORTABLE
            .with(FamilyOp::Conv, Family::Mma)
            .with(FamilyOp::Attention, Family::Wgmma);
        for op in FamilyOp::ALL {
            for family in Family::ALL {
                let expected = matches!(
                    (op, family),
                    (_, Family::Portable)
                        | (FamilyOp::Conv, Family::Mma)
                        | (FamilyOp::Attention, Family::Wgmma)
                );
                assert_eq!(some.has(op, family), expected, "{op} by {family}");
                assert!(Families::ALL.has(op, family));
            }
        }
    }

    /// Of capabilities that no device has: the offers are the process's.
    #[test]
    fn a_gpu_that_was_never_examined_is_offered_ordinary_arithmetic() {
        let some = Families::PORTABLE.with(FamilyOp::Matmul, Family::Mma);
        assert_eq!(offered(90), Families::ALL);
        // Another test may have lifted the gate for the process.
        if !UNPROVEN.load(Ordering::Relaxed) {
            assert_eq!(offered(771), Families::PORTABLE);
            offer(772, some);
            assert_eq!((offered(771), offered(772)), (Families::PORTABLE, some));
        }
        offer(90, Families::PORTABLE);
        assert_eq!(offered(90), Families::ALL);
    }
}
