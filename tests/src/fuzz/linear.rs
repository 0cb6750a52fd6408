//! Layers of `burn::nn` with what follows them, as a program writes them: inputs that are views, every rank,
//! an activation, gradients by autodiff.
//!
//! What runs is Burn's choice: bias and activation may be in the product's epilogue or behind it, rounded once
//! more, and the gradient of GELU may be Burn's, of its tanh form (see `crates/backend/src/fused/gelu`). Bounds allow
//! for both.
//!
//! Most kernels of a layer, in both passes, are Burn's, and what they are compiled for follows from
//! its sizes. So a plan has sizes, too, and its cases have others that the same kernels serve.

use super::target::Target;
use crate::{
    buffers::dtype,
    tensors::{self, tensor},
};
use blackburn_doctor::{
    check::{Check, Stop},
    draw::Draw,
};
use blackburn_kernels::{
    Family,
    matmul::{Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout},
};
use blackburn_reference::{
    activation::Activation,
    gelu_steps::slope_bound,
    linear::{Linear, LinearPrecision},
    storage::Storage,
};
use burn::{
    module::Param,
    nn::Linear as Layer,
    prelude::*,
    tensor::activation::{gelu, relu},
};

/// How the input came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    /// Rows follow each other.
    Whole,
    /// The last two dimensions were swapped.
    Swapped,
    /// Columns of a wider tensor.
    Narrowed,
    /// One matrix repeated along the first dimension.
    Repeated,
}

/// What is drawn of a layer.
struct Case {
    storage: Storage,
    view: View,
    /// Columns before and behind the input's in a wider tensor.
    gaps: [usize; 2],
    bias: bool,
    activation: Activation,
    outputs: usize,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.kernels.storages);
    let rank = draw.plan("rank", &[2, 3, 3, 4]);
    let view = draw
        .plan("view", &[View::Whole, View::Whole, View::Swapped, View::Narrowed, View::Repeated]);
    let bias = !draw.planned("no-bias", 3);
    let activation =
        draw.plan("activation", &[Activation::Identity, Activation::Gelu, Activation::Relu]);
    let around = Sizes::planned(draw, if rank == 2 { 1 } else { 2 });
    let drawn = around.alike(draw);
    let same_kernels = drawn.products(on, storage) == around.products(on, storage);
    let Sizes { outer, rows, inputs, outputs } = if same_kernels { drawn } else { around };
    let gaps = [draw.plan("front", &[0, 1, 8]), draw.plan("behind", &[0, 1, 8])];
    let case = Case { storage, view, gaps, bias, activation, outputs };
    match rank {
        2 => run(on, draw, check, &case, [rows, inputs]),
        3 => run(on, draw, check, &case, [outer, rows, inputs]),
        _ => run(on, draw, check, &case, [outer, 2, rows, inputs]),
    }
}

/// The sizes of a layer.
#[derive(Clone, Copy)]
struct Sizes {
    /// Matrices of the input.
    outer: usize,
    /// Rows of each.
    rows: usize,
    inputs: usize,
    outputs: usize,
}

/// The kernel of a product.
type Product = Option<(Family, [usize; 2], usize, bool)>;

impl Sizes {
    /// Those of a plan, with at least so many matrices.
    fn planned(draw: &mut Draw, least: usize) -> Self {
        let by = if draw.planned("aligned", 2) { 8 } else { 1 };
        let budget = if draw.planned("large", 16) { 1 << 22 } else { 1 << 19 };
        let inputs = draw.planned_size("around-inputs", 1..=400).next_multiple_of(by);
        let outputs = draw.planned_size("around-outputs", 1..=400).next_multiple_of(by);
        let outer = if least == 1 { 1 } else { draw.planned_size("outer", least..=5) };
        let most = budget / (inputs * outputs * outer);
        let rows = draw.planned_size("around-rows", 1..=most.clamp(1, 1500));
        Self { outer, rows, inputs, outputs }
    }

