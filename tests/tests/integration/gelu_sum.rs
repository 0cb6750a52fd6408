//! The gradient of GELU with the sums of its columns: both plans against f64, and each other.

use super::{download, dtype, erf_error, upload};
use blackburn_kernels::{
    KernelError,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem},
    gelu::{GeluGradients, GeluSumBlueprint, gelu_backward_sum, gelu_backward_sum_with},
};
use blackburn_reference::{
    gelu::{backward_bound, backward_sum_bound, gelu_derivative},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{on_device, on_device_with};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// (rows, columns): around lanes (8 rows, 32 vectors) and splits, columns that take narrow vectors and
/// those that leave lanes idle, and GPT-2's hidden layer at a few tokens.
const SHAPES: [(usize, usize); 9] = [
    (1, 2),
    (7, 128),
    (8, 129),
    (9, 256),
    (31, 66),
    (257, 160),
    (1000, 1024),
    (4097, 4),
    (100, 3072),
];

pub(super) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("gelu::backward_with_sums_is_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_device_with(dtype(storage), |client| {
                SHAPES.iter().try_for_each(|shape| each_plan(client, storage, *shape))
            })
        }));
    }
    trials.extend([
        Trial::ignorable_test("gelu::sums_of_the_backward_have_the_same_bits_each_time", || {
            on_device(repeats)
        }),
        Trial::ignorable_test("gelu::one_kernel_is_planned_where_its_lanes_are_busy", || {
            on_device(plans)
        }),
        Trial::ignorable_test("gelu::a_row_missing_from_the_sums_is_caught", || {
            on_device(missing_row)
        }),
        Trial::ignorable_test("gelu::bad_arguments_of_the_sums_are_named", || {
            on_device(bad_arguments)
        }),
    ]);
    trials
}

fn problem((rows, columns): (usize, usize), storage: Storage) -> ColumnSumProblem {
    ColumnSumProblem::new(&[rows, columns], &[columns, 1], 0..1, dtype(storage))
        .expect("the shapes are served")
}

/// The inputs, and what comes out.
struct Case {
    storage: Storage,
    columns: usize,
    x: Vec<f64>,
    dy: Vec<f64>,
}

impl Case {
    fn new((rows, columns): (usize, usize), storage: Storage) -> Self {
        let x = normal(81, rows * columns, 2.0, storage);
        let dy = normal(82, rows * columns, 1.0, storage);
        Self { storage, columns, x, dy }
    }

    fn run(&self, client: &Client, plan: GeluSumBlueprint) -> Result<[Vec<f64>; 2], Failed> {
        let [x, dy] = [&self.x, &self.dy].map(|values| upload(client, values, self.storage));
        let GeluGradients { dx, db } = gelu_backward_sum_with(client, self.columns, plan, &x, &dy)?;
        if db.elements != self.columns {
            return Err(format!("{} sums of {} columns", db.elements, self.columns).into());
        }
        Ok([download(client, dx, self.storage)?, download(client, db, self.storage)?])
    }

    fn column(&self, column: usize) -> impl Iterator<Item = (f64, f64)> {
        let of = move |values: &[f64]| -> Vec<f64> {
            values.iter().copied().skip(column).step_by(self.columns).collect()
        };
        of(&self.x).into_iter().zip(of(&self.dy))
    }

    fn sums(&self) -> Vec<f64> {
        let sum = |column| self.column(column).map(|(x, dy)| dy * gelu_derivative(x)).sum();
        (0..self.columns).map(sum).collect()
    }

    /// Bounds of the sums, whose terms are rounded to `terms`.
    fn sum_bounds(&self, terms: Storage, client: &Client) -> Vec<f64> {
        let bound = |column| {
            backward_sum_bound(
                self.column(column),
                terms,
                self.storage,
                erf_error(client, self.storage),
            )
        };
        (0..self.columns).map(bound).collect()
    }
}

