//! What a case is: an operation of given tensors, and the bytes that it has to move.

use burn::tensor::{Bool, DType, Device, Distribution, Int, Tensor, TensorCreationOptions};
use clap::ValueEnum;

/// How large the tensors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Size {
    /// 4 Ki elements: to try the program.
    Tiny,
    /// 1 Mi elements.
    Small,
    /// 16 Mi elements.
    Middle,
    /// 64 Mi elements.
    Large,
}

/// The shapes of a size. All but `sorted` have the same number of elements.
#[derive(Clone, Copy)]
pub(crate) struct Shapes {
    /// Tokens and features.
    pub(crate) matrix: [usize; 2],
    /// With a dimension in the middle.
    pub(crate) cube: [usize; 3],
    /// Few long rows: the statistics of groups and channels.
    pub(crate) rows: [usize; 2],
    /// Batch, channels, length.
    pub(crate) signals: [usize; 3],
    /// Batch, channels, height, width.
    pub(crate) images: [usize; 4],
    /// Sixteen times smaller: nobody sorts what he trains on.
    pub(crate) sorted: [usize; 2],
    /// Words of a table with the columns of `matrix`.
    pub(crate) words: usize,
}

impl Size {
    pub(crate) fn shapes(self) -> Shapes {
        match self {
            Self::Tiny => Shapes {
                matrix: [64, 64],
                cube: [4, 32, 32],
                rows: [4, 1024],
                signals: [2, 16, 128],
                images: [2, 4, 16, 32],
                sorted: [4, 64],
                words: 100,
            },
            Self::Small => Shapes {
                matrix: [4096, 256],
                cube: [64, 128, 128],
                rows: [16, 65_536],
                signals: [8, 128, 1024],
                images: [8, 32, 64, 64],
                sorted: [64, 1024],
                words: 50_257,
            },
            Self::Middle => Shapes {
                matrix: [16_384, 1024],
                cube: [64, 512, 512],
                rows: [64, 262_144],
                signals: [32, 256, 2048],
                images: [32, 32, 128, 128],
                sorted: [1024, 1024],
                words: 50_257,
            },
            Self::Large => Shapes {
                matrix: [16_384, 4096],
                cube: [64, 1024, 1024],
                rows: [64, 1_048_576],
                signals: [64, 512, 2048],
                images: [64, 64, 128, 128],
                sorted: [1024, 4096],
                words: 50_257,
            },
        }
    }

    pub(crate) fn elements(self) -> usize {
        self.shapes().matrix.iter().product()
    }
}

/// Draws what operations take: of one type, on one device.
pub(crate) struct Inputs {
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    /// See [`Subject`](crate::sweep::Subject).
    pub(crate) tunes: bool,
}

impl Inputs {
    /// How a tensor of this device and type is made.
    pub(crate) fn options(&self) -> TensorCreationOptions {
        (&self.device, self.dtype).into()
    }

    /// Normal numbers.
    pub(crate) fn numbers<const D: usize>(&self, dims: [usize; D]) -> Tensor<D> {
        Tensor::random(dims, Distribution::Normal(0.0, 1.0), self.options())
    }

    /// Normal numbers whose gradient is asked for.
    pub(crate) fn leaf<const D: usize>(&self, dims: [usize; D]) -> Tensor<D> {
        Tensor::from_inner(self.numbers(dims)).require_grad()
    }

    /// Positive numbers.
    pub(crate) fn positive<const D: usize>(&self, dims: [usize; D]) -> Tensor<D> {
        Tensor::random(dims, Distribution::Uniform(0.1, 2.0), self.options())
    }

    /// Places below `end`.
    pub(crate) fn places<const D: usize>(&self, dims: [usize; D], end: usize) -> Tensor<D, Int> {
        let upper = Distribution::Uniform(0.0, end as f64);
        // Rounding may draw the end itself.
        Tensor::random(dims, upper, &self.device).clamp(0, end as i64 - 1)
    }

    /// True in half of all places.
    pub(crate) fn mask<const D: usize>(&self, dims: [usize; D]) -> Tensor<D, Bool> {
        self.numbers(dims).greater_elem(0.0)
    }
}

/// Enqueues an operation once.
pub(crate) type Call = Box<dyn FnMut() -> Result<(), String>>;

/// Draws the inputs of an operation.
pub(crate) type Prepare = Box<dyn FnOnce(&Inputs) -> Call>;

/// An operation of given tensors.
pub(crate) struct Case {
    pub(crate) label: Label,
    pub(crate) prepare: Prepare,
}

/// What a case is called in the results.
#[derive(Clone)]
pub(crate) struct Label {
    pub(crate) op: &'static str,
    pub(crate) pass: &'static str,
    pub(crate) dtype: DType,
    pub(crate) size: Size,
    /// Among the cases of a size: the same in every size.
    pub(crate) place: usize,
    /// Its dimensions, then pairs of a word and a number: `peers/torch_ops.py` reads it.
    pub(crate) shape: String,
    /// What it must read and write, each tensor once. Indices have 4 bytes, truth values 1.
    pub(crate) bytes: usize,
}

impl Label {
    /// Whether Burn's GPU backend is known to panic: of interpolation it has the gradient of the nearest pixel alone.
    pub(crate) fn is_risky(&self) -> bool {
        self.pass == BOTH && matches!(self.op, "interpolate_bilinear" | "interpolate_bicubic")
    }
}

