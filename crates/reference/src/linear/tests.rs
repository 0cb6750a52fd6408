use super::*;
use crate::{gradcheck::check_derivative, random::normal, tolerance::compare};

const SHAPE: [usize; 3] = [7, 5, 6];

struct Tensors {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    dy: Vec<f64>,
}

fn tensors([rows, inputs, outputs]: [usize; 3], storage: Storage) -> Tensors {
    Tensors {
        x: normal(1, rows * inputs, 1.0, storage),
        weight: normal(2, inputs * outputs, 0.5, storage),
        bias: normal(3, outputs, 0.5, storage),
        dy: normal(4, rows * outputs, 1.0, storage),
    }
}

fn layer(tensors: &Tensors, [rows, inputs, outputs]: [usize; 3], a: Activation) -> Linear<'_> {
    let Tensors { x, weight, bias, .. } = tensors;
    Linear { rows, inputs, outputs, x, weight, bias: Some(bias), activation: a }
}

/// `values` with another one at `i`.
fn with(values: &[f64], i: usize, value: f64) -> Vec<f64> {
    let mut values = values.to_vec();
    values[i] = value;
    values
}

#[test]
fn a_layer_worked_by_hand_comes_out() {
    let y = linear([1, 2, 2], &[1.0, 2.0], &[3.0, 4.0, 5.0, 6.0], Some(&[0.5, -20.0]));
    assert_eq!(y, [13.5, -4.0]);
    let layer = Linear {
        rows: 1,
        inputs: 2,
        outputs: 2,
        x: &[1.0, 2.0],
        weight: &[3.0, 4.0, 5.0, 6.0],
        bias: Some(&[0.5, -20.0]),
        activation: Activation::Relu,
    };
    assert_eq!(layer.forward().y, [13.5, 0.0]);
    let gradients = layer.backward(&layer.forward().z, &[2.0, 7.0]);
    assert_eq!((gradients.dz, gradients.dx), (vec![2.0, 0.0], vec![6.0, 10.0]));
    assert_eq!((gradients.dw, gradients.db), (vec![2.0, 0.0, 4.0, 0.0], vec![2.0, 0.0]));
}

#[test]
fn gradients_are_those_of_central_differences() {
    let tensors = tensors(SHAPE, Storage::F32);
    for activation in Activation::ALL {
        let layer = layer(&tensors, SHAPE, activation);
        let z = layer.forward().z;
        // Away from the kink of ReLU, differences are derivatives.
        assert!(z.iter().all(|z| z.abs() > 1e-4));
        let gradients = layer.backward(&z, &tensors.dy);
        // The scalar whose gradients these are.
        let loss = |layer: Linear<'_>| -> f64 {
            layer.forward().y.iter().zip(&tensors.dy).map(|(y, dy)| y * dy).sum()
        };
        let check = |name: &str, values: &[f64], gradient: &[f64], loss: &dyn Fn(&[f64]) -> f64| {
            for i in 0..values.len() {
                check_derivative(|v| loss(&with(values, i, v)), |_| gradient[i], values[i])
                    .unwrap_or_else(|e| panic!("{activation:?}, {name} {i}: {e}"));
            }
        };
        check("dx", &tensors.x, &gradients.dx, &|x| loss(Linear { x, ..layer }));
        check("dW", &tensors.weight, &gradients.dw, &|weight| loss(Linear { weight, ..layer }));
        check("db", &tensors.bias, &gradients.db, &|b| loss(Linear { bias: Some(b), ..layer }));
    }
}

