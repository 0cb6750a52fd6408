//! A problem whose tensors were checked, and what all families' launches do with it.

use super::{
    ConvPass, ConvProblem,
    parts::{Gathered, Part},
    problem::unsupported,
};
use crate::{
    KernelError,
    buffer::{Buffer, F32},
    matmul::{Epilogue, EpilogueBlueprint, MatmulOutput, sum_splits},
};
use cubecl::client::Client;

/// A problem whose tensors were checked.
pub(super) struct Call<'a> {
    pub(super) client: &'a Client,
    pub(super) problem: &'a ConvProblem,
    pub(super) operands: [&'a Buffer; 2],
    pub(super) bias: Option<&'a Buffer>,
}

impl Call<'_> {
    /// The result, which `compute` writes, or of which it writes as many sums as there are splits.
    pub(super) fn summed(
        &self,
        splits: usize,
        compute: impl FnOnce(&Buffer) -> Result<(), KernelError>,
    ) -> Result<Buffer, KernelError> {
        let elements = self.problem.out_elements();
        self.summed_elements(splits, elements, compute)
    }

    /// As [`summed`](Self::summed), of a result of that many elements.
    pub(super) fn summed_elements(
        &self,
        splits: usize,
        elements: usize,
        compute: impl FnOnce(&Buffer) -> Result<(), KernelError>,
    ) -> Result<Buffer, KernelError> {
        let out = Buffer::empty(self.client, elements, self.problem.out);
        if splits == 1 {
            compute(&out)?;
            return Ok(out);
        }
        if u32::try_from(splits * elements).is_err() {
            return unsupported(format!("{} partial sums", splits * elements));
        }
        let partial = Buffer::empty(self.client, splits * elements, F32);
        compute(&partial)?;
        let output = MatmulOutput { out, preactivation: None };
        sum_splits(self.client, &partial, splits, elements, &Epilogue::default(), &output);
        Ok(output.out)
    }

    /// The gathered tensor as it lies.
    pub(super) fn gathered(&self) -> Gathered {
        let channels = self.gathered_channels();
        Gathered { strides: self.problem.first, channels, padded_channels: channels }
    }

    /// Channels of a group that a tap gathers.
    pub(super) fn gathered_channels(&self) -> usize {
        let [in_channels, out_channels] = self.problem.group_channels();
        if self.problem.pass == ConvPass::Dgrad { out_channels } else { in_channels }
    }

    pub(super) fn epilogue(&self) -> EpilogueBlueprint {
        EpilogueBlueprint { bias: self.bias.is_some(), ..EpilogueBlueprint::default() }
    }

    /// Rows, columns and terms of a group's product.
    pub(super) fn sizes(&self, part: &Part, channels: usize) -> [usize; 3] {
        let [in_channels, out_channels] = self.problem.group_channels();
        let (pixels, taps) = (part.pixels(self.problem), part.tap_count() * channels);
        match self.problem.pass {
            ConvPass::Fprop => [pixels, out_channels, taps],
            ConvPass::Dgrad => [pixels, in_channels, taps],
            ConvPass::Wgrad => [out_channels, taps, pixels],
        }
    }
}