/// Cases of one size and type.
pub(crate) struct Cases {
    pub(crate) shapes: Shapes,
    /// Bytes of an element.
    pub(crate) element: usize,
    size: Size,
    dtype: DType,
    list: Vec<Case>,
}

const FORWARD: &str = "forward";
const BOTH: &str = "forward_backward";

/// Bytes of an index: what they have least, PyTorch's are twice as long.
pub(crate) const INDEX: usize = 4;
/// Bytes of a truth value.
pub(crate) const TRUTH: usize = 1;

impl Cases {
    /// All of that size and type.
    pub(crate) fn all(size: Size, dtype: DType) -> Vec<Case> {
        let shapes = size.shapes();
        let mut cases = Self { shapes, element: dtype.size(), size, dtype, list: Vec::new() };
        crate::elementwise::add(&mut cases);
        crate::reductions::add(&mut cases);
        crate::indexing::add(&mut cases);
        crate::layout::add(&mut cases);
        crate::images::add(&mut cases);
        crate::gradients::add(&mut cases);
        cases.list
    }

    /// Adds a forward pass. `prepare` draws the inputs and returns what is timed.
    pub(crate) fn add<T, R: FnMut() -> T + 'static>(
        &mut self,
        op: &'static str,
        shape: String,
        bytes: usize,
        prepare: impl FnOnce(&Inputs) -> R + 'static,
    ) {
        self.add_pass(op, FORWARD, shape, bytes, prepare);
    }

    /// Adds both passes. `prepare` returns what makes the output of its leaf; the gradient of the output is one
    /// everywhere, which Burn writes in each pass, and is not counted.
    pub(crate) fn add_gradient<const D: usize, const O: usize>(
        &mut self,
        op: &'static str,
        dims: [usize; D],
        shape: String,
        bytes: usize,
        prepare: impl FnOnce(&Inputs) -> Box<dyn Fn(Tensor<D>) -> Tensor<O>> + 'static,
    ) {
        self.add_pass(op, BOTH, shape, bytes, move |inputs| {
            let x = inputs.leaf(dims);
            let run = prepare(inputs);
            move || {
                let out = run(x.clone());
                let gradient = x.grad(&out.backward());
                (out, gradient)
            }
        });
    }

    fn add_pass<T, R: FnMut() -> T + 'static>(
        &mut self,
        op: &'static str,
        pass: &'static str,
        shape: String,
        bytes: usize,
        prepare: impl FnOnce(&Inputs) -> R + 'static,
    ) {
        let prepare = move |inputs: &Inputs| -> Call {
            let device = inputs.device.clone();
            let mut run = prepare(inputs);
            Box::new(move || {
                let out = run();
                // Burn would merge iterations otherwise, and would not write what is dropped by then.
                device.flush().map_err(|error| error.to_string())?;
                drop(out);
                Ok(())
            })
        };
        let Self { size, dtype, .. } = *self;
        let place = self.list.len();
        let label = Label { op, pass, dtype, size, place, shape, bytes };
        self.list.push(Case { label, prepare: Box::new(prepare) });
    }
}

/// `4096x256`.
pub(crate) fn named(dims: &[usize]) -> String {
    dims.iter().map(usize::to_string).collect::<Vec<_>>().join("x")
}

/// Adds an operation over one dimension for given dimensions. `$bytes` are those of an element and of a result.
macro_rules! along {
    ($cases:ident, $op:expr, $bytes:expr, $input:ident, $dims:ident $dim:literal, |$x:ident, $d:ident| $run:expr) => {{
        let dims = $cases.shapes.$dims;
        let elements: usize = dims.iter().product();
        let (each, result): (usize, usize) = $bytes;
        let bytes = elements * each + elements / dims[$dim] * result;
        let shape = format!("{} dim {}", $crate::cases::named(&dims), $dim);
        $cases.add($op, shape, bytes, move |inputs| {
            let x = inputs.$input(dims);
            move || {
                let ($x, $d) = (x.clone(), $dim);
                $run
            }
        });
    }};
}

/// The same over the last dimension, the first, and one in the middle.
macro_rules! over_dims {
    ($cases:ident, $op:expr, $bytes:expr, $input:ident, |$x:ident, $d:ident| $run:expr) => {{
        $crate::cases::along!($cases, $op, $bytes, $input, matrix 1, |$x, $d| $run);
        $crate::cases::along!($cases, $op, $bytes, $input, matrix 0, |$x, $d| $run);
        $crate::cases::along!($cases, $op, $bytes, $input, cube 1, |$x, $d| $run);
    }};
}

pub(crate) use {along, over_dims};

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_case_has_a_row_of_its_own_at_every_size() {
        let count = Cases::all(Size::Tiny, DType::F32).len();
        for size in [Size::Tiny, Size::Small, Size::Middle, Size::Large] {
            let cases = Cases::all(size, DType::F32);
            let name = |case: &Case| (case.label.op, case.label.pass, case.label.shape.clone());
            assert_eq!(cases.iter().map(name).collect::<BTreeSet<_>>().len(), count, "{size:?}");
            assert!(cases.iter().all(|case| case.label.bytes > 0), "{size:?}");
        }
    }
}
