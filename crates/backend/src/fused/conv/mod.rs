//! The provider that takes convolutions of one to three dimensions, transposed ones, and their gradients.
//!
//! Each is an operation of its own in the stream, as `burn::nn` and autodiff emit them. Results have their
//! channels innermost, as Burn's own have: element-wise fusion keeps that order, so that the next convolution
//! reads them in place. A convolution of one dimension is one of images of height 1, and one of three dimensions is one
//! of [frames](volumes).

mod operand;
mod volumes;

use crate::{
    declined::unsupported,
    stream::{Done, Replacement, SingleOperation},
    tensors::{
        Input, Location, Tensors, consume, contiguous_buffer, cube_tensor, known_output,
        register_cube_tensor, register_output, register_zeros,
    },
};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    column_sum::{ColumnSumProblem, column_sum},
    conv::{ConvOptions, ConvProblem, conv},
    matmul::F32Precision,
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{
    Conv1dOptionsIr, Conv2dOptionsIr, Conv3dOptionsIr, ConvTranspose1dOptionsIr,
    ConvTranspose2dOptionsIr, ConvTranspose3dOptionsIr, ModuleOperationIr, OperationIr, TensorId,
    TensorIr, TensorStatus,
};
use burn_std::Metadata;
use operand::{Operand, four};
use serde::{Deserialize, Serialize};
use volumes::{Depth, OfImages, five, of_frames};

const OP: &str = "conv";

/// A convolution or a gradient of one on the kernels, or as Burn has it where those decline.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Convolution {
    /// A sum of products.
    Product(Box<FoundProduct>),
    /// The gradient of the bias.
    BiasGradient(Box<BiasGradient>),
}

/// What [`blackburn_kernels::conv`] computes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FoundProduct {
    result: PassResult,
    /// The operands in the kernel's order.
    operands: [TensorIr; 2],
    bias: Option<TensorIr>,
    /// What the operation names besides, for its size.
    named: Option<TensorIr>,
    walk: Conv2dOptionsIr,
    /// That along frames, of volumes.
    depth: Option<Depth>,
    full_f32: bool,
    out: TensorIr,
}

/// What a pass makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum PassResult {
    /// Images, from images by which the kernel walks.
    Output,
    /// Images by which the kernel walks: the gradient of these, or a transposed convolution.
    Input,
    /// The gradient of the weights.
    Weight,
}

/// The gradient of a convolution's bias: a sum over all but the channels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BiasGradient {
    dy: TensorIr,
    /// What the operation names besides.
    named: [TensorIr; 2],
    out: TensorIr,
}

impl SingleOperation for Convolution {
    const IN_ROWS: bool = true;
    type Settings = F32Precision;

    fn of(operation: &OperationIr, precision: &F32Precision) -> Option<Self> {
        use ModuleOperationIr as Module;
        use PassResult::{Input, Output, Weight};

        let OperationIr::Module(operation) = operation else { return None };
        let full_f32 = *precision == F32Precision::Full;
        let pass = |result, operands: [&TensorIr; 2], bias: Option<&TensorIr>, named, walk, out| {
            let (operands, bias) = (operands.map(TensorIr::clone), bias.cloned());
            let (named, out): (Option<&TensorIr>, &TensorIr) = (named, out);
            let (named, out) = (named.cloned(), out.clone());
            let (walk, depth) = walk;
            Self::Product(Box::new(FoundProduct {
                result,
                operands,
                bias,
                named,
                walk,
                depth,
                full_f32,
                out,
            }))
        };
        let bias_gradient = |dy: &TensorIr, named: [&TensorIr; 2], out: &TensorIr| {
            let named = named.map(TensorIr::clone);
            Self::BiasGradient(Box::new(BiasGradient { dy: dy.clone(), named, out: out.clone() }))
        };
        /// A forward pass or a transposed one, a gradient of x, and one of the weights.
        macro_rules! forward {
            ($op:ident, $result:ident) => {{
                let bias = $op.bias.as_ref();
                pass($result, [&$op.x, &$op.weight], bias, None, $op.options.walk(), &$op.out)
            }};
        }
        macro_rules! gradient {
            ($op:ident of x) => {{
                let operands = [&$op.output_grad, &$op.weight];
                pass(Input, operands, None, Some(&$op.x), $op.options.walk(), &$op.out)
            }};
            ($op:ident of weight) => {{
                let operands = [&$op.x, &$op.output_grad];
                pass(Weight, operands, None, Some(&$op.weight), $op.options.walk(), &$op.out)
            }};
            ($op:ident of bias) => {
                bias_gradient(&$op.output_grad, [&$op.x, &$op.bias], &$op.out)
            };
        }
        Some(match operation {
            Module::Conv1d(op) => forward!(op, Output),
            Module::Conv2d(op) => forward!(op, Output),
            Module::ConvTranspose1d(op) => forward!(op, Input),
            Module::ConvTranspose2d(op) => forward!(op, Input),
            Module::Conv3d(op) => forward!(op, Output),
            Module::ConvTranspose3d(op) => forward!(op, Input),
            Module::Conv1dXBackward(op) => gradient!(op of x),
            Module::Conv2dXBackward(op) => gradient!(op of x),
            Module::Conv3dXBackward(op) => gradient!(op of x),
            Module::Conv1dWeightBackward(op) => gradient!(op of weight),
            Module::Conv2dWeightBackward(op) => gradient!(op of weight),
            Module::Conv3dWeightBackward(op) => gradient!(op of weight),
            Module::Conv1dBiasBackward(op) => gradient!(op of bias),
            Module::Conv2dBiasBackward(op) => gradient!(op of bias),
            Module::Conv3dBiasBackward(op) => gradient!(op of bias),
            _ => return None,
        })
    }

