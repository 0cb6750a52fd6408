use crate::{
    KernelError,
    buffer::{Buffer, check_float},
    divisor::DIVIDEND_LIMIT,
};
use cubecl::ir::{ElemType, IntKind};

pub(super) const OP: &str = "pool";

/// The type of indices.
pub(super) const I32: ElemType = ElemType::Int(IntKind::I32);

/// A window and how it walks an image; of each pair, the first is for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolWindow {
    /// Taps.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next.
    pub stride: [usize; 2],
    /// Pixels that the image is thought to have more, before and after it.
    pub padding: [usize; 2],
    /// Pixels from one tap to the next; 1 for averages.
    pub dilation: [usize; 2],
}

impl PoolWindow {
    /// A square one without padding and dilation.
    pub fn square(kernel: usize, stride: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [0; 2], dilation: [1; 2] }
    }

    /// Pixels from the first tap to the last.
    pub(super) fn reach(&self, dim: usize) -> usize {
        (self.kernel[dim] - 1) * self.dilation[dim]
    }

    /// Windows of an image of that size that lie inside of its padding.
    pub fn output(&self, input: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|dim| {
            let padded = input[dim] + 2 * self.padding[dim];
            padded.checked_sub(self.reach(dim) + 1).map_or(0, |free| free / self.stride[dim] + 1)
        })
    }
}

/// Which pixels a window has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Windows {
    /// A window that walks.
    Walking(PoolWindow),
    /// As many equal parts of the image as there are windows, rounded to whole pixels outwards.
    Adaptive,
}

/// What a pool asks. Strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolProblem {
    /// Images.
    pub images: usize,
    /// Channels, contiguous in memory.
    pub channels: usize,
    /// Rows and columns of x.
    pub input: [usize; 2],
    /// Rows and columns of y.
    pub output: [usize; 2],
    /// Which pixels of x a pixel of y has.
    pub windows: Windows,
    /// From a pixel of x to the next, at least `channels`. Only forward reads it.
    pub x_stride: usize,
    /// From a pixel of dy to the next, at least `channels`. Only backward reads it.
    pub dy_stride: usize,
    /// Type of x, y and their gradients.
    pub dtype: ElemType,
}

impl PoolProblem {
    /// The problem of a walking window and contiguous tensors, `sizes` being images, rows, columns and channels of
    /// x.
    pub fn contiguous(sizes: [usize; 4], window: PoolWindow, dtype: ElemType) -> Self {
        let [images, height, width, channels] = sizes;
        let input = [height, width];
        Self {
            images,
            channels,
            input,
            output: window.output(input),
            windows: Windows::Walking(window),
            x_stride: channels,
            dy_stride: channels,
            dtype,
        }
    }

    /// Checks what the numbers have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for a window of no taps, a stride or dilation of zero, pixels that lie
    /// on each other, and windows that begin behind the image; [`KernelError::Unsupported`] for other dtypes
    /// than f32, f16 and bf16, empty tensors, and tensors of 2^31 elements and more.
    pub fn validate(&self) -> Result<(), KernelError> {
        let Self { images, channels, input, output, x_stride, dy_stride, dtype, .. } = *self;
        check_float(OP, "images", dtype)?;
        let sizes = [images, channels, input[0], input[1], output[0], output[1]];
        if sizes.contains(&0) {
            let reason = format!("{images} images of {channels} channels, {input:?} to {output:?}");
            return Err(KernelError::unsupported(OP, reason));
        }
        for (argument, stride) in [("x_stride", x_stride), ("dy_stride", dy_stride)] {
            if stride < channels {
                let expected = format!("at least {channels}, the channels of a pixel");
                return Err(KernelError::invalid(OP, argument, expected, stride));
            }
        }
        match self.windows {
            Windows::Walking(window) => self.check_window(&window)?,
            // Their bounds are quotients of products of both sizes.
            Windows::Adaptive => {
                let limit = DIVIDEND_LIMIT / 4;
                let fits =
                    |dim: usize| input[dim].checked_mul(output[dim]).is_some_and(|it| it < limit);
                if !(fits(0) && fits(1)) {
                    let reason = format!("{output:?} parts of images of {input:?}");
                    return Err(KernelError::unsupported(OP, reason));
                }
            }
        }
        // Cells reach over the padding.
        let padding = self.padding();
        let padded = [0, 1].map(|dim| input[dim].saturating_add(padding[dim]));
        for (pixels, stride) in [(padded, x_stride), (output, dy_stride)] {
            let elements = [images, pixels[0], pixels[1], stride]
                .into_iter()
                .try_fold(1usize, usize::checked_mul)
                .filter(|elements| *elements < DIVIDEND_LIMIT);
            if elements.is_none() {
                let reason = format!("{images} images of {pixels:?} pixels, {stride} apart");
                return Err(KernelError::unsupported(OP, reason));
            }
        }
        Ok(())
    }

