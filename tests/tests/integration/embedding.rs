//! Gradients of embeddings on the device, against f64.

use blackburn_backend::embedding::embedding;
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    embedding::{embedding_backward, embedding_backward_onto},
};
use blackburn_reference::{random::normal, storage::Storage, tolerance::compare};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{
    blocks::{Block, blocks_of},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
};
use burn::{prelude::*, tensor::IndexingUpdateOp};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};

const KERNEL: &str = "EmbeddingBackwardKernel";

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        trials.push(Trial::ignorable_test(
            format!("embedding::gradients_are_within_bounds_in_{storage:?}").to_lowercase(),
            move || on_device_with(dtype(storage), |client| gradients(client, storage)),
        ));
    }
    trials
        .push(Trial::ignorable_test("embedding::bad_arguments_are_named", || on_device(refusals)));
    trials.push(Trial::ignorable_test("embedding::any_number_of_indices_is_served", || {
        on_device(many_indices)
    }));
    trials
        .push(Trial::ignorable_test("embedding::a_lost_place_is_caught", || on_device(lost_place)));
    let trial = |name: &str, test: fn(Device) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("embedding::{name}"), move || on_burn_device(test))
    };
    trials.push(trial("both_ways_to_train_run_on_the_kernel", training));
    trials.push(trial("other_additions_are_right", other_additions));
    trials
}

/// How indices lie: every one its own, few, all the same, and some that name no row.
fn indices(kind: usize, n: usize, rows: usize) -> Vec<i32> {
    let index = |i: usize| match kind {
        0 => (i * 7919 + 3) % rows,
        1 => (i * 31) % rows.min(3),
        _ => rows / 2,
    };
    let mut all: Vec<i32> = (0..n).map(|i| index(i) as i32).collect();
    if kind == 3 && n > 2 {
        all[0] = -1;
        all[n - 1] = rows as i32;
    }
    all
}

fn integers(client: &Client, values: &[i32]) -> Buffer {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    Buffer {
        handle: client.create_from_slice(&bytes),
        elements: values.len(),
        dtype: ElemType::Int(IntKind::I32),
    }
}

/// What the memory of a gradient held before.
const BEFORE: f64 = 0.25;

/// Places, rows and columns, and how indices lie.
struct Case {
    storage: Storage,
    /// Whether sums are added to what was there before.
    adds: bool,
    rows: usize,
    columns: usize,
    index: Vec<i32>,
    dy: Vec<f64>,
}

impl Case {
    fn new([n, rows, columns]: [usize; 3], kind: usize, storage: Storage) -> Self {
        let dy = normal(kind as u64, n * columns, 1.0, storage);
        Self { storage, adds: false, rows, columns, index: indices(kind, n, rows), dy }
    }

    fn run(&self, client: &Client) -> Result<Vec<f64>, Failed> {
        let dw = upload(client, &vec![BEFORE; self.rows * self.columns], self.storage);
        let address = dw.clone();
        let of_dy = upload(client, &self.dy, self.storage);
        let run = if self.adds { embedding_backward_onto } else { embedding_backward };
        run(client, &integers(client, &self.index), &of_dy, &dw, self.columns)?;
        Ok(download(client, address, self.storage)?)
    }

    fn check(&self, found: &[f64]) -> Result<(), Failed> {
        let Self { rows, columns, adds, .. } = *self;
        let before = if adds { BEFORE } else { 0.0 };
        let mut sums = vec![(before, before, 0usize); rows * columns];
        for (i, row) in self.index.iter().enumerate() {
            let Some(row) = usize::try_from(*row).ok().filter(|row| *row < rows) else {
                continue;
            };
            for c in 0..columns {
                let value = self.dy[i * columns + c];
                let (sum, magnitude, terms) = sums[row * columns + c];
                sums[row * columns + c] = (sum + value, magnitude + value.abs(), terms + 1);
            }
        }
        // Rows that no index names stay. An addition in f32 errs by half an epsilon of what was added up
        // until then, and a term goes through those of its unit, its cube and, beyond the first 256 places,
        // of as many others: that is what the sum errs by at most, of all magnitudes. One more adds what was there.
        // Then one rounding to storage.
        let expected: Vec<f64> =
            sums.iter().map(|(sum, _, terms)| if *terms == 0 { BEFORE } else { *sum }).collect();
        let additions =
            |terms: usize| (32 + 8 + terms.div_ceil(8 * 256) + 8).min(terms) + usize::from(adds);
        let bounds: Vec<f64> = sums
            .iter()
            .map(|(sum, magnitude, terms)| {
                let u = f64::from(f32::EPSILON) / 2.0;
                let added = additions(*terms) as f64 * u * magnitude;
                added
                    + self.storage.unit_roundoff() * (sum.abs() + added)
                    + self.storage.underflow()
            })
            .collect();
        compare(found, &expected, &bounds)?;
        Ok(())
    }
}

