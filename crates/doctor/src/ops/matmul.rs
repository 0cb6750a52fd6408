//! Matrix products: layouts, batches, plans and epilogues.

use crate::{
    buffers::{download, dtype, upload, upload_behind},
    check::{Check, Stop},
    draw::Draw,
    memory::{Layout, place},
    target::Target,
};
use blackburn_kernels::{
    Family, KernelError,
    buffer::Buffer,
    matmul::{
        self as kernel, Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout,
        matmul_with,
    },
};
use blackburn_reference::{
    activation::{Activation, FunctionErrors},
    matmul::{self, Layout::RowMajor, MatmulCase, MatmulPrecision},
    storage::Storage,
};

/// How the operands of a batch lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Batch {
    /// There is one product.
    One,
    /// Matrices follow each other.
    Following,
    /// One left operand serves all.
    SharedLhs,
    /// One right operand serves all.
    SharedRhs,
    /// Heads side by side, as attention has them: two batch dimensions, of which the inner one lies inside a
    /// row.
    Heads,
}

/// What is drawn of a product.
struct Case {
    out: Storage,
    batch: [usize; 2],
    m: usize,
    n: usize,
    k: usize,
    shared: [bool; 2],
}

/// The numbers of the epilogue, and which steps there are.
struct Steps {
    alpha: f64,
    scales: Option<[f64; 2]>,
    bias: Option<Vec<f64>>,
    activation: Activation,
    kept: bool,
    residual: Option<Vec<f64>>,
    beta: f64,
}