    fn check_window(&self, window: &PoolWindow) -> Result<(), KernelError> {
        let PoolWindow { kernel, stride, padding, dilation } = *window;
        for (argument, pair) in [("kernel", kernel), ("stride", stride), ("dilation", dilation)] {
            if pair.contains(&0) {
                let expected = "numbers above zero";
                return Err(KernelError::invalid(OP, argument, expected, format!("{pair:?}")));
            }
        }
        let behind = |dim: usize| {
            let start = (self.output[dim] - 1).saturating_mul(stride[dim]);
            start > self.input[dim].saturating_add(padding[dim].saturating_mul(2))
        };
        if behind(0) || behind(1) {
            let expected = format!("windows that begin in images of {:?}", self.input);
            let actual = format!("{:?} windows of {window:?}", self.output);
            return Err(KernelError::invalid(OP, "output", expected, actual));
        }
        // What kernels compute positions by stays below the limit.
        let reaches = |dim: usize| {
            let reach = kernel[dim].checked_mul(dilation[dim])?;
            let steps = self.output[dim].checked_mul(stride[dim])?;
            reach.checked_add(steps)?.checked_add(padding[dim].checked_mul(2)?)
        };
        if [0, 1].map(reaches).iter().any(|it| it.is_none_or(|end| end >= DIVIDEND_LIMIT / 2)) {
            return Err(KernelError::unsupported(OP, format!("{window:?}")));
        }
        Ok(())
    }

    fn padding(&self) -> [usize; 2] {
        match self.windows {
            Windows::Walking(window) => window.padding,
            Windows::Adaptive => [0; 2],
        }
    }

    /// The same with a walking window, where an adaptive one divides the image evenly.
    pub(super) fn walking(self) -> Self {
        let even = |dim: usize| self.input[dim].is_multiple_of(self.output[dim]);
        if self.windows != Windows::Adaptive || !even(0) || !even(1) {
            return self;
        }
        let part = [0, 1].map(|dim| self.input[dim] / self.output[dim]);
        let window = PoolWindow { kernel: part, stride: part, padding: [0; 2], dilation: [1; 2] };
        Self { windows: Windows::Walking(window), ..self }
    }

    /// Whether there is one window, which is the image.
    pub(super) fn is_global(&self) -> bool {
        let is_whole = match self.windows {
            Windows::Walking(PoolWindow { kernel, padding, .. }) => {
                kernel == self.input && padding == [0; 2]
            }
            Windows::Adaptive => true,
        };
        self.output == [1, 1] && is_whole
    }

    /// Refuses averages of dilated windows, and of ones without a pixel.
    pub(super) fn check_average(&self) -> Result<(), KernelError> {
        let Windows::Walking(PoolWindow { kernel, stride, padding, dilation }) = self.windows
        else {
            return Ok(());
        };
        if dilation != [1; 2] {
            let reason = format!("averages of windows with a dilation of {dilation:?}");
            return Err(KernelError::unsupported(OP, reason));
        }
        let is_outside = |dim: usize| {
            let last = (self.output[dim] - 1) * stride[dim];
            padding[dim] >= kernel[dim] || last >= self.input[dim] + padding[dim]
        };
        if is_outside(0) || is_outside(1) {
            let reason = "averages of windows that lie outside of the image";
            return Err(KernelError::unsupported(OP, reason));
        }
        Ok(())
    }

    /// Pixels of x, of all images.
    pub(super) fn pixels(&self) -> usize {
        self.images * self.input[0] * self.input[1]
    }

    /// Windows, of all images.
    pub(super) fn window_count(&self) -> usize {
        self.images * self.output[0] * self.output[1]
    }

    /// Elements of y, without what lies between pixels.
    pub fn outputs(&self) -> usize {
        self.window_count() * self.channels
    }