fn gradients(client: &Client, storage: Storage) -> Result<(), Failed> {
    // Places, rows and columns around cubes (256 places; 32 vectors), odd ones too. Rows of one, two and three
    // digits of 8 bits.
    let sizes = [
        [1, 1, 1],
        [3, 2, 7],
        [127, 50, 8],
        [255, 255, 4],
        [256, 3, 260],
        [257, 1000, 33],
        [513, 70_000, 2],
        [1500, 40, 768],
    ];
    for size in sizes {
        for (kind, adds) in (0..4).flat_map(|kind| [(kind, false), (kind, true)]) {
            let case = Case { adds, ..Case::new(size, kind, storage) };
            case.check(&case.run(client)?).map_err(|error| {
                format!("{size:?}, kind {kind}, adds: {adds}: {}", error.message().unwrap_or(""))
            })?;
        }
    }
    Ok(())
}

/// More than large batches have: every row, few, one, and some that name no row. The sums repeat to the bit.
fn many_indices(client: &Client) -> Result<(), Failed> {
    for (n, kind) in [(131_073, 0), (131_073, 3), (200_000, 1), (200_000, 2)] {
        let case = Case::new([n, 50_257, 4], kind, Storage::F32);
        let found = case.run(client)?;
        case.check(&found).map_err(|error| {
            format!("{n} places, kind {kind}: {}", error.message().unwrap_or(""))
        })?;
        if kind == 2 && case.run(client)? != found {
            return Err(format!("{n} places, kind {kind}: two runs differ").into());
        }
    }
    Ok(())
}

/// The negative control: a place that is left out, of tens of thousands.
fn lost_place(client: &Client) -> Result<(), Failed> {
    let case = Case::new([200_000, 100, 4], 1, Storage::F32);
    let mut short = Case { index: case.index.clone(), dy: case.dy.clone(), ..case };
    short.index[131_072] = -1;
    match case.check(&short.run(client)?) {
        Err(_) => Ok(()),
        Ok(()) => Err("a lost place went unseen".into()),
    }
}

fn refusals(client: &Client) -> Result<(), Failed> {
    let floats = |n: usize| upload(client, &vec![1.0; n], Storage::F32);
    let index = integers(client, &[0, 1]);
    let named = |dy: &Buffer, dw: &Buffer| match embedding_backward(client, &index, dy, dw, 4) {
        Err(KernelError::InvalidProblem { argument, .. }) => Ok(argument),
        other => Err(Failed::from(format!("{other:?}"))),
    };
    assert_eq!(named(&floats(7), &floats(8))?, "dy");
    assert_eq!(named(&floats(8), &floats(9))?, "dw");
    assert_eq!(named(&floats(8), &upload(client, &[1.0; 8], Storage::F16))?, "dw");
    let other = embedding_backward(client, &floats(2), &floats(8), &floats(8), 4);
    assert!(matches!(other, Err(KernelError::Unsupported { .. })), "{other:?}");
    embedding_backward(client, &integers(client, &[]), &floats(0), &floats(8), 4)?;
    Ok(())
}

/// A table that is trained, and what its rows are multiplied by: gradients of them.
struct Training {
    rows: usize,
    columns: usize,
    ids: Vec<i32>,
    factors: Vec<f64>,
    /// The gradient of the transposed table, where that is a head, too.
    head: Option<Vec<f64>>,
}

impl Training {
    fn new([rows, columns, places]: [usize; 3], has_head: bool) -> Self {
        let normals = |seed, n| normal(seed, n, 1.0, Storage::F32);
        Self {
            rows,
            columns,
            ids: (0..places).map(|i| (i * i % rows) as i32).collect(),
            factors: normals(2, places * columns),
            head: has_head.then(|| normals(3, columns * rows)),
        }
    }