pub(super) fn case(on: &Target, draw: &mut Draw, check: &mut Check) -> Result<(), Stop> {
    let storage = draw.plan("type", &on.storages);
    let out = if draw.planned("wide", 4) { Storage::F32 } else { storage };
    let batch = draw.plan(
        "batch",
        &[
            Batch::One,
            Batch::One,
            Batch::Following,
            Batch::SharedLhs,
            Batch::SharedRhs,
            Batch::Heads,
        ],
    );
    let turned = [draw.planned("lhs-turned", 2), draw.planned("rhs-turned", 2)];
    let step = if draw.planned("aligned", 2) { 8 } else { 1 };
    let width = if step == 8 { 8 } else { draw.plan("n-by", &[1, 2]) };
    let full = draw.planned("full", 4);
    let which = draw.plan("blueprint", &[0usize, 1, 2, 3, 4, 5, 6, 7]);
    let interleaved = draw.planned("interleaved", 4);
    // Rows of splits do not take turns.
    let split = draw.planned("split", 3) && !interleaved;

    // Multiplications: few cases are large.
    let budget = if draw.holds("large", 200) { 1 << 24 } else { 1 << 20 };
    let batches = match batch {
        Batch::One => [1, 1],
        // One matrix would have another kernel, which `One` has.
        Batch::Heads => [draw.size("outer", 1..=3), draw.size("heads", 2..=4)],
        _ => [1, draw.size("batch", 2..=6)],
    };
    let m = draw.multiple("m", 1..=520, step);
    let n = draw.divided("n", 1..=520, width);
    let rest = budget / (m * n * batches[0] * batches[1]);
    let k = draw.multiple("k", 1..=rest.clamp(1, 4096), step);
    let shared = [batch == Batch::SharedLhs, batch == Batch::SharedRhs];
    let case = Case { out, batch: batches, m, n, k, shared };

    let padding = draw.one_of("padding", &[0, 0, step, 3 * step]);
    let layout = |[rows, columns]: [usize; 2], turned: bool, shared: bool| {
        let [outer, inner] = if shared { [1, 1] } else { batches };
        let order: &[usize] = match (batch == Batch::Heads, turned) {
            (true, false) => &[0, 2, 1, 3],
            (true, true) => &[0, 3, 1, 2],
            (false, false) => &[0, 1, 2, 3],
            (false, true) => &[0, 1, 3, 2],
        };
        Layout::ordered(&[outer, inner, rows, columns], order, padding)
    };
    let lhs_layout = layout([m, k], turned[0], shared[0]);
    let rhs_layout = layout([k, n], turned[1], shared[1]);
    let values =
        |draw: &mut Draw, layout: &Layout| draw.normal(layout.shape.iter().product(), 1.0, storage);
    let (mut lhs, mut rhs) = (values(draw, &lhs_layout), values(draw, &rhs_layout));
    draw.spoil("lhs", &mut lhs);
    draw.spoil("rhs", &mut rhs);
    let steps = steps(draw, &case);

    let problem = |lhs: &Layout, rhs: &Layout| {
        let tensor = |layout: &'_ Layout| (layout.shape.clone(), layout.strides.clone());
        let ((lhs, lhs_strides), (rhs, rhs_strides)) = (tensor(lhs), tensor(rhs));
        MatmulProblem::new(
            TensorLayout { shape: &lhs, strides: &lhs_strides, dtype: dtype(storage) },
            TensorLayout { shape: &rhs, strides: &rhs_strides, dtype: dtype(storage) },
            dtype(out),
            if full { F32Precision::Full } else { F32Precision::Tf32 },
        )
    };
    if draw.holds("empty", 100) {
        return empty(draw, check, problem, [lhs_layout, rhs_layout]);
    }
    let problem_of = problem(&lhs_layout, &rhs_layout)?;
    let lhs_buffer = place(on, draw, "lhs", (&lhs, &lhs_layout), storage);
    let rhs_buffer = place(on, draw, "rhs", (&rhs, &rhs_layout), storage);
    let places = Places { problem: &problem_of, interleaved };
    let epilogue = upload_steps(on, draw, &steps, &case, &places);
    let plan = blueprint(on, &problem_of, which, split)?;
    if draw.holds("contradiction", 60) {
        let operands = [&lhs_buffer, &rhs_buffer];
        return contradictions(on, draw, check, (&problem_of, &plan), operands, &epilogue);
    }
    let output = matmul_with(&on.client, &problem_of, &plan, &lhs_buffer, &rhs_buffer, &epilogue)?;

    let in_f32 = precision(&plan, storage);
    let mut expected = Expected::of(&case, [&lhs, &rhs], &steps, in_f32, on.functions());
    if draw.has_whole_numbers() && steps.are_exact() {
        expected.round_only(case.out);
    }
    let of = |what: &str| format!("{what} by {plan}");
    if let Some(z) = output.preactivation {
        let z = places.in_order(download(&on.client, z, out)?);
        check.compare(&of("preactivation"), z, &expected.z, &expected.z_bounds)?;
    }
    let y = places.in_order(download(&on.client, output.out, out)?);
    check.compare(&of("out"), y, &expected.out, &expected.out_bounds)
}

fn steps(draw: &mut Draw, case: &Case) -> Steps {
    let (out, elements) = (case.out, case.batch[0] * case.batch[1] * case.m * case.n);
    let plain = draw.planned("plain", 3);
    let bias = !plain && draw.planned("bias", 2);
    let activation =
        if plain { Activation::Identity } else { draw.plan("activation", &Activation::ALL) };
    let kept = !plain && draw.planned("kept", 3);
    let residual = !plain && draw.planned("residual", 2);
    let scaled = !plain && draw.planned("scaled", 5);
    let alpha = if draw.holds("alpha", 3) { draw.number("alpha", -2.0, 2.0) } else { 1.0 };
    let beta = draw.one_of("beta", &[1.0, 1.0, -0.5, 0.0, 0.3]);
    Steps {
        alpha,
        scales: scaled.then(|| [draw.number("scale", 0.1, 3.0), draw.number("scale", 0.01, 1.0)]),
        bias: bias.then(|| draw.normal(case.n, 1.0, out)),
        activation,
        kept,
        residual: residual.then(|| draw.normal(elements, 1.0, out)),
        beta: f64::from(beta as f32),
    }
}

