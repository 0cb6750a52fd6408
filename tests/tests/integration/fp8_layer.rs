//! A linear layer to compute in 8 bits: its numbers, what it gives in f64, and how far off a device may be.

use blackburn::fp8::{Format, Promotion, Recipe, Scaling};
use blackburn_reference::{
    activation::{Activation, FunctionErrors},
    column_sum,
    fp8::Fp8,
    linear::{Linear, LinearGradients},
    matmul::{MatmulCase, MatmulPrecision, magnitudes},
    mx::{MxMatrix, ScaleRule},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::tensors::{float, tensor, values};
use burn::prelude::*;
use libtest_mimic::Failed;

fn reference_format(format: Format) -> Fp8 {
    match format {
        Format::E4m3 => Fp8::E4m3,
        Format::E5m2 => Fp8::E5m2,
    }
}

/// A matrix that products read in 8 bits, whose elements are known to within errors.
struct Operand<'a> {
    values: &'a [f64],
    errors: &'a [f64],
    columns: usize,
    format: Format,
}

/// What a product sums along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Along {
    Rows,
    Columns,
}

impl Operand<'_> {
    /// What it is in 8 bits, for a product along its rows or columns, and how far off that may be.
    fn rounded(
        &self,
        along: Along,
        recipe: Recipe,
        storage: Storage,
        device: &Device,
    ) -> (Vec<f64>, Vec<f64>) {
        let format = reference_format(self.format);
        if recipe.scaling == Scaling::Tensor {
            return format.stored(self.values, self.errors, recipe.margin);
        }
        assert!(self.errors.iter().all(|error| *error == 0.0), "blocks of what is not known");
        let columns = self.columns;
        let rows = self.values.len() / columns;
        let quantize =
            |values: &[f64], columns| MxMatrix::quantize_by(ScaleRule::Up, values, columns, format);
        let mut values = match along {
            Along::Rows => quantize(self.values, columns).decode(),
            Along::Columns => {
                let turned = quantize(&transposed(self.values, columns), rows).decode();
                transposed(&turned, rows)
            }
        };
        // GPUs without such products have the numbers in 16 bits again, which f16 lacks the range for.
        if storage == Storage::F16 && *device != Device::flex() {
            values.iter_mut().for_each(|value| *value = storage.round(*value));
        }
        (values, self.errors.to_vec())
    }
}