/// What a device computes that works in f32, rounds `z`, `dz` and results as `precision` says and
/// drops `dropped` rows from each sum of `dW`.
fn device(
    layer: &Linear<'_>,
    dy: &[f64],
    precision: &LinearPrecision,
    dropped: usize,
) -> (LinearForward, LinearGradients) {
    let (out, f32) = (precision.product.out, Storage::F32);
    let dot =
        |k: usize, term: &dyn Fn(usize) -> f64| (0..k).fold(0.0, |sum, p| f32.round(sum + term(p)));
    let (n, k) = (layer.outputs, layer.inputs);
    let bias = layer.bias.unwrap();
    let z: Vec<f64> = (0..layer.rows * n)
        .map(|i| {
            let sum = dot(k, &|p| layer.x[i / n * k + p] * layer.weight[p * n + i % n]);
            precision.z.round(f32.round(sum + bias[i % n]))
        })
        .collect();
    let y = z.iter().map(|z| out.round(f32.round(layer.activation.value(*z)))).collect();
    let dz: Vec<f64> = z
        .iter()
        .zip(dy)
        .map(|(z, dy)| precision.dz.round(dy * f32.round(layer.activation.derivative(*z))))
        .collect();
    let dx = (0..layer.rows * k)
        .map(|i| out.round(dot(n, &|p| dz[i / k * n + p] * layer.weight[i % k * n + p])));
    let rows = layer.rows - dropped;
    let dw =
        (0..k * n).map(|i| out.round(dot(rows, &|p| layer.x[p * k + i / n] * dz[p * n + i % n])));
    let db = (0..n).map(|j| out.round(dot(rows, &|p| dz[p * n + j])));
    let gradients = LinearGradients { dx: dx.collect(), dw: dw.collect(), db: db.collect(), dz };
    (LinearForward { z, y }, gradients)
}

fn precision(out: Storage, z: Storage) -> LinearPrecision {
    let product = MatmulPrecision::exact(out);
    LinearPrecision { product, z, dz: z, functions: FunctionErrors::CUDA }
}

const DEEP: [usize; 3] = [33, 64, 20];

#[test]
fn arithmetic_in_f32_is_within_bounds_whether_z_is_stored_or_not() {
    for storage in Storage::ALL {
        let tensors = tensors(DEEP, storage);
        for z in [Storage::F32, storage] {
            for activation in Activation::ALL {
                let layer = layer(&tensors, DEEP, activation);
                let precision = precision(storage, z);
                let forward = layer.forward();
                let (actual, actual_gradients) = device(&layer, &tensors.dy, &precision, 0);
                let bounds = layer.forward_bounds(&forward, &precision);
                compare(&actual.z, &forward.z, &bounds.z).unwrap();
                compare(&actual.y, &forward.y, &bounds.y).unwrap();

                let dy = &tensors.dy;
                let expected = layer.backward(&forward.z, dy);
                let bounds =
                    layer.backward_bounds(&forward.z, &bounds.z, dy, &expected, &precision);
                for (actual, expected, bounds) in [
                    (&actual_gradients.dz, &expected.dz, &bounds.dz),
                    (&actual_gradients.dx, &expected.dx, &bounds.dx),
                    (&actual_gradients.dw, &expected.dw, &bounds.dw),
                    (&actual_gradients.db, &expected.db, &bounds.db),
                ] {
                    compare(actual, expected, bounds)
                        .unwrap_or_else(|e| panic!("{storage:?} {z:?} {activation:?}: {e}"));
                }
            }
        }
    }
}

#[test]
fn a_dropped_row_is_out_of_the_weight_gradient_s_bounds() {
    for storage in Storage::ALL {
        let tensors = tensors(DEEP, storage);
        let layer = layer(&tensors, DEEP, Activation::Gelu);
        let precision = precision(storage, Storage::F32);
        let (forward, dy) = (layer.forward(), &tensors.dy);
        let z_bounds = layer.forward_bounds(&forward, &precision).z;
        let expected = layer.backward(&forward.z, dy);
        let bounds = layer.backward_bounds(&forward.z, &z_bounds, dy, &expected, &precision);
        let (_, actual) = device(&layer, dy, &precision, 1);
        assert!(compare(&actual.dw, &expected.dw, &bounds.dw).is_err());
        assert!(compare(&actual.db, &expected.db, &bounds.db).is_err());
        assert!(compare(&actual.dx, &expected.dx, &bounds.dx).is_ok());
    }
}

#[test]
fn a_missing_bias_and_another_activation_are_out_of_bounds() {
    let tensors = tensors(DEEP, Storage::Bf16);
    let layer = layer(&tensors, DEEP, Activation::Gelu);
    let precision = precision(Storage::Bf16, Storage::F32);
    let forward = layer.forward();
    let bounds = layer.forward_bounds(&forward, &precision);
    let bare = Linear { bias: None, ..layer }.forward();
    assert!(compare(&bare.y, &forward.y, &bounds.y).is_err());
    let silu = Linear { activation: Activation::Silu, ..layer }.forward();
    assert!(compare(&silu.y, &forward.y, &bounds.y).is_err());
}
