//! Normalization of rows and its gradients on the device, against f64.

#[path = "layer_norm_compare.rs"]
mod compared;
#[path = "layer_norm_op.rs"]
mod op;

use crate::dropout;
use blackburn_kernels::{
    KernelError, Pass,
    buffer::Buffer,
    dropout::DropoutMask,
    layer_norm::{
        LayerNormBlueprint, LayerNormGradients, LayerNormInputs, LayerNormOutput, LayerNormProblem,
        LayerNormSaved, LayerNormWanted, Norm, layer_norm_backward, layer_norm_forward,
        variants::WIDTHS,
    },
};
use blackburn_reference::{
    layer_norm::{Arithmetic, LayerNorm, Norm as ReferenceNorm},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::buffers::{download, dtype, largest_magnitude, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// (rows, width) beside those whose machine code is checked: one element; around vectors of 4 and 8; a plane's
/// row; a cube's with a vector more; rows around what a cube has at once and what the device has.
const SHAPES: [(usize, usize); 11] = [
    (1, 1),
    (5, 1),
    (3, 7),
    (17, 8),
    (65, 9),
    (2, 31),
    (33, 64),
    (1, 768),
    (19, 768),
    (3, 1025),
    (2500, 24),
];

const EPSILON: f64 = 1e-5;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = |what: &str| format!("layer_norm::{what}_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name("every_shape_is_within_bounds"), move || {
            on_device_with(dtype(storage), |client| {
                let shapes = SHAPES.into_iter().chain(WIDTHS.map(|width| (5, width)));
                let (mut asked, mut seen) = (0, 0);
                for (rows, width) in shapes {
                    let layer = Case { rows, width, ..Case::plain(storage) };
                    let rms = Case { norm: Norm::Rms, bias: false, ..layer };
                    for case in [layer, rms] {
                        asked += 1;
                        seen += usize::from(case.check(client)?);
                    }
                }
                // All but the two widest of each, which are more than a cube holds backward.
                if seen < asked - 4 { Err("few shapes were served".into()) } else { Ok(()) }
            })
        }));
        trials.push(Trial::ignorable_test(name("every_variant_is_within_bounds"), move || {
            on_device_with(dtype(storage), |client| every_variant(client, storage))
        }));
    }
    trials.extend([
        Trial::ignorable_test("layer_norm::a_large_mean_loses_no_digits", || {
            on_device(|client| {
                let case = Case { offset: 1000.0, ..Case::plain(Storage::F32) };
                case.check(client).map(drop)
            })
        }),
        Trial::ignorable_test("layer_norm::rows_beyond_the_grid_are_normalized", || {
            on_device(beyond_the_grid)
        }),
        Trial::ignorable_test("layer_norm::planted_faults_are_caught", || on_device(faults)),
        Trial::ignorable_test("layer_norm::a_nan_stays_in_its_row", || on_device(nan)),
        Trial::ignorable_test("layer_norm::no_rows_give_gradients_of_zero", || on_device(no_rows)),
        Trial::ignorable_test("layer_norm::repeated_runs_give_the_same_bits", || {
            on_device(repeats)
        }),
        Trial::ignorable_test("layer_norm::bad_arguments_are_named", || on_device(bad_arguments)),
    ]);
    trials.extend(op::trials());
    trials
}

/// A problem with its numbers' seed.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    width: usize,
    storage: Storage,
    parameter: Storage,
    norm: Norm,
    bias: bool,
    residual: bool,
    /// With a bias of the residual, where there is one, and magnitudes.
    extended: bool,
    /// The share of the residual that is left out.
    dropout: Option<f64>,
    /// Is added to x.
    offset: f64,
}

/// Its numbers, here.
struct Numbers {
    x: Vec<f64>,
    residual: Vec<f64>,
    residual_bias: Vec<f64>,
    gamma: Vec<f64>,
    beta: Vec<f64>,
    dy: Vec<f64>,
    dsum: Vec<f64>,
}

/// What the device made of it, here: `x` is what was normalized.
struct Results {
    x: Vec<f64>,
    y: Vec<f64>,
    gradients: [Vec<f64>; 3],
    /// With dropout.
    dresidual: Option<Vec<f64>>,
    /// Of the residual's bias, if it has one.
    dbias: Option<Vec<f64>>,
    /// Of y and of the residual's gradient, if asked for.
    magnitudes: Option<[f64; 2]>,
}