/// Where elements of the output lie.
struct Places<'a> {
    problem: &'a MatmulProblem,
    /// Whether rows of the inner batch's matrices take turns.
    interleaved: bool,
}

impl Places<'_> {
    /// The element of the output that lies at `place` of its memory.
    fn element(&self, place: usize) -> usize {
        let MatmulProblem { batch: [_, inner], m, n, .. } = *self.problem;
        if !self.interleaved {
            return place;
        }
        let (row, column) = (place / n, place % n);
        let (row, matrix) = (row / inner, row % inner);
        let (outer, row) = (row / m, row % m);
        ((outer * inner + matrix) * m + row) * n + column
    }

    /// As elements of the output lie in memory.
    fn in_memory(&self, elements: &[f64]) -> Vec<f64> {
        (0..elements.len()).map(|place| elements[self.element(place)]).collect()
    }

    /// Back from there.
    fn in_order(&self, memory: Vec<f64>) -> Vec<f64> {
        let mut elements = vec![0.0; memory.len()];
        for (place, value) in memory.into_iter().enumerate() {
            elements[self.element(place)] = value;
        }
        elements
    }
}

fn upload_steps(
    on: &Target,
    draw: &mut Draw,
    steps: &Steps,
    case: &Case,
    places: &Places<'_>,
) -> Epilogue {
    let (client, out) = (&on.client, case.out);
    // Elsewhere, memory begins where bindings do.
    let front = if on.is_cuda() { draw.plan("residual-front", &[0, 0, 1, 2, 4, 8]) } else { 0 };
    Epilogue {
        alpha: steps.alpha as f32,
        scales: steps.scales.map(|pair| pair.map(|s| upload(client, &[s], Storage::F32))),
        bias: steps.bias.as_ref().map(|bias| upload(client, bias, out)),
        activation: activation(steps.activation),
        keep_preactivation: steps.kept,
        residual: steps
            .residual
            .as_ref()
            .map(|r| upload_behind(client, front, &places.in_memory(r), out)),
        beta: steps.beta as f32,
        residual_multiplies: false,
        interleaved: places.interleaved,
    }
}

fn activation(activation: Activation) -> kernel::Activation {
    match activation {
        Activation::Identity => kernel::Activation::Identity,
        Activation::Relu => kernel::Activation::Relu,
        Activation::Silu => kernel::Activation::Silu,
        Activation::Gelu => kernel::Activation::Gelu,
        Activation::GeluTanh => kernel::Activation::GeluTanh,
    }
}

/// One of the problem's tiles, with the most splits of k that it has or none.
fn blueprint(
    on: &Target,
    problem: &MatmulProblem,
    which: usize,
    split: bool,
) -> Result<MatmulBlueprint, Stop> {
    let mut all = MatmulBlueprint::candidates(problem, &on.client);
    all.retain(|plan| on.takes(plan.family));
    let mut tiles = all.clone();
    tiles.dedup_by_key(|plan| (plan.family, plan.tile_m, plan.tile_n, plan.stages, plan.bulk));
    let first = tiles.get(which % tiles.len().max(1)).ok_or_else(no_plan)?;
    let is_split =
        |plan: &&MatmulBlueprint| MatmulBlueprint { splits: first.splits, ..**plan } == *first;
    let last = all.iter().rfind(is_split).filter(|_| split);
    Ok(*last.unwrap_or(first))
}

fn no_plan() -> Stop {
    Stop::Declined("no plan of the family serves the product".into())
}

fn precision(plan: &MatmulBlueprint, operands: Storage) -> MatmulPrecision {
    match plan.family {
        Family::Portable => MatmulPrecision::exact(Storage::F32),
        _ if operands == Storage::F32 => MatmulPrecision::tf32(),
        _ => MatmulPrecision::tensor_core(Storage::F32),
    }
}

