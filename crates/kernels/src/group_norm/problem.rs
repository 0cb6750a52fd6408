use crate::{
    KernelError,
    buffer::{Buffer, F32, check_float},
};
use cubecl::ir::ElemType;

pub(super) const FORWARD: &str = "group_norm_forward";
pub(super) const BACKWARD: &str = "group_norm_backward";

/// Which dimension of a sample lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Channels, pixel by pixel: NHWC.
    ChannelsLast,
    /// Pixels, channel by channel: NCHW.
    PixelsLast,
}

/// What backward has in the place of x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// x itself.
    Input,
    /// `x - mean`.
    Centered,
    /// h.
    Normalized,
}

/// What group normalization asks. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupNormProblem {
    /// Samples, each of which is normalized by itself.
    pub samples: usize,
    /// Channels of a sample.
    pub channels: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Pixels of a sample.
    pub pixels: usize,
    /// How x lies, and dy does.
    pub order: Order,
    /// With channels last the distance between pixels of x, at least `channels`. Else `channels`.
    pub x_stride: usize,
    /// The same of dy. Only backward reads it.
    pub dy_stride: usize,
    /// Type of x, y and their gradients.
    pub dtype: ElemType,
    /// Type of gamma, beta and their gradients: f32 or `dtype`.
    pub parameter: ElemType,
    /// Is added to the variance. Only forward reads it.
    pub epsilon: f64,
}

impl GroupNormProblem {
    /// The problem of contiguous f32 tensors, with an epsilon of 1e-5.
    pub fn contiguous(
        [samples, channels, pixels]: [usize; 3],
        groups: usize,
        order: Order,
        dtype: ElemType,
    ) -> Self {
        Self {
            samples,
            channels,
            groups,
            pixels,
            order,
            x_stride: channels,
            dy_stride: channels,
            dtype,
            parameter: dtype,
            epsilon: 1e-5,
        }
    }

    /// Checks what the numbers have to be, in the name of `op`.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for groups that do not divide the channels, a stride below `channels`, and
    /// an epsilon that is negative or no number; [`KernelError::Unsupported`] for dtypes other than f32, f16 and
    /// bf16, parameters that are neither f32 nor of that type, empty tensors, tensors beyond 32-bit indices, and
    /// pixels last with gaps between samples.
    pub fn validate(&self, op: &'static str) -> Result<(), KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        let Self { samples, channels, groups, pixels, dtype, parameter, epsilon, .. } = *self;
        let unsupported = |reason: String| Err(KernelError::Unsupported { op, reason });
        let invalid = |argument, expected: String, actual: usize| {
            Err(KernelError::invalid(op, argument, expected, actual))
        };
        check_float(op, "images", dtype)?;
        if parameter != F32 && parameter != dtype {
            return unsupported(format!("images of {dtype:?} with parameters of {parameter:?}"));
        }
        if groups == 0 || !channels.is_multiple_of(groups) {
            return invalid("groups", format!("a number that divides {channels} channels"), groups);
        }
        if samples == 0 || channels == 0 || pixels == 0 {
            let shape = [samples, channels, pixels];
            return unsupported(format!("an empty tensor of {shape:?}"));
        }
        for (argument, stride) in [("x_stride", self.x_stride), ("dy_stride", self.dy_stride)] {
            if stride < channels {
                return invalid(argument, format!("at least {channels}, the channels"), stride);
            }
            if self.order == Order::PixelsLast && stride != channels {
                return unsupported(format!("pixels last, with {argument} of {stride}"));
            }
            let fits = |end: usize| u32::try_from(end).is_ok();
            if !(samples.checked_mul(pixels))
                .and_then(|rows| rows.checked_mul(stride))
                .and_then(|end| end.checked_add(STEP))
                .is_some_and(fits)
            {
                return unsupported(format!("{samples} x {pixels} pixels of {stride} elements"));
            }
        }
        if !(epsilon >= 0.0 && epsilon.is_finite()) {
            return Err(KernelError::invalid(op, "epsilon", "a number from 0", epsilon));
        }
        Ok(())
    }

    /// Elements of x, without what lies between them.
    pub fn elements(&self) -> usize {
        self.samples * self.channels * self.pixels
    }

    /// Channels of a group.
    pub fn group_channels(&self) -> usize {
        self.channels / self.groups
    }

