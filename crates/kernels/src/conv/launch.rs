use super::{
    ConvBlueprint, ConvPass, ConvProblem, ImplicitBlueprint,
    call::Call,
    depthwise,
    direct::{conv_direct_kernel, conv_direct_weights_kernel},
    grouped,
    parts::{Weights, image_strides, parts},
    portable::{ExtentLaunch, PortableBlueprint, conv_portable_kernel},
    problem::{OP, invalid, unsupported},
    product::product,
};
use crate::{
    Family, KernelError, ahead,
    buffer::Buffer,
    device::grid,
    divisor::{DIVIDEND_LIMIT, divisor},
    matmul::{Epilogue, PORTABLE_UNITS as UNITS, matmul_with},
};
use cubecl::{calculate_cube_count_elemwise, client::Client, prelude::*};

/// A pass of a convolution, on the kernels that are expected to be fastest. The operands are the problem's two,
/// in the order of [`ConvProblem::fprop`], [`ConvProblem::dgrad`] or [`ConvProblem::wgrad`]; the result is
/// contiguous by [`ConvProblem::out_strides`]. A bias is added to each channel of the result, which is what a
/// transposed convolution has in [`ConvPass::Dgrad`]; in [`ConvPass::Wgrad`] it is refused.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when a tensor is smaller than the problem says or of another dtype;
/// [`KernelError::Unsupported`] where this device has no kernel for it.
pub fn conv(
    client: &Client,
    problem: &ConvProblem,
    first: &Buffer,
    second: &Buffer,
    bias: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    let blueprint = ConvBlueprint::plan(problem, client)?;
    conv_with(client, problem, &blueprint, first, second, bias)
}

/// As [`conv`], by a plan of the caller's.
///
/// # Errors
///
/// As [`conv`], and [`KernelError::InvalidProblem`] for a plan that is not one for the problem.
pub fn conv_with(
    client: &Client,
    problem: &ConvProblem,
    blueprint: &ConvBlueprint,
    first: &Buffer,
    second: &Buffer,
    bias: Option<&Buffer>,
) -> Result<Buffer, KernelError> {
    check(problem, [first, second], bias)?;
    let call = Call { client, problem, operands: [first, second], bias };
    let unfit = || invalid("blueprint", "a plan for the problem".into(), blueprint);
    match blueprint {
        ConvBlueprint::Product(plan) => {
            let product = product(problem).ok_or_else(unfit)?;
            let [lhs, rhs] = match problem.pass {
                ConvPass::Wgrad => [second, first],
                ConvPass::Fprop | ConvPass::Dgrad => [first, second],
            };
            let epilogue = Epilogue { bias: bias.cloned(), ..Epilogue::default() };
            Ok(matmul_with(client, &product, plan, lhs, rhs, &epilogue)?.out)
        }
        ConvBlueprint::Implicit(plan) => {
            if plan.splits == 0 || problem.pass != ConvPass::Wgrad && plan.splits != 1 {
                return Err(unfit());
            }
            match plan.family {
                Family::Portable => call.summed(plan.splits, |out| call.portable(plan, out)),
                #[cfg(feature = "cuda")]
                Family::Mma => super::tensor_core::launch(&call, plan),
                #[cfg(feature = "cuda")]
                Family::Wgmma => super::bulk::launch(&call, plan),
                other => unsupported(format!("an implicit product by {other:?}")),
            }
        }
        ConvBlueprint::Depthwise(plan) => {
            if !plan.fits(problem) {
                return Err(unfit());
            }
            depthwise::launch(&call, plan)
        }
        ConvBlueprint::Grouped { splits } => {
            let is_split = problem.pass == ConvPass::Wgrad;
            if *splits == 0 || !is_split && *splits != 1 || !grouped::serves(problem) {
                return Err(unfit());
            }
            call.summed(*splits, |out| call.grouped(*splits, out))
        }
        ConvBlueprint::Direct { splits } => {
            if *splits == 0 || problem.pass != ConvPass::Wgrad && *splits != 1 {
                return Err(unfit());
            }
            call.summed(*splits, |out| call.direct(*splits, out))
        }
    }
}

/// Checks every tensor against the problem.
fn check(
    problem: &ConvProblem,
    operands: [&Buffer; 2],
    bias: Option<&Buffer>,
) -> Result<(), KernelError> {
    let spans = problem.spans();
    for (dim, name) in problem.operand_names().into_iter().enumerate() {
        operands[dim].check_span(OP, name, spans[dim], problem.dtype)?;
    }
    match bias {
        None => Ok(()),
        Some(_) if problem.pass == ConvPass::Wgrad => {
            Err(invalid("bias", "none for the gradient of the weights".into(), "one"))
        }
        Some(bias) => bias.check_span(OP, "bias", problem.shapes()[2][1], problem.out),
    }
}