    /// Others of the same classes.
    fn alike(self, draw: &mut Draw) -> Self {
        let rows = draw.size_in_class("rows", self.rows);
        let inputs = draw.size_in_class("inputs", self.inputs);
        let outputs = draw.size_in_class("outputs", self.outputs);
        Self { rows, inputs, outputs, ..self }
    }

    /// The kernels of the three products, as far as sizes decide on them.
    fn products(self, on: &Target, storage: Storage) -> [Product; 3] {
        let Self { outer, rows, inputs, outputs } = self;
        let rows = outer * rows;
        [[rows, inputs, outputs], [rows, outputs, inputs], [inputs, rows, outputs]].map(
            |[m, k, n]| {
                let (lhs, rhs) = ([m, k], [k, n]);
                let dtype = dtype(storage);
                let problem = MatmulProblem::new(
                    TensorLayout { shape: &lhs, strides: &[k, 1], dtype },
                    TensorLayout { shape: &rhs, strides: &[n, 1], dtype },
                    dtype,
                    F32Precision::Tf32,
                );
                let plan =
                    MatmulBlueprint::plan(&problem.ok()?, &Epilogue::default(), &on.kernels.client);
                let MatmulBlueprint { family, tile_m, tile_n, stages, splits, .. } = plan.ok()?;
                Some((family, [tile_m, tile_n], stages, splits > 1))
            },
        )
    }
}

/// The numbers in `tensor`.
fn values<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f64>, Stop> {
    tensors::values(tensor)
        .map_err(|error| Stop::Wrong(error.message().unwrap_or("no message").into()))
}

/// The input as `view` makes it, and its numbers in the order of its indices.
fn input<const D: usize>(
    draw: &mut Draw,
    case: &Case,
    shape: [usize; D],
    device: &Device,
) -> (Tensor<D>, Vec<f64>) {
    let storage = case.storage;
    let count = shape.iter().product();
    let [rows, columns] = [shape[D - 2], shape[D - 1]];
    let spoil = |draw: &mut Draw, x: &mut [f64]| match case.activation {
        // Burn's ReLU passes the gradient of NaN on.
        Activation::Relu => draw.spoil_by("x", x, &[f64::INFINITY, f64::NEG_INFINITY]),
        _ => draw.spoil("x", x),
    };
    match case.view {
        View::Whole => {
            let mut x = draw.normal(count, 1.0, storage);
            spoil(draw, &mut x);
            (tensor(&x, shape, storage, device), x)
        }
        View::Swapped => {
            let mut x = draw.normal(count, 1.0, storage);
            spoil(draw, &mut x);
            let mut swapped = shape;
            swapped.swap(D - 2, D - 1);
            let mut memory = vec![0.0; count];
            for (place, value) in x.iter().enumerate() {
                let (matrix, at) = (place / (rows * columns), place % (rows * columns));
                memory[matrix * rows * columns + at % columns * rows + at / columns] = *value;
            }
            (tensor(&memory, swapped, storage, device).swap_dims(D - 2, D - 1), x)
        }
        View::Narrowed => {
            let [front, behind] = case.gaps;
            let width = front + columns + behind;
            let mut wider = shape;
            wider[D - 1] = width;
            let x = draw.normal(count, 1.0, storage);
            let mut memory = vec![1e3; count / columns * width];
            for (row, values) in memory.chunks_mut(width).zip(x.chunks(columns)) {
                row[front..front + columns].copy_from_slice(values);
            }
            (tensor(&memory, wider, storage, device).narrow(D - 1, front, columns), x)
        }
        View::Repeated => {
            let mut one = shape;
            one[0] = 1;
            let x = draw.normal(count / shape[0], 1.0, storage);
            (tensor(&x, one, storage, device).expand(shape), x.repeat(shape[0]))
        }
    }
}

