use crate::{
    KernelError,
    buffer::{F32, is_float},
    divisor::DIVIDEND_LIMIT,
    matmul::{F32Precision, TensorLayout},
};
use cubecl::ir::ElemType;

pub(super) const OP: &str = "conv";

/// Which of the three sums is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvPass {
    /// y, from x and the weights.
    Fprop,
    /// The gradient of x, from that of y and the weights.
    Dgrad,
    /// The gradient of the weights, from x and the gradient of y.
    Wgrad,
}

/// How the taps of a kernel walk an image; of each pair, the first is for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvOptions {
    /// Pixels of x from one pixel of y to the next.
    pub stride: [usize; 2],
    /// Zeros before and after each dimension of x.
    pub padding: [[usize; 2]; 2],
    /// Pixels of x from one tap to the next.
    pub dilation: [usize; 2],
    /// Parts that the channels are divided into; each part of y sees one of x.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> Self {
        Self { stride: [1; 2], padding: [[0; 2]; 2], dilation: [1; 2], groups: 1 }
    }
}

impl ConvOptions {
    /// Rows or columns of y; `None` where the kernel is larger than the padded image.
    fn output(&self, dim: usize, input: usize, kernel: usize) -> Option<usize> {
        let padded = input.checked_add(self.padding[dim][0])?.checked_add(self.padding[dim][1])?;
        let reach = kernel.checked_sub(1)?.checked_mul(self.dilation[dim])?.checked_add(1)?;
        Some(padded.checked_sub(reach)? / self.stride[dim] + 1)
    }
}

/// What a pass of a convolution asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvProblem {
    /// Which sum.
    pub pass: ConvPass,
    /// Images.
    pub batch: usize,
    /// Channels of x.
    pub in_channels: usize,
    /// Channels of y.
    pub out_channels: usize,
    /// Height and width of x.
    pub input: [usize; 2],
    /// Height and width of y.
    pub output: [usize; 2],
    /// Height and width of the weights.
    pub kernel: [usize; 2],
    /// How the taps walk.
    pub options: ConvOptions,
    /// Distances in the first operand, in elements: of x, or of dy in [`ConvPass::Dgrad`], in the order n, c, h, w.
    pub first: [usize; 4],
    /// Those of the second one: of the weights in the order k, c, r, s, or of dy in [`ConvPass::Wgrad`].
    pub second: [usize; 4],
    /// Element type of the operands.
    pub dtype: ElemType,
    /// Element type of the result.
    pub out: ElemType,
    /// How f32 operands are multiplied.
    pub f32_precision: F32Precision,
}

impl ConvProblem {
    /// y, of x `[n, c, h, w]` and the weights `[k, c / groups, r, s]`.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for shapes that contradict each other or the options;
    /// [`KernelError::Unsupported`] for dtypes that no kernel takes, empty tensors and sizes beyond 32-bit indices.
    pub fn fprop(
        x: TensorLayout<'_>,
        weight: TensorLayout<'_>,
        options: ConvOptions,
        out: ElemType,
        f32_precision: F32Precision,
    ) -> Result<Self, KernelError> {
        let ([batch, in_channels, height, width], first) = four("x", x)?;
        let ([out_channels, channels, r, s], second) = four("weight", weight)?;
        let problem = Self {
            pass: ConvPass::Fprop,
            batch,
            in_channels,
            out_channels,
            input: [height, width],
            output: [0; 2],
            kernel: [r, s],
            options,
            first,
            second,
            dtype: x.dtype,
            out,
            f32_precision,
        }
        .checked(None, weight.dtype)?;
        let expected = problem.group_channels()[0];
        if channels != expected {
            let expected = format!("{expected} channels, those of a group of x");
            return Err(invalid("weight", expected, channels));
        }
        Ok(problem)
    }

    /// The gradient of x, whose height and width are `input`, of dy `[n, k, p, q]` and the weights
    /// `[k, c / groups, r, s]`. It is also a transposed convolution of dy.
    ///
    /// # Errors
    ///
    /// As [`fprop`](Self::fprop).
    pub fn dgrad(
        dy: TensorLayout<'_>,
        weight: TensorLayout<'_>,
        input: [usize; 2],
        options: ConvOptions,
        out: ElemType,
        f32_precision: F32Precision,
    ) -> Result<Self, KernelError> {
        let ([batch, dy_channels, p, q], first) = four("dy", dy)?;
        let ([out_channels, channels, r, s], second) = four("weight", weight)?;
        if dy_channels != out_channels {
            let expected = format!("{out_channels} channels, those of the weights");
            return Err(invalid("dy", expected, dy_channels));
        }
        Self {
            pass: ConvPass::Dgrad,
            batch,
            in_channels: channels * options.groups,
            out_channels,
            input,
            output: [p, q],
            kernel: [r, s],
            options,
            first,
            second,
            dtype: dy.dtype,
            out,
            f32_precision,
        }
        .checked(Some([p, q]), weight.dtype)
    }