    /// The gradient of a transposed convolution's weights, with whose dimensions Burn swaps: it is a convolution of two
    /// views that nobody reads again.
    fn viewed(&self) -> Option<TensorId> {
        let Self::Product(product) = self else { return None };
        let are_last =
            product.operands.iter().all(|operand| operand.status == TensorStatus::ReadWrite);
        let may_be = product.result == PassResult::Output && product.bias.is_none() && are_last;
        may_be.then_some(product.out.id)
    }
}

impl Replacement for Convolution {
    const NAME: &'static str = "BlackburnConv";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        match self {
            Self::Product(pass) => pass.launch(tensors)?,
            Self::BiasGradient(gradient) => gradient.launch(tensors)?,
        }
        Ok(Done::All)
    }
}

/// The options of a convolution as one of images has them, and of volumes what they have besides.
trait Walk {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>);
}

/// One of images of height 1.
fn along_rows(
    [stride]: [usize; 1],
    padding: (usize, usize),
    [dilation]: [usize; 1],
    groups: usize,
) -> Conv2dOptionsIr {
    Conv2dOptionsIr {
        stride: [1, stride],
        padding: [(0, 0), padding],
        dilation: [1, dilation],
        groups,
    }
}

impl Walk for Conv1dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        (along_rows(self.stride, self.padding[0], self.dilation, self.groups), None)
    }
}

impl Walk for Conv2dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        (self.clone(), None)
    }
}

impl Walk for Conv3dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        let (walk, depth) = of_frames(self.stride, self.padding, self.dilation, self.groups);
        (walk, Some(depth))
    }
}

/// The padding behind the output follows from the output's size.
impl Walk for ConvTranspose1dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        let [padding] = self.padding;
        (along_rows(self.stride, (padding, padding), self.dilation, self.groups), None)
    }
}

impl Walk for ConvTranspose2dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        let Self { stride, padding, dilation, groups, .. } = *self;
        let padding = padding.map(|padding| (padding, padding));
        (Conv2dOptionsIr { stride, padding, dilation, groups }, None)
    }
}

impl Walk for ConvTranspose3dOptionsIr {
    fn walk(&self) -> (Conv2dOptionsIr, Option<Depth>) {
        let (walk, depth) = of_frames(self.stride, self.padding, self.dilation, self.groups);
        (walk, Some(depth))
    }
}