impl Steps {
    /// Whether whole numbers stay whole, or halves of them.
    fn are_exact(&self) -> bool {
        let exact = [Activation::Identity, Activation::Relu].contains(&self.activation);
        let halves = |factor: f64| (2.0 * factor).fract() == 0.0;
        exact && self.alpha == 1.0 && self.scales.is_none() && halves(self.beta)
    }
}

/// What comes out, and how far off it may be.
#[derive(Default)]
struct Expected {
    z: Vec<f64>,
    z_bounds: Vec<f64>,
    out: Vec<f64>,
    out_bounds: Vec<f64>,
}

impl Expected {
    fn of(
        case: &Case,
        operands: [&[f64]; 2],
        steps: &Steps,
        in_f32: MatmulPrecision,
        errors: FunctionErrors,
    ) -> Self {
        let Case { out, m, n, k, .. } = *case;
        let batch = case.batch[0] * case.batch[1];
        let product = MatmulCase { name: "drawn", batch, m, n, k, lhs: RowMajor, rhs: RowMajor };
        let [lhs, rhs] = [0, 1].map(|i| operands[i].repeat(if case.shared[i] { batch } else { 1 }));
        let sums = matmul::matmul(&product, &lhs, &rhs);
        let magnitudes = matmul::magnitudes(&product, &lhs, &rhs);
        let [s, t] = steps.scales.unwrap_or([1.0; 2]);
        let factor = steps.alpha * s * t;
        // The bias is one more term of the sum, and each factor one more rounding of it.
        let terms = k + 4;
        let mut expected = Self::default();
        for (i, (sum, magnitude)) in sums.iter().zip(&magnitudes).enumerate() {
            let bias = steps.bias.as_ref().map_or(0.0, |bias| bias[i % n]);
            // With a factor of 0, the residual is not read.
            let residual = steps.residual.as_ref().filter(|_| steps.beta != 0.0);
            let added = residual.map_or(0.0, |residual| steps.beta * residual[i]);
            let z = factor * sum + bias;
            let z_bound = in_f32.bound(z, factor.abs() * magnitude + bias.abs(), terms);
            expected.z.push(z);
            expected.z_bounds.push(z_bound + rounding(z.abs() + z_bound, out));

            let y = steps.activation.value(z);
            let y_bound = steps.activation.value_bound(z, z_bound, Storage::F32, errors);
            // Multiplied and added in f32, where the multiply-add may round twice, and rounded to
            // storage.
            let most = y.abs() + y_bound + added.abs();
            let roundings = rounding(added.abs(), Storage::F32)
                + rounding(most, Storage::F32)
                + rounding(most, out);
            expected.out.push(y + added);
            expected.out_bounds.push(y_bound + roundings);
        }
        expected
    }
}

impl Expected {
    /// Holds results to one rounding of what is right, and to nothing else.
    fn round_only(&mut self, out: Storage) {
        for values in [&mut self.z, &mut self.out] {
            values.iter_mut().for_each(|value| *value = out.round(*value));
        }
        for bounds in [&mut self.z_bounds, &mut self.out_bounds] {
            bounds.fill(0.0);
        }
    }
}

/// How far off rounding a number of that magnitude to `storage` may be.
fn rounding(most: f64, storage: Storage) -> f64 {
    storage.unit_roundoff() * most + storage.underflow()
}

/// Empty tensors are declined.
fn empty(
    draw: &mut Draw,
    check: &mut Check,
    problem: impl Fn(&Layout, &Layout) -> Result<MatmulProblem, KernelError>,
    [mut lhs, mut rhs]: [Layout; 2],
) -> Result<(), Stop> {
    match draw.one_of("zero", &["m", "n", "k", "batch"]) {
        "m" => lhs.shape[2] = 0,
        "n" => rhs.shape[3] = 0,
        "k" => (lhs.shape[3], rhs.shape[2]) = (0, 0),
        _ => (lhs.shape[1], rhs.shape[1]) = (0, 0),
    }
    check.refuses("an empty product", problem(&lhs, &rhs))
}