fn run<const D: usize>(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    case: &Case,
    shape: [usize; D],
) -> Result<(), Stop> {
    let Case { storage, bias, activation, outputs, .. } = *case;
    let device = on.device.clone().autodiff();
    let inputs = shape[D - 1];
    let rows: usize = shape[..D - 1].iter().product();
    let deviation = (inputs as f64).sqrt().recip();
    let weight = draw.normal(inputs * outputs, deviation, storage);
    let bias = bias.then(|| draw.normal(outputs, 1.0, storage));
    let param =
        |values: &[f64]| Param::from_tensor(tensor(values, [values.len()], storage, &device));
    let layer = Layer {
        weight: Param::from_tensor(tensor(&weight, [inputs, outputs], storage, &device)),
        bias: bias.as_deref().map(param),
    };
    let (x_tensor, x) = input(draw, case, shape, &device);
    let x_tensor = x_tensor.require_grad();
    let mut out_shape = shape;
    out_shape[D - 1] = outputs;
    let dy = draw.normal(rows * outputs, 1.0, storage);
    let factors: Tensor<D> = tensor(&dy, out_shape, storage, &device);

    let z = layer.forward(x_tensor.clone());
    let y = match activation {
        Activation::Gelu => gelu(z),
        Activation::Relu => relu(z),
        _ => z,
    };
    // The gradient of this sum by the output is `factors`.
    let gradients = (y.clone() * factors).sum().backward();
    let missing = |what: &str| format!("{what} has no gradient");
    let dx = x_tensor.grad(&gradients).ok_or_else(|| missing("the input"))?;
    let dw = layer.weight.grad(&gradients).ok_or_else(|| missing("the weight"))?;
    let db = layer.bias.as_ref().map(|b| b.grad(&gradients).ok_or_else(|| missing("the bias")));
    let (y, dx, dw) = (values(y.inner())?, values(dx)?, values(dw)?);
    let db = db.transpose()?.map(values).transpose()?;

    let exact =
        Linear { rows, inputs, outputs, x: &x, weight: &weight, bias: bias.as_deref(), activation };
    let precision = LinearPrecision {
        product: on.kernels.product(storage),
        // What an activation reads is stored for backward.
        z: if activation == Activation::Identity { Storage::F32 } else { storage },
        dz: storage,
        functions: on.kernels.functions(),
    };
    let forward = exact.forward();
    let mut bounds = exact.forward_bounds(&forward, &precision);
    for (i, z) in forward.z.iter().enumerate() {
        // The product was stored before the bias came.
        let product = z - bias.as_ref().map_or(0.0, |bias| bias[i % outputs]);
        bounds.z[i] +=
            storage.unit_roundoff() * (product.abs() + bounds.z[i]) + storage.underflow();
        bounds.y[i] = activation.value_bound(*z, bounds.z[i], storage, precision.functions);
    }
    check.compare("y", y, &forward.y, &bounds.y)?;
    if activation == Activation::Relu && forward.z.iter().any(|z| z.is_nan()) {
        // Of an infinity times a weight of zero.
        return Ok(());
    }
    let z_bounds: Vec<f64> = match activation {
        // Nothing of z reaches the gradients.
        Activation::Identity => vec![0.0; forward.z.len()],
        Activation::Gelu => {
            // What moves the slope as far as its own error.
            let moved = |z: f64| {
                slope_bound(z, storage, precision.functions.tanh)
                    / activation.steepest_derivative_slope()
            };
            forward.z.iter().zip(&bounds.z).map(|(z, bound)| bound + moved(*z)).collect()
        }
        _ => bounds.z,
    };
    let gradients = exact.backward(&forward.z, &dy);
    let bounds = exact.backward_bounds(&forward.z, &z_bounds, &dy, &gradients, &precision);
    check.compare("dx", dx, &gradients.dx, &bounds.dx)?;
    check.compare("dw", dw, &gradients.dw, &bounds.dw)?;
    match db {
        Some(db) => check.compare("db", db, &gradients.db, &bounds.db),
        None => Ok(()),
    }
}
