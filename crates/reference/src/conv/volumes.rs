//! Convolutions of volumes, in f64 by the definition: as those of images, with a third dimension in front of rows.

use super::{ConvCase, ConvPass, ConvSums};
use std::fmt;

/// A convolution of volumes, each of which is frames of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VolumeCase {
    /// What it is of each frame.
    pub images: ConvCase,
    /// Frames of x.
    pub input: usize,
    /// Frames of the weights.
    pub kernel: usize,
    /// Frames of x from one frame of y to the next.
    pub stride: usize,
    /// Frames of zeros before and after x.
    pub padding: usize,
    /// Frames of x from one frame of the weights to the next.
    pub dilation: usize,
}

impl VolumeCase {
    /// Frames of y.
    ///
    /// # Panics
    ///
    /// When the kernel is larger than the padded volume.
    pub fn output(&self) -> usize {
        let padded = self.input + 2 * self.padding;
        let reach = (self.kernel - 1) * self.dilation + 1;
        assert!(reach <= padded, "{self}: the kernel is larger than the padded volume");
        (padded - reach) / self.stride + 1
    }

    /// Sizes of x.
    pub fn x_shape(&self) -> [usize; 5] {
        of_frames(self.images.x_shape(), self.input)
    }

    /// Sizes of the weights.
    pub fn weight_shape(&self) -> [usize; 5] {
        of_frames(self.images.weight_shape(), self.kernel)
    }

    /// Sizes of y.
    pub fn y_shape(&self) -> [usize; 5] {
        of_frames(self.images.y_shape(), self.output())
    }

    /// As [`ConvCase::visit`](super::ConvCase).
    fn visit(&self, mut visit: impl FnMut(Option<usize>, usize, usize)) {
        let pixels = |[_, _, height, width]: [usize; 4]| height * width;
        let images = &self.images;
        let [of_x, of_w, of_y] =
            [images.x_shape(), images.weight_shape(), images.y_shape()].map(pixels);
        // Where an element of images lies in volumes of so many frames.
        let in_frame = |at: usize, pixels: usize, frames: usize, frame: usize| {
            (at / pixels * frames + frame) * pixels + at % pixels
        };
        let out_frames = self.output();
        for (d, t) in (0..out_frames).flat_map(|d| (0..self.kernel).map(move |t| (d, t))) {
            let met = (d * self.stride + t * self.dilation).checked_sub(self.padding);
            let met = met.filter(|frame| *frame < self.input);
            images.visit(|x, w, y| {
                let x = x.zip(met).map(|(x, frame)| in_frame(x, of_x, self.input, frame));
                visit(x, in_frame(w, of_w, self.kernel, t), in_frame(y, of_y, out_frames, d));
            });
        }
    }

    /// Terms of the longest sum of a pass.
    fn terms(&self, pass: ConvPass) -> usize {
        let frames = if pass == ConvPass::Wgrad { self.output() } else { self.kernel };
        self.images.terms(pass) * frames
    }
}

fn of_frames([n, c, height, width]: [usize; 4], frames: usize) -> [usize; 5] {
    [n, c, frames, height, width]
}

impl fmt::Display for VolumeCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { images, input, kernel, stride, padding, dilation } = self;
        write!(
            f,
            "{input} frames by {kernel}, stride {stride} padding {padding} dilation {dilation}, of {images}"
        )
    }
}

/// The result of a pass over volumes, from its operands: x, weights and the gradient of y in the order of
/// [`ConvCase::shapes`].
///
/// # Panics
///
/// When an operand has another length than the case says.
pub fn conv_volumes(case: &VolumeCase, pass: ConvPass, first: &[f64], second: &[f64]) -> ConvSums {
    let (x, w, y) = (case.x_shape(), case.weight_shape(), case.y_shape());
    let shapes = match pass {
        ConvPass::Fprop => [x, w, y],
        ConvPass::Dgrad => [y, w, x],
        ConvPass::Wgrad => [x, y, w],
    };
    let visit = |add: &mut dyn FnMut(Option<usize>, usize, usize)| case.visit(add);
    super::summed(
        case,
        pass,
        shapes.map(|shape| shape.iter().product()),
        [first, second],
        case.terms(pass),
        visit,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conv::conv, random::normal, storage::Storage};

    /// Of a single frame it is a convolution of images.
    #[test]
    fn one_frame_is_an_image() {
        let images =
            ConvCase { groups: 2, ..ConvCase::square(2, [4, 6], 5, 3).padded(1).strided(2) };
        let case = VolumeCase { images, input: 1, kernel: 1, stride: 1, padding: 0, dilation: 1 };
        for pass in ConvPass::ALL {
            let [first, second] = [0, 1].map(|operand| {
                normal(
                    operand,
                    images.shapes(pass)[operand as usize].iter().product(),
                    1.0,
                    Storage::F32,
                )
            });
            assert_eq!(
                conv_volumes(&case, pass, &first, &second),
                conv(&images, pass, &first, &second)
            );
        }
    }

    /// Frames of one pixel and one channel: sums that can be done by hand.
    #[test]
    fn frames_meet_those_that_stride_padding_and_dilation_say() {
        let images = ConvCase::square(1, [1, 1], 1, 1);
        let case = VolumeCase { images, input: 5, kernel: 2, stride: 2, padding: 1, dilation: 3 };
        let (x, w) = ([1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 1.0]);
        // Frames -1 and 2, then 1 and 4.
        assert_eq!(conv_volumes(&case, ConvPass::Fprop, &x, &w).values, [3.0, 25.0]);
        let dy = [1.0, 100.0];
        let dx = conv_volumes(&case, ConvPass::Dgrad, &dy, &w).values;
        assert_eq!(dx, [0.0, 1000.0, 1.0, 0.0, 100.0]);
        assert_eq!(conv_volumes(&case, ConvPass::Wgrad, &x, &dy).values, [200.0, 503.0]);
    }
}
