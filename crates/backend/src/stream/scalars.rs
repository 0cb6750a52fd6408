//! Numbers of operations, which Burn's plans leave open.

use crate::{declined::unsupported, tensors::Tensors};
use blackburn_kernels::KernelError;
use burn::tensor::Slice;
use burn_fusion::stream::ScalarId;
use burn_ir::{CustomOpIr, ScalarIr};

/// An operation's scalars, as they are this time.
pub(crate) struct Scalars<'a> {
    of: &'a [ScalarIr],
    context: &'a Tensors,
}

impl<'a> Scalars<'a> {
    pub(crate) fn of(operation: &'a CustomOpIr, context: &'a Tensors) -> Self {
        Self { of: &operation.scalars, context }
    }

    fn at(&self, place: usize) -> Option<ScalarIr> {
        let ScalarIr::UInt(value) = *self.of.get(place)? else { return None };
        self.context.scalars.get(&ScalarId { value }).copied()
    }

    pub(crate) fn real(&self, place: usize) -> Option<f64> {
        match self.at(place)? {
            ScalarIr::Float(number) => Some(number),
            _ => None,
        }
    }

    pub(crate) fn whole(&self, place: usize) -> Option<usize> {
        match self.at(place)? {
            ScalarIr::UInt(number) => usize::try_from(number).ok(),
            _ => None,
        }
    }

    pub(crate) fn flag(&self, place: usize) -> Option<bool> {
        match self.at(place)? {
            ScalarIr::Bool(flag) => Some(flag),
            _ => None,
        }
    }
}

/// The range that `placeholder` stands for in an operation: Burn keeps ranges beside a stream's operations, which say
/// where.
///
/// # Errors
///
/// [`KernelError::Unsupported`] in the name of `op` where the stream does not know it.
pub(crate) fn range(
    context: &Tensors,
    placeholder: &Slice,
    op: &'static str,
) -> Result<Slice, KernelError> {
    let place = usize::try_from(placeholder.start).ok();
    let known = place.and_then(|place| context.ranges.get(place)).copied();
    known.ok_or_else(|| unsupported(op, "a range that the stream does not know"))
}

/// As [`range`], of some.
///
/// # Errors
///
/// As there.
pub(crate) fn ranges(
    context: &Tensors,
    placeholders: &[Slice],
    op: &'static str,
) -> Result<Vec<Slice>, KernelError> {
    placeholders.iter().map(|placeholder| range(context, placeholder, op)).collect()
}