    /// The gradient of the weights, whose height and width are `kernel`, of x `[n, c, h, w]` and dy
    /// `[n, k, p, q]`.
    ///
    /// # Errors
    ///
    /// As [`fprop`](Self::fprop).
    pub fn wgrad(
        x: TensorLayout<'_>,
        dy: TensorLayout<'_>,
        kernel: [usize; 2],
        options: ConvOptions,
        out: ElemType,
        f32_precision: F32Precision,
    ) -> Result<Self, KernelError> {
        let ([batch, in_channels, height, width], first) = four("x", x)?;
        let ([dy_batch, out_channels, p, q], second) = four("dy", dy)?;
        if dy_batch != batch {
            return Err(invalid("dy", format!("{batch} images, those of x"), dy_batch));
        }
        Self {
            pass: ConvPass::Wgrad,
            batch,
            in_channels,
            out_channels,
            input: [height, width],
            output: [p, q],
            kernel,
            options,
            first,
            second,
            dtype: x.dtype,
            out,
            f32_precision,
        }
        .checked(Some([p, q]), dy.dtype)
    }

    /// Channels of x and of y in a group.
    pub fn group_channels(&self) -> [usize; 2] {
        [self.in_channels / self.options.groups, self.out_channels / self.options.groups]
    }

    /// Height and width of the images that taps are gathered from.
    pub(super) fn gathered_size(&self) -> [usize; 2] {
        match self.pass {
            ConvPass::Dgrad => self.output,
            ConvPass::Fprop | ConvPass::Wgrad => self.input,
        }
    }

    /// Taps of the kernel.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Pixels of y.
    pub fn out_pixels(&self) -> usize {
        self.batch * self.output[0] * self.output[1]
    }

    /// Sizes of the two operands and of the result.
    pub fn shapes(&self) -> [[usize; 4]; 3] {
        let x = [self.batch, self.in_channels, self.input[0], self.input[1]];
        let y = [self.batch, self.out_channels, self.output[0], self.output[1]];
        let w = [self.out_channels, self.group_channels()[0], self.kernel[0], self.kernel[1]];
        match self.pass {
            ConvPass::Fprop => [x, w, y],
            ConvPass::Dgrad => [y, w, x],
            ConvPass::Wgrad => [x, y, w],
        }
    }

    /// Elements of the result.
    pub fn out_elements(&self) -> usize {
        self.shapes()[2].iter().product()
    }

    /// Distances between the elements of the result, in the order of its shape: channels are innermost.
    pub fn out_strides(&self) -> [usize; 4] {
        let [_, c, h, w] = self.shapes()[2];
        [h * w * c, 1, w * c, c]
    }

    /// Multiplications and additions, those with zeros of the padding included.
    pub fn flops(&self) -> f64 {
        let terms = self.taps() * self.group_channels()[0];
        2.0 * (self.out_pixels() * self.out_channels) as f64 * terms as f64
    }

    /// Bytes that have to be moved: each operand in once, the result out.
    pub fn bytes(&self) -> usize {
        let [first, second, out] = self.shapes().map(|shape| shape.iter().product::<usize>());
        (first + second) * self.dtype.size() + out * self.out.size()
    }

    /// Elements from the first to the last that is read of each operand.
    pub fn spans(&self) -> [usize; 2] {
        let [first, second, _] = self.shapes();
        [span(first, self.first), span(second, self.second)]
    }

    /// How errors name the operands.
    pub(super) fn operand_names(&self) -> [&'static str; 2] {
        match self.pass {
            ConvPass::Fprop => ["x", "weight"],
            ConvPass::Dgrad => ["dy", "weight"],
            ConvPass::Wgrad => ["x", "dy"],
        }
    }