/// The transpose of rows of so many columns.
pub(super) fn transposed(values: &[f64], columns: usize) -> Vec<f64> {
    let rows = values.len() / columns;
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// Numbers for a layer.
pub(super) struct Case {
    /// Rows, inputs, outputs.
    pub(super) shape: [usize; 3],
    pub(super) x: Vec<f64>,
    pub(super) weight: Vec<f64>,
    pub(super) bias: Vec<f64>,
    pub(super) dy: Vec<f64>,
}

/// What a layer computes.
pub(super) struct Results {
    pub(super) y: Vec<f64>,
    pub(super) dx: Vec<f64>,
    pub(super) dw: Vec<f64>,
    pub(super) db: Vec<f64>,
}

/// What one of a layer's results is, and how far off a device may be.
pub(super) struct Expected {
    name: &'static str,
    values: Vec<f64>,
    bounds: Vec<f64>,
}

impl Case {
    pub(super) fn new(shape: [usize; 3], storage: Storage) -> Self {
        let [rows, inputs, outputs] = shape;
        let weight_deviation = (inputs as f64).sqrt().recip();
        Self {
            shape,
            x: normal(1, rows * inputs, 1.0, storage),
            weight: normal(2, inputs * outputs, weight_deviation, storage),
            bias: normal(3, outputs, 1.0, storage),
            // Gradients are small.
            dy: normal(4, rows * outputs, 1e-3, storage),
        }
    }

    /// What `forward` makes of x, weight and bias, and its gradients.
    pub(super) fn run(
        &self,
        device: &Device,
        storage: Storage,
        forward: impl Fn(Tensor<2>, Tensor<2>, Tensor<1>) -> Tensor<2>,
    ) -> Result<Results, Failed> {
        let [rows, inputs, outputs] = self.shape;
        let device = &device.clone().autodiff();
        let x = tensor(&self.x, [rows, inputs], storage, device).require_grad();
        let weight = tensor(&self.weight, [inputs, outputs], storage, device).require_grad();
        let bias = tensor(&self.bias, [outputs], storage, device).require_grad();
        let y = forward(x.clone(), weight.clone(), bias.clone());
        let out = y.dtype();
        // In f32, so that the gradient that arrives is dy itself.
        let dy = tensor(&self.dy, [rows, outputs], Storage::F32, device);
        let gradients = (y.clone().cast(float(Storage::F32)) * dy).sum().backward();
        if out != x.dtype() {
            return Err(format!("y is {out:?}").into());
        }
        let missing = "a gradient is missing";
        Ok(Results {
            y: values(y.inner())?,
            dx: values(x.grad(&gradients).ok_or(missing)?)?,
            dw: values(weight.grad(&gradients).ok_or(missing)?)?,
            db: values(bias.grad(&gradients).ok_or(missing)?)?,
        })
    }

    /// The layer, with operands of these values.
    fn layer<'a>(&self, x: &'a [f64], weight: &'a [f64], bias: &'a [f64]) -> Linear<'a> {
        let [rows, inputs, outputs] = self.shape;
        let activation = Activation::Identity;
        Linear { rows, inputs, outputs, x, weight, bias: Some(bias), activation }
    }

    /// `y` and the gradients of the operands as they are, which nothing rounds to 8 bits.
    pub(super) fn exact(&self, end: End) -> (Vec<f64>, LinearGradients) {
        let layer = self.layer(&self.x, &self.weight, &self.bias);
        let forward = layer.forward();
        let dz = self.dy.iter().zip(&forward.z).map(|(dy, z)| dy * end.derivative(*z));
        let gradients = layer.backward(&forward.z, &dz.collect::<Vec<_>>());
        (forward.z.iter().map(|z| end.value(*z)).collect(), gradients)
    }

    /// `y`, `dx` and `dW` of the operands in 8 bits, with what a device may be off.
    ///
    /// What follows the layer makes its gradient only to within an error, which moves a code across a middle
    /// now and then: those elements' errors are carried through the products of backward.
    pub(super) fn in_eight_bits(
        &self,
        device: &Device,
        storage: Storage,
        recipe: Recipe,
        end: End,
    ) -> [Expected; 3] {
        let [_, inputs, outputs] = self.shape;
        let rounded = |(values, errors): (&[f64], &[f64]), columns, format, along| {
            let operand = Operand { values, errors, columns, format };
            operand.rounded(along, recipe, storage, device)
        };
        let known = |values, columns, along| {
            let zeros = vec![0.0; self.x.len().max(self.weight.len())];
            let errors = &zeros[..<[f64]>::len(values)];
            rounded((values, errors), columns, recipe.forward, along).0
        };
        let x = known(&self.x, inputs, Along::Rows);
        let weight = known(&self.weight, outputs, Along::Columns);
        let layer = self.layer(&x, &weight, &self.bias);
        let z = layer.forward().z;
        let forward = precision(storage, device, recipe.promotion == Promotion::Always);
        let of_z = product_bounds(&z, &layer.forward_case(), [&x, &weight], forward);
        let errors = functions(device);
        let y = z.iter().map(|z| end.value(*z)).collect();
        let of_y =
            z.iter().zip(&of_z).map(|(z, bound)| end.value_bound(*z, *bound, storage, errors));

        let of_dz =
            z.iter().zip(&of_z).zip(&self.dy).map(|((z, bound), dy)| {
                dy.abs() * end.derivative_bound(*z, *bound, storage, errors)
            });
        let dz: Vec<f64> = self.dy.iter().zip(&z).map(|(dy, z)| dy * end.derivative(*z)).collect();
        let of_dz: Vec<f64> = of_dz.collect();
        let in_rows = rounded((&dz, &of_dz), outputs, recipe.backward, Along::Rows);
        let in_columns = rounded((&dz, &of_dz), outputs, recipe.backward, Along::Columns);
        let x = known(&self.x, inputs, Along::Columns);
        let weight = known(&self.weight, outputs, Along::Rows);
        let layer = self.layer(&x, &weight, &self.bias);
        let dx = layer.backward(&z, &in_rows.0).dx;
        let dw = layer.backward(&z, &in_columns.0).dw;
        let largest = |(dz, of_dz): &(Vec<f64>, Vec<f64>)| -> Vec<f64> {
            dz.iter().zip(of_dz).map(|(dz, bound)| dz.abs() + bound).collect()
        };
        let [largest_in_rows, largest_in_columns] = [largest(&in_rows), largest(&in_columns)];
        let backward = precision(storage, device, recipe.promotion != Promotion::Never);
        let bounds = |values: &[f64], case: &MatmulCase, moved: Vec<f64>, operands| -> Vec<f64> {
            let own = product_bounds(values, case, operands, backward);
            let rounded = 1.0 + storage.unit_roundoff();
            own.iter().zip(moved).map(|(own, moved)| rounded * moved + own).collect()
        };
        let (dgrad, wgrad) = (layer.dgrad_case(), layer.wgrad_case());
        let moved = magnitudes(&dgrad, &in_rows.1, &weight);
        let of_dx = bounds(&dx, &dgrad, moved, [&largest_in_rows, &weight]);
        let moved = magnitudes(&wgrad, &x, &in_columns.1);
        let of_dw = bounds(&dw, &wgrad, moved, [&x, &largest_in_columns]);
        [
            Expected { name: "y", values: y, bounds: of_y.collect() },
            Expected { name: "dx", bounds: of_dx, values: dx },
            Expected { name: "dW", bounds: of_dw, values: dw },
        ]
    }

    /// Holds the gradient of the bias, which is not rounded to 8 bits, only to the type of y on its way,
    /// against the sum of dy.
    pub(super) fn check_bias(&self, actual: &[f64], storage: Storage) -> Result<(), Failed> {
        // Without a kernel, sums may be kept in the type itself.
        if storage != Storage::F32 {
            return Ok(());
        }
        let [rows, _, outputs] = self.shape;
        let magnitudes: Vec<f64> = self.dy.iter().map(|dy| dy.abs()).collect();
        let db = column_sum::column_sum(&self.dy, 1, rows, outputs);
        let bounds: Vec<f64> = db
            .iter()
            .zip(column_sum::column_sum(&magnitudes, 1, rows, outputs))
            .map(|(db, magnitude)| column_sum::bound(*db, magnitude, rows, storage))
            .collect();
        compare(actual, &db, &bounds).map_err(|error| format!("db: {error}"))?;
        Ok(())
    }
}

