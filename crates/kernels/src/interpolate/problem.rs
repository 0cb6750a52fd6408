use super::position::Positions;
use crate::{
    KernelError,
    buffer::{Buffer, check_float},
    divisor::DIVIDEND_LIMIT,
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "interpolate";

/// How numbers between pixels are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// That of the pixel in which the beginning of an output lies.
    Nearest,
    /// That of the pixel in which the center of an output lies.
    NearestExact,
    /// A line between two pixels, in each dimension.
    Linear,
    /// A cubic through four pixels, in each dimension.
    Cubic,
}

/// What the gradient of resized images asks. Of each pair, the first is for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InterpolateProblem {
    /// Images.
    pub images: usize,
    /// Channels, contiguous in memory.
    pub channels: usize,
    /// Rows and columns of x.
    pub input: [usize; 2],
    /// Rows and columns of y.
    pub output: [usize; 2],
    /// How y was made.
    pub mode: Mode,
    /// Whether the first and the last pixel of y lie on those of x. Counts in [`Mode::Linear`] and [`Mode::Cubic`].
    pub align_corners: bool,
    /// Elements from a pixel of dy to the next, at least `channels`.
    pub dy_stride: usize,
    /// Type of dy and dx.
    pub dtype: ElemType,
}

impl InterpolateProblem {
    /// Checks what the numbers have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for pixels that lie on each other; [`KernelError::Unsupported`] for other dtypes
    /// than f32, f16 and bf16, empty tensors, tensors of 2^31 elements and more, and sizes whose
    /// positions take more than 31 bits.
    pub fn validate(&self) -> Result<(), KernelError> {
        let Self { images, channels, input, output, dy_stride, dtype, .. } = *self;
        check_float(OP, "images", dtype)?;
        let sizes = [images, channels, input[0], input[1], output[0], output[1]];
        if sizes.contains(&0) {
            let reason = format!("{images} images of {channels} channels, {input:?} to {output:?}");
            return Err(KernelError::unsupported(OP, reason));
        }
        if dy_stride < channels {
            let expected = format!("at least {channels}, the channels of a pixel");
            return Err(KernelError::invalid(OP, "dy_stride", expected, dy_stride));
        }
        for (pixels, stride) in [(input, channels), (output, dy_stride)] {
            let elements = [images, pixels[0], pixels[1], stride]
                .into_iter()
                .try_fold(1usize, usize::checked_mul)
                .filter(|elements| *elements < DIVIDEND_LIMIT);
            if elements.is_none() {
                let reason = format!("{images} images of {pixels:?} pixels, {stride} apart");
                return Err(KernelError::unsupported(OP, reason));
            }
        }
        match [0, 1].into_iter().all(|dim| self.positions(dim).are_counted(input[dim])) {
            true => Ok(()),
            false => Err(KernelError::unsupported(OP, format!("{input:?} to {output:?}"))),
        }
    }

    /// Where outputs lie along rows (0) or columns (1).
    pub(super) fn positions(&self, dim: usize) -> Positions {
        Positions::new(self.mode, self.align_corners, self.input[dim], self.output[dim])
    }

    /// Pixels of dy, of all images.
    pub(super) fn output_pixels(&self) -> usize {
        self.images * self.output[0] * self.output[1]
    }

    /// Elements of dx.
    pub fn inputs(&self) -> usize {
        self.images * self.input[0] * self.input[1] * self.channels
    }

    /// Elements of dy, without what lies between pixels.
    pub fn outputs(&self) -> usize {
        self.output_pixels() * self.channels
    }

    /// Bytes that have to be moved: dy in, and dx out.
    pub fn bytes(&self) -> usize {
        (self.inputs() + self.outputs()) * self.dtype.size()
    }

    /// Whether `dy` holds the problem's pixels, and begins where vectors may.
    pub(super) fn check_dy(&self, dy: &Buffer) -> Result<(), KernelError> {
        let span = (self.output_pixels() - 1) * self.dy_stride + self.channels;
        dy.check_span(OP, "dy", span, self.dtype)?;
        dy.check_start(OP, "dy")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::F32;
    use cubecl::ir::{ElemType, IntKind};

    fn plain() -> InterpolateProblem {
        InterpolateProblem {
            images: 2,
            channels: 5,
            input: [7, 9],
            output: [14, 6],
            mode: Mode::Linear,
            align_corners: true,
            dy_stride: 5,
            dtype: F32,
        }
    }

    #[test]
    fn pixels_that_lie_on_each_other_are_refused() {
        assert!(plain().validate().is_ok());
        let result = InterpolateProblem { dy_stride: 4, ..plain() }.validate();
        let named = matches!(
            result,
            Err(KernelError::InvalidProblem { op: OP, argument: "dy_stride", .. })
        );
        assert!(named, "{result:?}");
    }

    #[test]
    fn what_no_kernel_serves_is_declined() {
        for problem in [
            InterpolateProblem { images: 0, ..plain() },
            InterpolateProblem { output: [14, 0], ..plain() },
            InterpolateProblem { dtype: ElemType::Int(IntKind::I32), ..plain() },
            InterpolateProblem { dy_stride: 1 << 30, ..plain() },
            InterpolateProblem { images: usize::MAX, ..plain() },
            InterpolateProblem { channels: 1, input: [60_000, 1], output: [60_001, 1], ..plain() },
        ] {
            let result = problem.validate();
            assert!(matches!(result, Err(KernelError::Unsupported { .. })), "{problem:?}");
        }
    }

    #[test]
    fn bytes_are_those_of_both_gradients() {
        assert_eq!(plain().bytes(), 2 * 5 * (63 + 84) * 4);
    }
}