/// Tensors that do not go together.
fn contradictions(
    on: &Target,
    draw: &mut Draw,
    check: &mut Check,
    (problem, plan): (&MatmulProblem, &MatmulBlueprint),
    [lhs, rhs]: [&Buffer; 2],
    epilogue: &Epilogue,
) -> Result<(), Stop> {
    let run = |lhs: &Buffer, rhs: &Buffer, epilogue: &Epilogue| {
        matmul_with(&on.client, problem, plan, lhs, rhs, epilogue).map(drop)
    };
    let other = |buffer: &Buffer| {
        let storage = if buffer.dtype == dtype(Storage::F16) { Storage::F32 } else { Storage::F16 };
        Buffer { dtype: dtype(storage), ..buffer.clone() }
    };
    let short = |buffer: &Buffer, span: usize| Buffer { elements: span - 1, ..buffer.clone() };
    let bias = |elements: usize| Epilogue {
        bias: Some(upload(&on.client, &vec![0.0; elements], Storage::F32)),
        ..epilogue.clone()
    };
    let what = draw.one_of("what", &["short lhs", "short rhs", "type of lhs", "bias", "inner"]);
    let result = match what {
        "short lhs" => run(&short(lhs, problem.lhs_span()), rhs, epilogue),
        "short rhs" => run(lhs, &short(rhs, problem.rhs_span()), epilogue),
        "type of lhs" => run(&other(lhs), rhs, epilogue),
        "bias" => run(lhs, rhs, &bias(problem.n - 1)),
        _ => MatmulProblem::new(
            TensorLayout {
                shape: &[problem.m, problem.k],
                strides: &[problem.k, 1],
                dtype: lhs.dtype,
            },
            TensorLayout {
                shape: &[problem.k + 1, problem.n],
                strides: &[problem.n, 1],
                dtype: rhs.dtype,
            },
            problem.out,
            F32Precision::Tf32,
        )
        .map(drop),
    };
    check.refuses(what, result)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: Case =
        Case { out: Storage::F16, batch: [1, 1], m: 1, n: 1, k: 2, shared: [false; 2] };

    fn expected(activation: Activation, lhs: f64, in_f32: MatmulPrecision) -> Expected {
        let steps = Steps {
            alpha: -1.5,
            scales: None,
            bias: Some(vec![0.25]),
            activation,
            kept: true,
            residual: Some(vec![3.0]),
            beta: 0.3,
        };
        Expected::of(&CASE, [&[lhs, 1.0], &[2.0, 1.0]], &steps, in_f32, FunctionErrors::PORTABLE)
    }

    #[test]
    fn what_relu_makes_of_minus_infinity_is_held_to_the_roundings_of_the_residual() {
        for in_f32 in [MatmulPrecision::exact(Storage::F32), MatmulPrecision::tf32()] {
            let expected = expected(Activation::Relu, f64::INFINITY, in_f32);
            assert_eq!(expected.z, [f64::NEG_INFINITY]);
            let hold = |out: f64| {
                let (values, bounds) = (&expected.out, &expected.out_bounds);
                Check::new(None).compare("out", vec![out], values, bounds)
            };
            hold(Storage::F16.round(0.3 * 3.0)).unwrap();
            for wrong in [0.0, 0.9 + 2.0 * Storage::F16.unit_roundoff(), f64::NAN] {
                assert!(hold(wrong).is_err(), "{wrong}");
            }
        }
    }

    #[test]
    fn what_is_none_behind_an_activation_is_told_apart() {
        let out = |activation, lhs| {
            let in_f32 = MatmulPrecision::exact(Storage::F32);
            expected(activation, lhs, in_f32).out[0]
        };
        for activation in Activation::ALL {
            assert!(out(activation, f64::NAN).is_nan());
            assert_eq!(out(activation, f64::NEG_INFINITY), f64::INFINITY);
        }
        assert!(out(Activation::Gelu, f64::INFINITY).is_nan());
    }
}