impl Case {
    fn plain(storage: Storage) -> Self {
        Self {
            rows: 19,
            width: 136,
            storage,
            parameter: storage,
            norm: Norm::Layer,
            bias: true,
            residual: false,
            extended: false,
            dropout: None,
            offset: 0.0,
        }
    }

    fn numbers(&self) -> Numbers {
        let Self { rows, width, storage, parameter, .. } = *self;
        let rows_of = |seed| normal(seed, rows * width, 1.0, storage);
        let x = rows_of(1).into_iter().map(|x| storage.round(x + self.offset)).collect();
        Numbers {
            x,
            residual: rows_of(2),
            residual_bias: normal(7, width, 1.0, parameter),
            gamma: normal(3, width, 1.0, parameter),
            beta: normal(4, width, 1.0, parameter),
            dy: rows_of(5),
            dsum: rows_of(6),
        }
    }

    fn has_residual_bias(&self) -> bool {
        self.residual && self.extended
    }

    /// What is added to x.
    fn addends(&self, numbers: &Numbers) -> Vec<f64> {
        let biases = numbers.residual_bias.iter().cycle();
        let biased = |(residual, bias): (&f64, &f64)| match self.has_residual_bias() {
            true => residual + bias,
            false => *residual,
        };
        let biased = numbers.residual.iter().zip(biases).map(biased);
        biased.zip(self.factors()).map(|(addend, factor)| addend * factor).collect()
    }

    fn mask(&self) -> Option<DropoutMask> {
        self.dropout.map(|rate| DropoutMask { rate, seed: dropout::SEED, key: None })
    }

    /// What each element of the residual is multiplied by.
    fn factors(&self) -> Vec<f64> {
        let elements = self.rows * self.width;
        self.dropout.map_or(vec![1.0; elements], |rate| dropout::factors(elements, rate))
    }

    fn op<'a>(&self, numbers: &'a Numbers) -> LayerNorm<'a> {
        LayerNorm {
            norm: match self.norm {
                Norm::Layer => ReferenceNorm::Layer,
                Norm::Rms => ReferenceNorm::Rms,
            },
            gamma: &numbers.gamma,
            beta: self.bias.then_some(&numbers.beta),
            epsilon: EPSILON,
        }
    }

    fn arithmetic(&self, client: &Client, pass: Pass) -> Result<Arithmetic, KernelError> {
        let Self { rows, width, norm, bias, residual, .. } = *self;
        let (dtype, parameter) = (dtype(self.storage), dtype(self.parameter));
        let problem = LayerNormProblem {
            norm,
            rows,
            width,
            dtype,
            parameter,
            bias,
            residual,
            parts: false,
            scaled: true,
            residual_bias: self.has_residual_bias(),
            watched: self.extended,
        };
        let additions = LayerNormBlueprint::plan(&problem, pass, client)?.additions();
        Ok(Arithmetic { rows: self.storage, parameters: self.parameter, additions })
    }

    fn inputs(&self, client: &Client, numbers: &Numbers) -> LayerNormInputs {
        LayerNormInputs {
            x: upload(client, &numbers.x, self.storage),
            residual: self.residual.then(|| upload(client, &numbers.residual, self.storage)),
            residual_bias: self
                .has_residual_bias()
                .then(|| upload(client, &numbers.residual_bias, self.parameter)),
            dropout: self.mask(),
            gamma: upload(client, &numbers.gamma, self.parameter),
            beta: self.bias.then(|| upload(client, &numbers.beta, self.parameter)),
            watched: self.extended,
        }
    }

    fn run(&self, client: &Client, numbers: &Numbers) -> Result<Results, Failed> {
        let inputs = self.inputs(client, numbers);
        let LayerNormOutput { y, sum, mean, rstd, magnitudes } =
            layer_norm_forward(client, self.norm, &inputs, EPSILON)?;
        let x = sum.unwrap_or(inputs.x);
        let dropout = self.mask();
        let saved = LayerNormSaved { x: x.clone(), gamma: inputs.gamma, mean, rstd, dropout };
        let dy = upload(client, &numbers.dy, self.storage);
        let dsum = self.residual.then(|| upload(client, &numbers.dsum, self.storage));
        let wanted = LayerNormWanted {
            beta: self.bias,
            residual_bias: self.has_residual_bias(),
            watched: self.extended,
        };
        let gradients = layer_norm_backward(client, self.norm, &saved, &dy, dsum.as_ref(), wanted)?;
        let magnitudes = match (magnitudes, gradients.magnitudes) {
            (Some(of_y), Some(of_gradient)) => {
                Some([largest_magnitude(client, &of_y)?, largest_magnitude(client, &of_gradient)?])
            }
            (None, None) => None,
            other => return Err(format!("of both passes one has magnitudes: {other:?}").into()),
        };
        let LayerNormGradients { dx, dresidual, dgamma, dbeta, dbias, .. } = gradients;
        let rows = |buffer| download(client, buffer, self.storage);
        let parameter = |buffer| download(client, buffer, self.parameter);
        let dbeta = dbeta.map_or(Ok(Vec::new()), parameter)?;
        let gradients = [rows(dx)?, parameter(dgamma)?, dbeta];
        let dresidual = dresidual.map(rows).transpose()?;
        let dbias = dbias.map(parameter).transpose()?;
        Ok(Results { x: rows(x)?, y: rows(y)?, gradients, dresidual, dbias, magnitudes })
    }

    /// Whether the device serves it; if it does, whether results are within bounds.
    fn check(&self, client: &Client) -> Result<bool, Failed> {
        match self.arithmetic(client, Pass::Backward) {
            Err(KernelError::Unsupported { .. }) => return Ok(false),
            other => drop(other?),
        }
        let numbers = self.numbers();
        let results = self.run(client, &numbers)?;
        self.compare(client, &numbers, &results)
            .map_err(|error| format!("{self:?}: {}", error.message().unwrap_or("")))?;
        Ok(true)
    }
}