fn each_plan(client: &Client, storage: Storage, shape: (usize, usize)) -> Result<(), Failed> {
    let case = Case::new(shape, storage);
    let planned = ColumnSumBlueprint::plan(&problem(shape, storage), client);
    // The sums in one launch, and in as many splits as there are groups of rows.
    let most = shape.0.div_ceil(8);
    let with_splits = |splits| GeluSumBlueprint::Fused(ColumnSumBlueprint { splits, ..planned });
    let pairs = || case.x.iter().zip(&case.dy);
    let gradients: Vec<f64> = pairs().map(|(x, dy)| dy * gelu_derivative(*x)).collect();
    let bounds: Vec<f64> = pairs()
        .map(|(x, dy)| backward_bound(*x, *dy, storage, erf_error(client, storage)))
        .collect();
    let mut sums = Vec::new();
    for (plan, terms) in [
        (GeluSumBlueprint::Fused(planned), Storage::F32),
        (with_splits(1), Storage::F32),
        (with_splits(most), Storage::F32),
        (GeluSumBlueprint::Separate, storage),
    ] {
        let named =
            |what: &'static str| move |error| format!("{what} of {shape:?} by {plan:?}: {error}");
        let [dx, db] = case.run(client, plan)?;
        compare(&dx, &gradients, &bounds).map_err(named("dx"))?;
        let bounds = case.sum_bounds(terms, client);
        compare(&db, &case.sums(), &bounds).map_err(named("db"))?;
        sums.push((db, bounds));
    }
    // One kernel's sums and the column sum's are off by both their errors at the most.
    let [(fused, fused_bounds), _, _, (separate, separate_bounds)] = &sums[..] else {
        return Err("four plans were to run".into());
    };
    let bounds: Vec<f64> =
        fused_bounds.iter().zip(separate_bounds).map(|(one, other)| one + other).collect();
    compare(fused, separate, &bounds).map_err(|error| format!("plans differ: {error}"))?;
    Ok(())
}

fn repeats(client: &Client) -> Result<(), Failed> {
    let shape = (1000, 256);
    let plan = GeluSumBlueprint::plan(&problem(shape, Storage::F32), client);
    if !matches!(plan, GeluSumBlueprint::Fused(ColumnSumBlueprint { splits: 2.., .. })) {
        return Err(format!("{plan:?} has no splits, so this shows nothing").into());
    }
    let case = Case::new(shape, Storage::F32);
    let first = case.run(client, plan)?;
    for _ in 0..5 {
        if case.run(client, plan)? != first {
            return Err("two runs on the same input differ".into());
        }
    }
    Ok(())
}

fn plans(client: &Client) -> Result<(), Failed> {
    let is_fused = |columns| {
        let plan = GeluSumBlueprint::plan(&problem((64, columns), Storage::F32), client);
        matches!(plan, GeluSumBlueprint::Fused(_))
    };
    // 32 vectors of four fill the lanes, 16 half of them, 33 half of twice as many.
    let planned = [128, 3072, 64, 132].map(is_fused);
    if planned == [true, true, false, false] {
        return Ok(());
    }
    Err(format!("128, 3072, 64 and 132 columns by one kernel: {planned:?}").into())
}

/// The negative control: sums that leave out one row must not pass.
fn missing_row(client: &Client) -> Result<(), Failed> {
    let (shape, storage) = ((257, 128), Storage::F16);
    let case = Case::new(shape, storage);
    let mut short = Case::new(shape, storage);
    let last = short.dy.len() - case.columns;
    short.dy[last..].fill(0.0);
    let plan = GeluSumBlueprint::plan(&problem(shape, storage), client);
    let [_, db] = short.run(client, plan)?;
    match compare(&db, &case.sums(), &case.sum_bounds(storage, client)) {
        Err(_) => Ok(()),
        Ok(agreement) => Err(format!("a missing row went unseen: {agreement:?}").into()),
    }
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let x = upload(client, &[1.0; 12], Storage::F32);
    let shorter = upload(client, &[1.0; 8], Storage::F32);
    for (columns, dy, name) in [(5, &x, "columns"), (0, &x, "columns"), (4, &shorter, "dy")] {
        match gelu_backward_sum(client, columns, &x, dy) {
            Err(KernelError::InvalidProblem { argument, .. }) if argument == name => {}
            other => return Err(format!("a bad {name} gave {other:?}").into()),
        }
    }
    let wide = GeluSumBlueprint::Fused(ColumnSumBlueprint { vector_size: 8, splits: 1 });
    match gelu_backward_sum_with(client, 4, wide, &x, &x) {
        Err(KernelError::InvalidProblem { argument: "blueprint", .. }) => {}
        other => return Err(format!("vectors of eight of 4 columns gave {other:?}").into()),
    }
    match gelu_backward_sum(client, 1, &x, &x) {
        Err(KernelError::Unsupported { .. }) => Ok(()),
        other => Err(format!("a single column gave {other:?}").into()),
    }
}