impl Expected {
    /// Whether `actual` is within bounds, and nearer to the operands in 8 bits than to those as they are: where
    /// tensor cores keep few bits of long sums, bounds alone do not tell the two apart.
    pub(super) fn check(&self, actual: &[f64], exact: &[f64]) -> Result<(), Failed> {
        compare(actual, &self.values, &self.bounds)
            .map_err(|error| format!("{}: {error}", self.name))?;
        let distance = |other: &[f64]| -> f64 {
            let squares = actual.iter().zip(other).map(|(a, b)| (a - b) * (a - b));
            squares.sum::<f64>().sqrt()
        };
        let (here, there) = (distance(&self.values), distance(exact));
        if 2.0 * here < there {
            return Ok(());
        }
        let name = self.name;
        Err(format!("{name} is {here:e} from that of 8 bits, and {there:e} from the exact one")
            .into())
    }
}

/// Holds each of the results against what 8 bits give.
pub(super) fn check(
    actual: &Results,
    expected: &[Expected; 3],
    (y, gradients): &(Vec<f64>, LinearGradients),
) -> [Result<(), Failed>; 3] {
    let [of_y, of_dx, of_dw] = expected;
    [
        of_y.check(&actual.y, y),
        of_dx.check(&actual.dx, &gradients.dx),
        of_dw.check(&actual.dw, &gradients.dw),
    ]
}