    /// Bytes that the forward pass has to move if the statistics have to be there before y: x twice, y once, with
    /// `parts` two tensors more, and the parameters.
    pub fn forward_bytes(&self, parts: bool) -> usize {
        let tensors = 3 + 2 * usize::from(parts);
        tensors * self.tensor_bytes() + self.statistics_bytes() + 2 * self.parameter_bytes()
    }

    /// Bytes that the backward pass has to move: x and dy twice, since the sums have to be there before dx, dx once,
    /// gamma in, its gradient and that of beta out.
    pub fn backward_bytes(&self) -> usize {
        5 * self.tensor_bytes() + self.statistics_bytes() + 3 * self.parameter_bytes()
    }

    fn tensor_bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    fn statistics_bytes(&self) -> usize {
        2 * self.samples * self.groups * F32.size()
    }

    fn parameter_bytes(&self) -> usize {
        self.channels * self.parameter.size()
    }

    /// Whether `buffer` holds pixels that are `stride` apart.
    pub(super) fn check_strided(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
        stride: usize,
    ) -> Result<(), KernelError> {
        let span = match self.order {
            Order::ChannelsLast => (self.samples * self.pixels - 1) * stride + self.channels,
            Order::PixelsLast => self.elements(),
        };
        buffer.check_span(op, argument, span, self.dtype)?;
        buffer.check_start(op, argument)
    }

    /// Whether `buffer` is a parameter.
    pub(super) fn check_parameter(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.channels, self.parameter)
    }

    /// Whether `buffer` is an f32 for each group of each sample.
    pub(super) fn check_statistic(
        &self,
        op: &'static str,
        argument: &'static str,
        buffer: &Buffer,
    ) -> Result<(), KernelError> {
        buffer.check(op, argument, self.samples * self.groups, F32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::FloatKind;

    const BF16: ElemType = ElemType::Float(FloatKind::BF16);

    fn plain() -> GroupNormProblem {
        GroupNormProblem::contiguous([2, 12, 5], 3, Order::ChannelsLast, BF16)
    }

    #[test]
    fn bytes_are_those_of_each_pass() {
        let of_tensor = 2 * 12 * 5 * 2;
        let of_statistics = 2 * 2 * 3 * 4;
        assert_eq!(plain().forward_bytes(false), 3 * of_tensor + of_statistics + 2 * 24);
        assert_eq!(plain().forward_bytes(true) - plain().forward_bytes(false), 2 * of_tensor);
        assert_eq!(plain().backward_bytes(), 5 * of_tensor + of_statistics + 3 * 24);
    }

    #[test]
    fn numbers_that_contradict_each_other_are_named() {
        let named = |problem: GroupNormProblem| match problem.validate(FORWARD) {
            Err(KernelError::InvalidProblem { op: FORWARD, argument, .. }) => argument,
            other => panic!("{problem:?} gave {other:?}"),
        };
        assert!(plain().validate(FORWARD).is_ok());
        for groups in [0, 5, 24] {
            assert_eq!(named(GroupNormProblem { groups, ..plain() }), "groups");
        }
        assert_eq!(named(GroupNormProblem { x_stride: 11, ..plain() }), "x_stride");
        assert_eq!(named(GroupNormProblem { dy_stride: 11, ..plain() }), "dy_stride");
        for epsilon in [-1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(named(GroupNormProblem { epsilon, ..plain() }), "epsilon");
        }
    }

    #[test]
    fn what_no_kernel_serves_is_declined() {
        let integers = ElemType::Int(cubecl::ir::IntKind::I32);
        let f16 = ElemType::Float(FloatKind::F16);
        for problem in [
            GroupNormProblem { samples: 0, ..plain() },
            GroupNormProblem { pixels: 0, ..plain() },
            GroupNormProblem { dtype: integers, ..plain() },
            GroupNormProblem { parameter: f16, ..plain() },
            GroupNormProblem { pixels: 1 << 29, ..plain() },
            GroupNormProblem { dy_stride: 1 << 30, ..plain() },
            GroupNormProblem { order: Order::PixelsLast, x_stride: 16, ..plain() },
        ] {
            let result = problem.validate(BACKWARD);
            assert!(matches!(result, Err(KernelError::Unsupported { .. })), "{problem:?}");
        }
    }
}
