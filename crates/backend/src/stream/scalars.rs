//! Numbers of operations, which Burn's plans leave open.

use crate::tensors::Tensors;
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

/// The range that `placeholder` stands for in an operation: Burn keeps ranges beside a stream's operations, which say where.
pub(crate) fn range(context: &Tensors, placeholder: &Slice) -> Option<Slice> {
    context.ranges.get(usize::try_from(placeholder.start).ok()?).copied()
}