/// What is done to the output z of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing.
    Plain,
    /// `act(z) + z`
    Residual(Activation),
}

impl End {
    fn value(self, z: f64) -> f64 {
        match self {
            Self::Plain => z,
            Self::Residual(activation) => activation.value(z) + z,
        }
    }

    fn derivative(self, z: f64) -> f64 {
        match self {
            Self::Plain => 1.0,
            Self::Residual(activation) => activation.derivative(z) + 1.0,
        }
    }

    /// How far off the value may be where z is to within `z_bound`, which has the rounding to storage.
    fn value_bound(self, z: f64, z_bound: f64, storage: Storage, errors: FunctionErrors) -> f64 {
        match self {
            Self::Plain => z_bound,
            Self::Residual(activation) => {
                let moved = z_bound + activation.value_bound(z, z_bound, storage, errors);
                moved
                    + storage.unit_roundoff() * (self.value(z).abs() + moved)
                    + storage.underflow()
            }
        }
    }

    /// How far off the derivative may be. Zero, one and two times the gradient are exact, those of GELU and the
    /// sum with the residual's are rounded. Burn differentiates GELU's tanh form, where no kernel takes over.
    fn derivative_bound(
        self,
        z: f64,
        z_bound: f64,
        storage: Storage,
        errors: FunctionErrors,
    ) -> f64 {
        match self {
            Self::Plain => 0.0,
            Self::Residual(Activation::Relu) => f64::from(z.abs() <= z_bound),
            Self::Residual(activation) => {
                let other = match activation {
                    Activation::Gelu => Activation::GeluTanh,
                    other => other,
                };
                let moved = activation.derivative_bound(z, z_bound, errors)
                    + other.derivative_bound(z, z_bound, errors)
                    + (activation.derivative(z) - other.derivative(z)).abs();
                moved + 3.0 * storage.unit_roundoff() * (self.derivative(z).abs() + 1.0 + moved)
            }
        }
    }
}

fn on_cuda(device: &Device) -> bool {
    let is_asked = std::env::var("BLACKBURN_REQUIRE_DEVICE").is_ok_and(|name| name == "cuda");
    is_asked && *device != Device::flex()
}

fn functions(device: &Device) -> FunctionErrors {
    if on_cuda(device) { FunctionErrors::CUDA } else { FunctionErrors::PORTABLE }
}

/// What the device adds in: 8-bit tensor cores, or f32.
fn precision(storage: Storage, device: &Device, promoted: bool) -> MatmulPrecision {
    if on_cuda(device) {
        MatmulPrecision::fp8(storage, promoted.then_some(128))
    } else {
        MatmulPrecision::exact(storage)
    }
}

/// How far off a product of operands in 8 bits may be. Scales are f32, so three more factors are off by up to
/// 2.5 units in the last place each.
fn product_bounds(
    expected: &[f64],
    case: &MatmulCase,
    [lhs, rhs]: [&[f64]; 2],
    precision: MatmulPrecision,
) -> Vec<f64> {
    const SCALES: f64 = 16.0;
    let magnitudes = magnitudes(case, lhs, rhs);
    precision
        .bounds(expected, &magnitudes, case.k + 1)
        .iter()
        .zip(magnitudes)
        .map(|(bound, magnitude)| bound + SCALES * Storage::F32.unit_roundoff() * magnitude)
        .collect()
}