    /// The table's gradient, and how many operations of the stream the kernel's launch stands for, if it runs.
    fn run(&self, device: &Device, by_name: bool) -> Result<(Vec<f64>, Option<usize>), Failed> {
        let training = &device.clone().autodiff();
        let &Self { rows, columns, .. } = self;
        let places = self.ids.len();
        let table = normal(1, rows * columns, 1.0, Storage::F32);
        let table = tensor(&table, [rows, columns], Storage::F32, training).detach().require_grad();
        let ids = Tensor::<1, Int>::from_data(&self.ids[..], training).reshape([1, places]);
        let factors = tensor(&self.factors, [1, places, columns], Storage::F32, training);
        let head = self.head.as_ref();
        let head = head.map(|head| tensor(head, [columns, rows], Storage::F32, training));
        let (gradient, blocks) = blocks_of(device, || {
            let y = match by_name {
                true => embedding(table.clone(), ids),
                false => burn::tensor::module::embedding(table.clone(), ids),
            };
            let mut loss = (y * factors).sum();
            if let Some(head) = head {
                loss = loss + (table.clone().transpose() * head).sum();
            }
            values(table.grad(&loss.backward()).ok_or("the table has no gradient")?)
        })?;
        let runs = |block: &&Block| block.kernels.iter().any(|it| it.ends_with(KERNEL));
        Ok((gradient, blocks.iter().find(runs).map(|block| block.operations)))
    }

    fn check(&self, gradient: &[f64]) -> Result<(), Failed> {
        let &Self { rows, columns, .. } = self;
        let mut expected = vec![0.0; rows * columns];
        let mut magnitudes = vec![(0.0, 0.0); rows * columns];
        let mut add = |at: usize, number: f64| {
            let (magnitude, terms) = magnitudes[at];
            magnitudes[at] = (magnitude + number.abs(), terms + 1.0);
            expected[at] += number;
        };
        for (place, factor) in self.factors.iter().enumerate() {
            add(self.ids[place / columns] as usize * columns + place % columns, *factor);
        }
        for (place, number) in self.head.iter().flatten().enumerate() {
            add(place % rows * columns + place / rows, *number);
        }
        // Additions of f32, as many as terms at most.
        let half = f64::from(f32::EPSILON) / 2.0;
        let bounds: Vec<f64> =
            magnitudes.iter().map(|(magnitude, terms)| terms * half * magnitude).collect();
        compare(gradient, &expected, &bounds).map_err(|error| error.to_string())?;
        Ok(())
    }
}

/// By name and by Burn's own module, whose gradient is found in the stream. Rows that CUDA's runtime pads,
/// too. A table that is a head as well has both gradients added by the same launch.
fn training(device: Device) -> Result<(), Failed> {
    for size in [[50, 256, 24], [9, 33, 24], [5000, 4, 131_073]] {
        for by_name in [true, false] {
            let named = format!("{size:?}, by name: {by_name}");
            let operations = |has_head: bool| -> Result<usize, Failed> {
                let training = Training::new(size, has_head);
                let (gradient, operations) = training.run(&device, by_name)?;
                let named = format!("{named}, head: {has_head}");
                training
                    .check(&gradient)
                    .map_err(|error| format!("{named}: {}", error.message().unwrap_or("")))?;
                Ok(operations.ok_or_else(|| format!("{named}: the kernel does not run"))?)
            };
            let [alone, added] = [operations(false)?, operations(true)?];
            assert_eq!(added, alone + 1, "{named}: operations that the launch stands for");
        }
    }
    Ok(())
}

/// Rows added to what is not zeros, or along the other dimension.
fn other_additions(device: Device) -> Result<(), Failed> {
    let numbers = |start: usize, n: usize| (start..start + n).map(|i| i as f64).collect::<Vec<_>>();
    let into = || tensor(&numbers(1, 20), [5, 4], Storage::F32, &device);
    let index = || Tensor::<1, Int>::from_data([3, 1, 3], &device);
    let rows = tensor(&numbers(100, 12), [3, 4], Storage::F32, &device);
    let columns = tensor(&numbers(100, 15), [5, 3], Storage::F32, &device);
    let add = IndexingUpdateOp::Add;
    let zeros = Tensor::<2>::zeros([5, 4], &device);
    let by_rows = values(into().select_assign(0, index(), rows, add))?;
    let by_columns = values(zeros.select_assign(1, index(), columns, add))?;
    for row in 0..5 {
        for column in 0..4 {
            let at = row * 4 + column;
            let added: f64 = [3, 1, 3]
                .iter()
                .enumerate()
                .filter(|(_, target)| **target == row)
                .map(|(place, _)| (100 + place * 4 + column) as f64)
                .sum();
            assert_eq!(by_rows[at], (1 + at) as f64 + added, "row {row}, column {column}");
            let added: f64 = [3, 1, 3]
                .iter()
                .enumerate()
                .filter(|(_, target)| **target == column)
                .map(|(place, _)| (100 + row * 3 + place) as f64)
                .sum();
            assert_eq!(by_columns[at], added, "row {row}, column {column}");
        }
    }
    Ok(())
}