impl Call<'_> {
    fn portable(&self, plan: &ImplicitBlueprint, out: &Buffer) -> Result<(), KernelError> {
        let problem = self.problem;
        let tile = plan.tile_m;
        let gathered = self.gathered();
        let sums_pixels = problem.pass == ConvPass::Wgrad;
        let weights = Weights::of(problem);
        let channels_last = problem.first[1] == 1;
        let kernel = PortableBlueprint {
            unit_tile: tile as u32 / UNITS,
            sums_pixels,
            lhs_k_major: if sums_pixels { problem.second[1] != 1 } else { channels_last },
            rhs_k_major: if sums_pixels { !channels_last } else { weights.channel == 1 },
        };
        let groups = problem.options.groups;
        for part in parts(problem) {
            let [m, n, k] = self.sizes(&part, gathered.channels);
            let cubes = [m.div_ceil(tile), n.div_ceil(tile), groups * plan.splits];
            let split_k = if sums_pixels { plan.split_terms(problem) } else { k };
            let images = || match problem.pass {
                ConvPass::Wgrad => image_strides(problem.second),
                ConvPass::Fprop | ConvPass::Dgrad => part.out(problem),
            };
            // SAFETY: the operands hold the spans of the problem, the bias the output's channels, and `out` was
            // allocated for the problem and its splits; the kernel stops rows, columns and terms at their ends.
            ahead::launch(self.client, |client| unsafe {
                conv_portable_kernel::launch_unchecked(
                    client,
                    grid(OP, self.client, cubes)?,
                    CubeDim::new_2d(UNITS, UNITS),
                    self.operands[0].arg(1),
                    self.operands[1].arg(1),
                    self.bias.unwrap_or(self.operands[0]).arg(1),
                    out.arg(1),
                    ExtentLaunch {
                        m: m as u32,
                        n: n as u32,
                        k: k as u32,
                        split_k: split_k as u32,
                        groups: groups as u32,
                    },
                    part.gather(problem, &gathered),
                    part.weights(&weights),
                    images(),
                    kernel,
                    self.epilogue(),
                    problem.dtype,
                    out.dtype,
                );
                Ok(())
            })?;
        }
        Ok(())
    }

    pub(super) fn direct(&self, splits: usize, out: &Buffer) -> Result<(), KernelError> {
        match self.problem.pass {
            ConvPass::Wgrad => self.direct_weights(splits, out),
            ConvPass::Fprop | ConvPass::Dgrad => self.direct_pixels(out),
        }
    }

    /// Elements of neighboring channels that a unit computes: more than one only if each is a group.
    fn direct_width(&self) -> usize {
        const WIDEST: usize = 4;
        let [image, channel, row, column] = self.problem.first;
        let offset = self.operands[0].offset_bytes();
        let is_whole = |elements: usize| elements.is_multiple_of(WIDEST);
        let is_depthwise = self.problem.group_channels() == [1, 1];
        let is_aligned = channel == 1
            && [image, row, column, self.problem.in_channels].into_iter().all(is_whole)
            && is_whole(self.operands[0].elements)
            && offset.is_multiple_of((WIDEST * self.problem.dtype.size()) as u64);
        if is_depthwise && is_aligned { WIDEST } else { 1 }
    }

    fn direct_pixels(&self, out: &Buffer) -> Result<(), KernelError> {
        let problem = self.problem;
        let gathered = self.gathered();
        let width = self.direct_width();
        let groups = problem.options.groups;
        let dim = CubeDim::new_1d(256);
        for part in parts(problem) {
            let [m, n, _] = self.sizes(&part, gathered.channels);
            let columns = groups * n / width;
            let units = m * columns;
            if units >= DIVIDEND_LIMIT {
                return unsupported(format!("{units} units"));
            }
            // SAFETY: as in `portable`; `width` divides the channels and every distance.
            ahead::launch(self.client, |client| unsafe {
                conv_direct_kernel::launch_unchecked(
                    client,
                    calculate_cube_count_elemwise(self.client, units, dim),
                    dim,
                    width,
                    self.operands[0].arg(width),
                    self.operands[1].arg(1),
                    self.bias.unwrap_or(self.operands[0]).arg(1),
                    out.arg(width),
                    units as u32,
                    divisor(columns),
                    divisor(n),
                    part.gather(problem, &gathered),
                    part.weights(&Weights::of(problem)),
                    part.out(problem),
                    self.epilogue(),
                    problem.dtype,
                    out.dtype,
                )
            });
        }
        Ok(())
    }

    fn direct_weights(&self, splits: usize, out: &Buffer) -> Result<(), KernelError> {
        const UNITS_PER_CUBE: u32 = 256;
        let problem = self.problem;
        let elements = problem.out_elements();
        if elements >= DIVIDEND_LIMIT {
            return unsupported(format!("{elements} units"));
        }
        let cubes = [elements.div_ceil(UNITS_PER_CUBE as usize), splits, 1];
        for part in parts(problem) {
            // SAFETY: as in `portable`.
            ahead::launch(self.client, |client| unsafe {
                conv_direct_weights_kernel::launch_unchecked(
                    client,
                    grid(OP, self.client, cubes)?,
                    CubeDim::new_1d(UNITS_PER_CUBE),
                    self.operands[0].arg(1),
                    self.operands[1].arg(1),
                    out.arg(1),
                    elements as u32,
                    divisor(problem.out_channels),
                    divisor(problem.group_channels()[1]),
                    problem.out_pixels().div_ceil(splits) as u32,
                    part.gather(problem, &self.gathered()),
                    image_strides(problem.second),
                    problem.dtype,
                    out.dtype,
                );
                Ok(())
            })?;
        }
        Ok(())
    }
}