    /// Elements of x, without what lies between pixels.
    pub fn inputs(&self) -> usize {
        self.pixels() * self.channels
    }

    /// Elements from the first to the last of pixels that are `stride` apart.
    pub(super) fn span(&self, pixels: usize, stride: usize) -> usize {
        (pixels - 1) * stride + self.channels
    }

    /// Bytes that forward has to move: x in, y out, and the indices.
    pub fn forward_bytes(&self, indices: bool) -> usize {
        let of_indices = if indices { self.outputs() * I32.size() } else { 0 };
        (self.inputs() + self.outputs()) * self.dtype.size() + of_indices
    }

    /// Bytes that backward has to move: dy in, the indices, and dx out.
    pub fn backward_bytes(&self, indices: bool) -> usize {
        self.forward_bytes(indices)
    }

    /// Whether `buffer` holds pixels of channels that are `stride` apart, and begins where vectors may.
    pub(super) fn check_pixels(
        &self,
        argument: &'static str,
        buffer: &Buffer,
        pixels: usize,
        stride: usize,
        dtype: ElemType,
    ) -> Result<(), KernelError> {
        buffer.check_span(OP, argument, self.span(pixels, stride), dtype)?;
        buffer.check_start(OP, argument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::F32;

    fn plain() -> PoolProblem {
        PoolProblem::contiguous([2, 7, 9, 5], PoolWindow::square(3, 2), F32)
    }

    #[test]
    fn numbers_that_contradict_each_other_are_named() {
        let named = |problem: PoolProblem| match problem.validate() {
            Err(KernelError::InvalidProblem { op: OP, argument, .. }) => argument,
            other => panic!("{problem:?} gave {other:?}"),
        };
        let of = |window: PoolWindow| PoolProblem { windows: Windows::Walking(window), ..plain() };
        let square = PoolWindow::square(3, 2);
        assert!(plain().validate().is_ok());
        assert_eq!(named(PoolProblem { x_stride: 4, ..plain() }), "x_stride");
        assert_eq!(named(PoolProblem { dy_stride: 4, ..plain() }), "dy_stride");
        assert_eq!(named(of(PoolWindow { kernel: [3, 0], ..square })), "kernel");
        assert_eq!(named(of(PoolWindow { stride: [0, 1], ..square })), "stride");
        assert_eq!(named(of(PoolWindow { dilation: [1, 0], ..square })), "dilation");
        assert_eq!(named(PoolProblem { output: [5, 4], ..plain() }), "output");
    }

    #[test]
    fn what_no_kernel_serves_is_declined() {
        for problem in [
            PoolProblem { images: 0, ..plain() },
            PoolProblem { dtype: I32, ..plain() },
            PoolProblem { x_stride: 1 << 30, ..plain() },
            PoolProblem { images: usize::MAX, ..plain() },
        ] {
            let result = problem.validate();
            assert!(matches!(result, Err(KernelError::Unsupported { .. })), "{problem:?}");
        }
        let window = PoolWindow { padding: [3, 0], ..PoolWindow::square(3, 2) };
        let outside = PoolProblem::contiguous([2, 7, 9, 5], window, F32);
        assert!(outside.check_average().is_err() && plain().check_average().is_ok());
    }

    #[test]
    fn parts_of_equal_size_are_windows_that_walk() {
        let adaptive = |output| PoolProblem { output, windows: Windows::Adaptive, ..plain() };
        let windows = |output| adaptive(output).walking().windows;
        assert_eq!(windows([2, 3]), Windows::Adaptive);
        let whole = PoolWindow { kernel: [7, 3], stride: [7, 3], ..PoolWindow::square(1, 1) };
        assert_eq!(windows([1, 3]), Windows::Walking(whole));
        assert!(adaptive([1, 1]).walking().is_global());
        assert!(!adaptive([1, 3]).walking().is_global());
    }

    #[test]
    fn bytes_are_those_of_each_pass() {
        // Twelve windows of 63 pixels.
        let [x, y] = [2 * 63 * 5 * 4, 2 * 12 * 5 * 4];
        assert_eq!([false, true].map(|it| plain().forward_bytes(it)), [x + y, x + 2 * y]);
        assert_eq!(plain().backward_bytes(true), x + 2 * y);
    }
}