    /// The problem with the output that it has, which has to be that of dy where there is one.
    fn checked(
        mut self,
        of_dy: Option<[usize; 2]>,
        second_dtype: ElemType,
    ) -> Result<Self, KernelError> {
        let Self { options, dtype, out, .. } = self;
        check_options(&options)?;
        check_groups(&options, self.in_channels, self.out_channels)?;
        let output = output_of(&options, self.input, self.kernel)?;
        if let Some(of_dy) = of_dy.filter(|of_dy| *of_dy != output) {
            let expected = format!("images of {output:?}");
            return Err(invalid("dy", expected, format!("{of_dy:?}")));
        }
        self.output = output;
        if second_dtype != dtype {
            let [_, second] = self.operand_names();
            return unsupported(format!("{dtype:?} with {second} in {second_dtype:?}"));
        }
        if !is_float(dtype) || out != dtype && out != F32 {
            return unsupported(format!(
                "{dtype:?} into {out:?}; it takes f32, f16 and bf16 into themselves or f32"
            ));
        }
        let shapes = self.shapes();
        if shapes.iter().flatten().any(|size| *size == 0) {
            return unsupported("an empty tensor".into());
        }
        // Every product of sizes below has a factor of at most this.
        let is_small = |sizes: &[usize], limit: usize| {
            let product = sizes.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
            product.is_some_and(|product| product < limit)
        };
        for shape in shapes {
            if !is_small(&shape, 1 << 32) {
                return unsupported(format!("{shape:?}, 2^32 elements or more"));
            }
        }
        for (name, span) in self.operand_names().into_iter().zip(self.spans()) {
            if u32::try_from(span).is_err() {
                return unsupported(format!("{name} spans {span} elements, 2^32 or more"));
            }
        }
        let [r, s] = self.kernel;
        let [[h, w], [p, q]] = [self.input, self.output];
        for sizes in [[r, s, self.in_channels + 8], [r, s, self.out_channels + 8]] {
            if !is_small(&sizes, DIVIDEND_LIMIT) {
                return unsupported(format!("{sizes:?} terms, 2^31 or more"));
            }
        }
        for sizes in [[self.batch + 1, h, w], [self.batch + 1, p, q]] {
            if !is_small(&sizes, DIVIDEND_LIMIT) {
                return unsupported(format!("{sizes:?} pixels, 2^31 or more"));
            }
        }
        // Positions wrap around below zero, and what is far outside has to stay there.
        let reach = |dim: usize| {
            let padded = self.input[dim] + options.padding[dim][0] + options.padding[dim][1];
            padded + self.kernel[dim] * options.dilation[dim] + options.stride[dim]
        };
        if reach(0).max(reach(1)) >= 1 << 29 {
            return unsupported("images of 2^29 rows or columns or more".into());
        }
        Ok(self)
    }
}

/// Elements from the first to the last.
fn span(shape: [usize; 4], strides: [usize; 4]) -> usize {
    let last = shape.iter().zip(strides).map(|(size, stride)| size.saturating_sub(1) * stride);
    last.sum::<usize>() + 1
}

/// Sizes and distances of a tensor of rank 4.
fn four(
    argument: &'static str,
    tensor: TensorLayout<'_>,
) -> Result<([usize; 4], [usize; 4]), KernelError> {
    let Ok(shape) = <[usize; 4]>::try_from(tensor.shape) else {
        return Err(invalid(argument, "rank 4".into(), tensor.shape.len()));
    };
    let Ok(strides) = <[usize; 4]>::try_from(tensor.strides) else {
        return Err(invalid(argument, "4 strides".into(), tensor.strides.len()));
    };
    Ok((shape, strides))
}

fn check_options(options: &ConvOptions) -> Result<(), KernelError> {
    let ConvOptions { stride, dilation, groups, .. } = options;
    for (argument, values) in
        [("stride", &stride[..]), ("dilation", dilation), ("groups", &[*groups])]
    {
        if values.contains(&0) {
            return Err(invalid(argument, "at least 1".into(), format!("{values:?}")));
        }
    }
    Ok(())
}

fn check_groups(
    options: &ConvOptions,
    in_channels: usize,
    out_channels: usize,
) -> Result<(), KernelError> {
    let groups = options.groups;
    if in_channels.is_multiple_of(groups) && out_channels.is_multiple_of(groups) {
        return Ok(());
    }
    let expected = format!("a divisor of {in_channels} and {out_channels} channels");
    Err(invalid("groups", expected, groups))
}

fn output_of(
    options: &ConvOptions,
    input: [usize; 2],
    kernel: [usize; 2],
) -> Result<[usize; 2], KernelError> {
    let of = |dim: usize| options.output(dim, input[dim], kernel[dim]);
    of(0).zip(of(1)).map(|(p, q)| [p, q]).ok_or_else(|| {
        let ConvOptions { padding, dilation, .. } = options;
        let expected = format!("at most images of {input:?} with padding {padding:?}");
        invalid("kernel", expected, format!("{kernel:?} with dilation {dilation:?}"))
    })
}

pub(super) fn invalid(
    argument: &'static str,
    expected: String,
    actual: impl ToString,
) -> KernelError {
    KernelError::invalid(OP, argument, expected, actual)
}

pub(super) fn unsupported<T>(reason: String) -> Result<T, KernelError> {
    Err(KernelError::Unsupported { op: OP, reason })
}