fn every_variant(client: &Client, storage: Storage) -> Result<(), Failed> {
    let plain = Case::plain(storage);
    for norm in [Norm::Layer, Norm::Rms] {
        for (bias, residual) in [(false, false), (false, true), (true, false), (true, true)] {
            for parameter in [Storage::F32, storage] {
                for (rows, width) in [(70, 36), (6, 1160)] {
                    let without = Case { rows, width, parameter, norm, bias, residual, ..plain };
                    let with = Case { dropout: Some(0.1), ..without };
                    let plain = [without].into_iter().chain(residual.then_some(with));
                    let extended = plain.clone().map(|case| Case { extended: true, ..case });
                    for case in plain.chain(extended) {
                        if !case.check(client)? {
                            return Err(format!("{case:?} was declined").into());
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// More rows than the largest grid of WebGPU has at once: cubes come back for the others.
fn beyond_the_grid(client: &Client) -> Result<(), Failed> {
    const CUBES: usize = 65_535;
    const WIDTH: usize = 2;
    let case = Case { width: WIDTH, ..Case::plain(Storage::F32) };
    let problem = LayerNormProblem {
        norm: case.norm,
        rows: CUBES,
        width: WIDTH,
        dtype: dtype(case.storage),
        parameter: dtype(case.parameter),
        bias: true,
        residual: false,
        parts: false,
        scaled: true,
        residual_bias: false,
        watched: false,
    };
    let plan = LayerNormBlueprint::plan(&problem, Pass::Forward, client)?;
    let case = Case { rows: (CUBES + 1) * plan.rows as usize + 1, ..case };
    let numbers = case.numbers();
    let LayerNormOutput { y, .. } =
        layer_norm_forward(client, case.norm, &case.inputs(client, &numbers), EPSILON)?;
    let y = download(client, y, case.storage)?;
    let how = case.arithmetic(client, Pass::Forward)?;
    let op = case.op(&numbers);
    compare(&y, &op.forward(&numbers.x), &op.forward_bounds(&numbers.x, how))?;
    Ok(())
}

/// The negative control: one result a little off, and a row that the sums leave out, must not pass.
fn faults(client: &Client) -> Result<(), Failed> {
    let case = Case { residual: true, dropout: Some(0.5), ..Case::plain(Storage::F32) };
    let numbers = case.numbers();
    let is_caught = |what: &str, fault: &dyn Fn(&mut Results)| {
        let mut results = case.run(client, &numbers)?;
        case.compare(client, &numbers, &results)?;
        fault(&mut results);
        match case.compare(client, &numbers, &results) {
            Err(_) => Ok(()),
            Ok(()) => Err(Failed::from(format!("{what}: a fault went unseen"))),
        }
    };
    let last = case.rows * case.width - 1;
    let last_dy = numbers.dy[last];
    is_caught("sum", &|results| results.x[last] *= 1.001)?;
    is_caught("y", &|results| results.y[last] *= 1.001)?;
    is_caught("dx", &|results| results.gradients[0][last] *= 1.001)?;
    is_caught("dresidual", &|results| results.dresidual = Some(results.gradients[0].clone()))?;
    is_caught("dx without dsum", &|results| results.gradients[0][last] -= numbers.dsum[last])?;
    is_caught("dgamma", &|results| results.gradients[1][case.width - 1] *= 1.001)?;
    is_caught("dbeta", &|results| results.gradients[2][case.width - 1] -= last_dy)
}

fn nan(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(Storage::F32);
    let mut numbers = case.numbers();
    let spoiled = 3;
    numbers.x[spoiled * case.width + 77] = f64::NAN;
    let results = case.run(client, &numbers)?;
    for (what, values) in [("y", &results.y), ("dx", &results.gradients[0])] {
        for (row, values) in values.chunks_exact(case.width).enumerate() {
            let is_right = if row == spoiled {
                values.iter().all(|value| value.is_nan())
            } else {
                values.iter().all(|value| value.is_finite())
            };
            if !is_right {
                return Err(format!("row {row} of {what} beside a NaN in row {spoiled}").into());
            }
        }
    }
    if results.gradients[1].iter().any(|value| value.is_finite()) {
        return Err("a NaN row left a finite sum of its products".into());
    }
    Ok(())
}

fn no_rows(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 0, residual: true, ..Case::plain(Storage::F32) };
    let results = case.run(client, &case.numbers())?;
    let [dx, dgamma, dbeta] = &results.gradients;
    let zeros = vec![0.0; case.width];
    if !results.y.is_empty() || !dx.is_empty() || *dgamma != zeros || *dbeta != zeros {
        return Err("no rows gave something else than no rows and zeros".into());
    }
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let case = Case { rows: 2500, width: 24, ..Case::plain(Storage::F32) };
    let numbers = case.numbers();
    let first = case.run(client, &numbers)?;
    for _ in 0..3 {
        let again = case.run(client, &numbers)?;
        if again.y != first.y || again.gradients != first.gradients {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let case = Case::plain(Storage::F32);
    let numbers = case.numbers();
    let inputs = case.inputs(client, &numbers);
    let forward = |inputs: &LayerNormInputs| layer_norm_forward(client, case.norm, inputs, EPSILON);
    let short = || upload(client, &numbers.x[1..], Storage::F32);
    let mask = |rate| Some(DropoutMask { rate, seed: 1, key: None });
    let refused = [
        ("x", forward(&LayerNormInputs { x: short(), ..inputs.clone() })),
        ("residual", forward(&LayerNormInputs { residual: Some(short()), ..inputs.clone() })),
        ("beta", forward(&LayerNormInputs { beta: Some(short()), ..inputs.clone() })),
        (
            "residual_bias",
            forward(&LayerNormInputs {
                residual: Some(inputs.x.clone()),
                residual_bias: Some(short()),
                ..inputs.clone()
            }),
        ),
        (
            "residual",
            forward(&LayerNormInputs {
                residual_bias: Some(inputs.gamma.clone()),
                ..inputs.clone()
            }),
        ),
        ("rate", forward(&LayerNormInputs { dropout: mask(1.0), ..inputs.clone() })),
        (
            "residual",
            forward(&LayerNormInputs { residual: None, dropout: mask(0.1), ..inputs.clone() }),
        ),
        ("epsilon", layer_norm_forward(client, case.norm, &inputs, -1.0)),
    ];
    for (name, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a wrong {name} gave {other:?}").into()),
        }
    }
    let LayerNormOutput { mean, rstd, .. } = forward(&inputs)?;
    let LayerNormInputs { x, gamma, .. } = inputs.clone();
    let saved = LayerNormSaved { x, gamma, mean, rstd, dropout: None };
    let backward = |saved: &LayerNormSaved, dy: &Buffer| {
        let wanted = LayerNormWanted { beta: true, ..LayerNormWanted::default() };
        layer_norm_backward(client, case.norm, saved, dy, None, wanted)
    };
    let refused = [
        ("dy", backward(&saved, &short())),
        ("mean", backward(&LayerNormSaved { mean: None, ..saved.clone() }, &inputs.x)),
        ("rstd", backward(&LayerNormSaved { rstd: short(), ..saved.clone() }, &inputs.x)),
    ];
    for (name, result) in refused {
        match result {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a wrong {name} gave {other:?}").into()),
        }
    }
    let wide = 1 << 20;
    let wide = LayerNormInputs {
        x: Buffer::empty(client, wide, dtype(Storage::F32)),
        residual: None,
        residual_bias: None,
        dropout: None,
        gamma: Buffer::empty(client, wide, dtype(Storage::F32)),
        beta: None,
        watched: false,
    };
    match forward(&wide) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("a row of a million elements gave {other:?}").into()),
    }
}