impl FoundProduct {
    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let shape = known_output(tensors, &self.out, OP)?.shape.clone();
        let [first, second] = &self.operands;
        let (first, second) = (cube_tensor(tensors, first, OP)?, cube_tensor(tensors, second, OP)?);
        let bias = self.bias.as_ref().map(|bias| cube_tensor(tensors, bias, OP)).transpose()?;
        let place = Location::of(&first);
        let is_empty = |tensor: &CubeTensor| tensor.meta.shape().num_elements() == 0;
        let sums_nothing = bias.is_none() && (is_empty(&first) || is_empty(&second));
        if sums_nothing || shape.num_elements() == 0 {
            register_zeros(tensors, &self.out, &place, OP)?;
        } else {
            let (made, strides) = match self.depth {
                None => {
                    let (made, strides) =
                        self.made([first, second], bias, &four(&shape)?, &place)?;
                    (made, of_rank(strides, shape.num_dims()))
                }
                Some(depth) => {
                    let images = OfImages::of(self, depth, [first, second], five(&shape)?)?;
                    let operands = images.operands.clone();
                    let (made, strides) =
                        images.pass.made(operands, bias, &images.shape, &place)?;
                    (made, images.strides(strides))
                }
            };
            let made = CubeTensor::new(
                place.client,
                made.handle,
                Metadata::new(shape, strides),
                place.device,
                self.out.dtype,
            );
            register_cube_tensor(tensors, &self.out, made, OP)?;
        }
        for tensor in self.operands.iter().chain(&self.bias).chain(&self.named) {
            consume(tensors, tensor);
        }
        Ok(())
    }

    /// What the kernel makes of images in that shape, and the distances in it.
    fn made(
        &self,
        [first, second]: [CubeTensor; 2],
        bias: Option<CubeTensor>,
        shape: &[usize; 4],
        place: &Location,
    ) -> Result<(Buffer, [usize; 4]), KernelError> {
        let first = Operand::images(first)?;
        let second = match self.result {
            PassResult::Weight => Operand::images(second)?,
            PassResult::Output | PassResult::Input => Operand::weights(second, self.walk.groups)?,
        };
        let Planned { problem, strides } = self.plan(&first, &second, shape)?;
        let bias = bias.map(contiguous_buffer);
        let [a, b] =
            [(&first, 0), (&second, 1)].map(|(operand, at)| operand.buffer(problem.spans()[at]));
        Ok((conv(&place.client, &problem, &a, &b, bias.as_ref())?, strides))
    }

    /// The problem for a result of that shape, and the distances in the result.
    fn plan(
        &self,
        first: &Operand,
        second: &Operand,
        out: &[usize; 4],
    ) -> Result<Planned, KernelError> {
        let options = self.options();
        let precision = if self.full_f32 { F32Precision::Full } else { F32Precision::Tf32 };
        let dtype = dtype_to_elem_type(self.out.dtype);
        let [_, _, height, width] = *out;
        let (a, b) = (first.layout(), second.layout());
        let problem = match self.result {
            PassResult::Output if self.sums_pixels(&second.shape, out) => {
                // What walks is as large as the images: as a gradient of weights, its sum is shared.
                let [a, b] = [first, second].map(Operand::swapped);
                let ConvOptions { stride, dilation, .. } = options;
                let options = ConvOptions { stride: dilation, dilation: stride, ..options };
                let (a, b) = (a.layout(), b.layout());
                let problem = ConvProblem::wgrad(a, b, [height, width], options, dtype, precision)?;
                let [k, c, r, s] = problem.out_strides();
                return Ok(Planned { problem, strides: [c, k, r, s] });
            }
            PassResult::Output => ConvProblem::fprop(a, b, options, dtype, precision),
            PassResult::Input => {
                ConvProblem::dgrad(a, b, [height, width], options, dtype, precision)
            }
            PassResult::Weight => {
                ConvProblem::wgrad(a, b, [height, width], options, dtype, precision)
            }
        }?;
        let strides = problem.out_strides();
        Ok(Planned { problem, strides })
    }

    fn options(&self) -> ConvOptions {
        let Conv2dOptionsIr { stride, padding, dilation, groups } = self.walk;
        let padding = padding.map(|(before, behind)| [before, behind]);
        ConvOptions { stride, padding, dilation, groups }
    }

    /// Whether sums are long and few, so that they are better shared as those of a gradient of weights are. It
    /// is what the gradient of a transposed convolution's weights is, which Burn has as a convolution whose
    /// kernel is an image.
    fn sums_pixels(&self, kernel: &[usize], out: &[usize]) -> bool {
        /// Terms for each row from which on that pays for operands that do not lie so well.
        const TERMS: usize = 4;
        let ([_, channels, taps @ ..], [images, _, pixels @ ..]) = (kernel, out) else {
            return false;
        };
        let [taps, pixels]: [usize; 2] = [taps, pixels].map(|sizes| sizes.iter().product());
        self.bias.is_none()
            && self.walk.groups == 1
            && self.walk.stride == [1, 1]
            && taps > pixels
            && channels * taps > TERMS * images * pixels
    }
}

/// A problem, and the distances between the elements of what it makes as the stream knows it.
struct Planned {
    problem: ConvProblem,
    strides: [usize; 4],
}

impl BiasGradient {
    fn launch(&self, tensors: &mut Tensors) -> Result<(), KernelError> {
        let Self { dy, named, out } = self;
        let mut x = Input::of(tensors, dy, OP)?;
        if x.shape.len() < 3 {
            return Err(unsupported(OP, "a gradient of fewer than three dimensions"));
        }
        if x.elements() == 0 {
            register_zeros(tensors, out, &x.location(), OP)?;
        } else {
            // Channels behind the pixels.
            for sizes in [&mut x.shape, &mut x.strides] {
                sizes[1..].rotate_left(1);
            }
            let pixels = 0..x.shape.len() - 1;
            let of = |x: &Input| ColumnSumProblem::new(&x.shape, &x.strides, pixels, x.dtype);
            let lies_well = x.strides.last() == Some(&1);
            let x = if lies_well { x } else { x.contiguous() };
            let problem = of(&x)?;
            let sum = column_sum(&x.client, &problem, &x.buffer(problem.span()))?;
            register_output(tensors, out, &x, sum, OP)?;
        }
        for tensor in named.iter().chain([dy]) {
            consume(tensors, tensor);
        }
        Ok(())
    }
}

/// Distances of a tensor of that rank.
fn of_rank([image, channel, row, column]: [usize; 4], rank: usize) -> Vec<usize> {
    if rank == 3 { vec![image, channel, column] } else { vec![image, channel, row, column] }
}

#[cfg(test)]
mod tests;
