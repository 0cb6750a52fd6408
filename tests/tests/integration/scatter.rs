//! Additions to the places that indices name, by themselves and as Burn's unmodified operations, against f64.

use blackburn_kernels::{
    KernelError,
    scatter::{ScatterProblem, SelectProblem, scatter_add, select_add},
};
use blackburn_reference::{
    random::normal,
    storage::Storage,
    tolerance::{Mismatch, compare},
};
use blackburn_tests::{
    buffers::{download, dtype, upload, upload_integers},
    on_burn_device, on_device, on_device_with,
    tensors::{tensor, values},
    trials_in,
};
use burn::{
    prelude::*,
    tensor::{IndexingUpdateOp::Add, TensorData},
};
use cubecl::client::Client;
use libtest_mimic::{Failed, Trial};

/// Rows, terms and places: one of each, powers of two, one less and one more, more places than terms and fewer.
const ROWS: [[usize; 3]; 8] = [
    [1, 1, 1],
    [3, 2, 5],
    [5, 31, 7],
    [7, 64, 64],
    [2, 65, 300],
    [3, 1023, 900],
    [2, 2049, 10],
    [1, 4096, 5000],
];
/// Outer, terms, places and inner.
const SLICES: [[usize; 4]; 6] = [
    [1, 1, 1, 1],
    [1, 300, 70, 12],
    [3, 17, 5, 4],
    [5, 40, 90, 1],
    [2, 1000, 30, 3],
    [1, 9, 700, 2],
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name = format!("scatter::kernels_are_within_bounds_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| kernels(client, storage))
        }));
    }
    trials.push(Trial::ignorable_test("scatter::bad_arguments_are_named", || on_device(refusals)));
    trials.push(Trial::ignorable_test("scatter::nan_goes_where_its_index_says", || on_device(nan)));
    trials.push(Trial::ignorable_test("scatter::the_order_of_terms_counts", || on_device(order)));
    trials.push(Trial::ignorable_test("scatter::a_lost_term_is_caught", || on_device(lost_term)));
    trials.push(Trial::ignorable_test("scatter::integers_are_served_and_wrap", || {
        on_burn_device(|device| integers(&device))
    }));
    let name = "scatter::burns_operations_and_gradients_are_served";
    trials.extend(trials_in(name, &[Storage::F16, Storage::Bf16], unmodified));
    let name = "scatter::few_values_are_left_to_burn";
    trials.extend(trials_in(name, &Storage::ALL, few));
    trials
}

/// How indices lie: each at another place, few places, one place, and some that name none.
fn indices(kind: usize, count: usize, places: usize) -> Vec<i32> {
    let of = |term: usize| match kind {
        0 | 3 => (term * 7919 + 3) % places,
        1 => (term * 31) % places.min(3),
        _ => places / 2,
    };
    let mut all: Vec<i32> = (0..count).map(|term| of(term) as i32).collect();
    if kind == 3 {
        all.iter_mut().step_by(3).for_each(|index| *index = -1);
        all.iter_mut().step_by(4).for_each(|index| *index = places as i32);
    }
    all
}

/// What `x` is with its values, and how far off each element may be: additions in f32, rounded once.
struct Expected {
    y: Vec<f64>,
    magnitudes: Vec<f64>,
    additions: Vec<usize>,
}

impl Expected {
    fn of(x: &[f64]) -> Self {
        let magnitudes = x.iter().map(|x| x.abs()).collect();
        Self { y: x.to_vec(), magnitudes, additions: vec![0; x.len()] }
    }

    fn add(&mut self, place: usize, value: f64) {
        self.y[place] += value;
        self.magnitudes[place] += value.abs();
        self.additions[place] += 1;
    }

    fn compare(&self, made: &[f64], storage: Storage) -> Result<(), Mismatch> {
        let bound = |place: usize| {
            let additions = self.additions[place] as f64 * Storage::F32.unit_roundoff();
            let rounded = storage.unit_roundoff() * self.y[place].abs() + storage.underflow();
            additions * self.magnitudes[place] + rounded
        };
        let bounds: Vec<f64> = (0..self.y.len()).map(bound).collect();
        compare(made, &self.y, &bounds).map(drop)
    }
}

/// Along the middle one of three dimensions, whose slices have the same indices, or each element its own.
fn expected(
    [outer, terms, places, inner]: [usize; 4],
    x: &[f64],
    index: &[i32],
    added: &[f64],
    has_own: bool,
) -> Expected {
    let mut expected = Expected::of(x);
    for (at, value) in added.iter().enumerate() {
        let (row, term, column) = (at / inner / terms, at / inner % terms, at % inner);
        let place = index[if has_own { at } else { term }];
        if (0..places as i32).contains(&place) {
            expected.add((row * places + place as usize) * inner + column, *value);
        }
    }
    debug_assert_eq!(x.len(), outer * places * inner);
    expected
}

fn kernels(client: &Client, storage: Storage) -> Result<(), Failed> {
    for kind in 0..4 {
        for [rows, terms, places] in ROWS {
            let x = normal(1, rows * places, 1.0, storage);
            let added = normal(2, rows * terms, 1.0, storage);
            let index = indices(kind, rows * terms, places);
            let problem = ScatterProblem { rows, terms, places, dtype: dtype(storage) };
            let [of_x, of_added] = [&x, &added].map(|numbers| upload(client, numbers, storage));
            let of_index = upload_integers(client, &index);
            let y = scatter_add(client, &problem, &of_x, &of_index, &of_added)?;
            let made = download(client, y, storage)?;
            expected([rows, terms, places, 1], &x, &index, &added, true)
                .compare(&made, storage)
                .map_err(|error| format!("{problem:?}, indices {kind}: {error}"))?;
        }
        for sizes @ [outer, terms, places, inner] in SLICES {
            let x = normal(1, outer * places * inner, 1.0, storage);
            let added = normal(2, outer * terms * inner, 1.0, storage);
            let index = indices(kind, terms, places);
            let problem = SelectProblem { outer, terms, places, inner, dtype: dtype(storage) };
            let [of_x, of_added] = [&x, &added].map(|numbers| upload(client, numbers, storage));
            let of_index = upload_integers(client, &index);
            let y = select_add(client, &problem, &of_x, &of_index, &of_added)?;
            let made = download(client, y, storage)?;
            expected(sizes, &x, &index, &added, false)
                .compare(&made, storage)
                .map_err(|error| format!("{problem:?}, indices {kind}: {error}"))?;
        }
    }
    Ok(())
}

fn refusals(client: &Client) -> Result<(), Failed> {
    const F32: Storage = Storage::F32;

    let ones = |count: usize| upload(client, &vec![1.0; count], F32);
    let index = |count: usize| upload_integers(client, &vec![0; count]);
    let of = |terms, places| ScatterProblem { rows: 2, terms, places, dtype: dtype(F32) };
    let argument = |made: Result<_, KernelError>| match made {
        Err(KernelError::InvalidProblem { argument, .. }) => argument,
        _ => "nothing",
    };
    let scatter = |problem: ScatterProblem, x, i, v| {
        scatter_add(client, &problem, &ones(x), &index(i), &ones(v))
    };
    let named = [
        argument(scatter(of(4, 3), 5, 8, 8)),
        argument(scatter(of(4, 3), 6, 7, 8)),
        argument(scatter(of(4, 3), 6, 8, 9)),
    ];
    if named != ["x", "index", "values"] {
        return Err(format!("{named:?} are named").into());
    }
    let unsupported = [
        scatter(of(0, 3), 6, 0, 0),
        scatter(of(1, 65_536), 131_072, 2, 2),
        scatter_add(client, &of(4, 3), &ones(6), &ones(8), &ones(8)),
    ];
    match unsupported.iter().all(|made| matches!(made, Err(KernelError::Unsupported { .. }))) {
        true => Ok(()),
        false => Err(format!("{unsupported:?}").into()),
    }
}

fn nan(client: &Client) -> Result<(), Failed> {
    const F32: Storage = Storage::F32;

    let (rows, terms, places) = (2, 40, 9);
    let mut added = normal(2, rows * terms, 1.0, F32);
    added[7] = f64::NAN;
    added[terms + 8] = f64::INFINITY;
    let index = indices(0, rows * terms, places);
    let problem = ScatterProblem { rows, terms, places, dtype: dtype(F32) };
    let x = vec![0.0; rows * places];
    let [of_x, of_added] = [&x, &added].map(|numbers| upload(client, numbers, F32));
    let y = scatter_add(client, &problem, &of_x, &upload_integers(client, &index), &of_added)?;
    let made = download(client, y, F32)?;
    let expected = expected([rows, terms, places, 1], &x, &index, &added, true);
    for (at, (made, expected)) in made.iter().zip(&expected.y).enumerate() {
        if made.is_nan() != expected.is_nan() || made.is_infinite() != expected.is_infinite() {
            return Err(format!("place {at} is {made}, and not {expected}").into());
        }
    }
    Ok(())
}

/// Terms whose sum depends on their order in f32: those of a place are added in theirs, behind x.
fn order(client: &Client) -> Result<(), Failed> {
    const F32: Storage = Storage::F32;

    let large = 2f64.powi(24);
    let added = [1.0, 1.0, large, -large, 1.0, 0.5];
    let index = [1, 0, 1, 1, 0, 1];
    let problem = ScatterProblem { rows: 1, terms: 6, places: 2, dtype: dtype(F32) };
    let in_order = |place: i32| {
        let of_place = added.iter().zip(index).filter(|(_, index)| *index == place);
        f64::from(of_place.fold(0.0f32, |sum, (value, _)| sum + *value as f32))
    };
    let [x, values] = [&[0.0; 2][..], &added].map(|numbers| upload(client, numbers, F32));
    let index = upload_integers(client, &index);
    let made = [
        scatter_add(client, &problem, &x, &index, &values)?,
        select_add(
            client,
            &SelectProblem { outer: 1, terms: 6, places: 2, inner: 1, dtype: dtype(F32) },
            &x,
            &index,
            &values,
        )?,
    ];
    for y in made {
        let made = download(client, y, F32)?;
        if made != [in_order(0), in_order(1)] {
            return Err(format!("{made:?}, and not {:?}", [in_order(0), in_order(1)]).into());
        }
    }
    Ok(())
}

/// What a kernel would make that overlooks the last term.
fn lost_term(client: &Client) -> Result<(), Failed> {
    const STORAGE: Storage = Storage::F32;

    let (terms, places) = (64, 8);
    let added = normal(2, terms, 1.0, STORAGE);
    let mut index = indices(0, terms, places);
    let x = vec![0.0; places];
    let expected = expected([1, terms, places, 1], &x, &index, &added, true);
    index[terms - 1] = -1;
    let problem = ScatterProblem { rows: 1, terms, places, dtype: dtype(STORAGE) };
    let [of_x, of_added] = [&x, &added].map(|numbers| upload(client, numbers, STORAGE));
    let y = scatter_add(client, &problem, &of_x, &upload_integers(client, &index), &of_added)?;
    match expected.compare(&download(client, y, STORAGE)?, STORAGE) {
        Err(error) if error.count == 1 => Ok(()),
        other => Err(format!("without its last term: {other:?}").into()),
    }
}

fn served() -> u64 {
    blackburn_backend::profile::served().get("BlackburnScatter").copied().unwrap_or(0)
}

/// Slots of a mixture of experts: a range is written where others say, to zeros.
fn integers(device: &Device) -> Result<(), Failed> {
    const FACTOR: i32 = 100_000_000;

    let (terms, places) = (300, 70);
    let index = indices(1, terms, places);
    let mut expected = vec![0i32; places];
    for (term, place) in index.iter().enumerate() {
        let place = &mut expected[*place as usize];
        *place = place.wrapping_add((term as i32).wrapping_mul(FACTOR));
    }
    let before = served();
    let index = Tensor::<1, Int>::from_data(TensorData::new(index, [terms]), device);
    let zeros = Tensor::<1, Int>::zeros([places], device);
    let range = Tensor::<1, Int>::arange(0..terms as i64, device) * FACTOR;
    let made = zeros.select_assign(0, index, range, Add).into_data().convert::<i32>();
    let made = made.try_to_vec::<i32>().map_err(|error| format!("{error:?}"))?;
    if made != expected {
        return Err(format!("{made:?} and not {expected:?}").into());
    }
    match served() - before {
        0 => Err("integers were left to Burn".into()),
        _ => Ok(()),
    }
}

/// `scatter`, `select_assign`, and the gradients of `gather` and `select`, along each dimension.
fn unmodified(device: &Device, storage: Storage) -> Result<(), Failed> {
    for (sizes @ [outer, terms, places, inner], dim) in
        [([1, 50, 40, 6], 0), ([30, 64, 100, 1], 1), ([5, 70, 33, 4], 1)]
    {
        let of_x = if dim == 0 { [places, inner, 1] } else { [outer, places, inner] };
        let of_added = if dim == 0 { [terms, inner, 1] } else { [outer, terms, inner] };
        let x = normal(1, of_x.iter().product(), 1.0, storage);
        let added = normal(2, of_added.iter().product(), 1.0, storage);
        let own = indices(1, added.len(), places);
        let same = indices(0, terms, places);
        let integers = |index: &[i32]| TensorData::new(index.to_vec(), [index.len()]);
        let autodiff = device.clone().autodiff();
        let leaf = || tensor(&x, of_x, storage, &autodiff).require_grad();
        let weights = || tensor(&added, of_added, storage, &autodiff);
        let own_of = |device: &Device| -> Tensor<3, Int> {
            Tensor::<1, Int>::from_data(integers(&own), device).reshape(of_added)
        };
        let same_of = |device: &Device| Tensor::<1, Int>::from_data(integers(&same), device);
        let (plain_x, plain_added) =
            (tensor(&x, of_x, storage, device), tensor(&added, of_added, storage, device));
        let (plain_own, plain_same) = (own_of(device), same_of(device));
        // What makes the inputs is done before, as where batches come from elsewhere.
        device.sync().map_err(|error| error.to_string())?;
        let before = served();
        let zeros = vec![0.0; x.len()];
        let gradient = |y: Tensor<3>, leaf: &Tensor<3>| {
            let gradients = (y * weights()).sum().backward();
            leaf.grad(&gradients).ok_or("no gradient").map_err(Failed::from).and_then(values)
        };
        let (for_gather, for_select) = (leaf(), leaf());
        let made = [
            (
                values(plain_x.clone().scatter(dim, plain_own, plain_added.clone(), Add))?,
                expected(sizes, &x, &own, &added, true),
            ),
            (
                values(plain_x.select_assign(dim, plain_same, plain_added, Add))?,
                expected(sizes, &x, &same, &added, false),
            ),
            (
                gradient(for_gather.clone().gather(dim, own_of(&autodiff)), &for_gather)?,
                expected(sizes, &zeros, &own, &added, true),
            ),
            (
                gradient(for_select.clone().select(dim, same_of(&autodiff)), &for_select)?,
                expected(sizes, &zeros, &same, &added, false),
            ),
        ];
        for (at, (made, expected)) in made.iter().enumerate() {
            expected
                .compare(made, storage)
                .map_err(|error| format!("operation {at} of {sizes:?} along {dim}: {error}"))?;
        }
        let ran = served() - before;
        if ran < 4 {
            return Err(format!("{ran} of 4 of {sizes:?} along {dim} were served").into());
        }
    }
    Ok(())
}

/// One value for each of many rows, as the gradient of a loss has them.
fn few(device: &Device, storage: Storage) -> Result<(), Failed> {
    let sizes = [50, 1, 200, 1];
    let (x, added) = (normal(1, 50 * 200, 1.0, storage), normal(2, 50, 1.0, storage));
    let index = indices(0, 50, 200);
    let of_index: Tensor<2, Int> =
        Tensor::from_data(TensorData::new(index.clone(), [50, 1]), device);
    let made = tensor(&x, [50, 200], storage, device).scatter(
        1,
        of_index,
        tensor(&added, [50, 1], storage, device),
        Add,
    );
    expected(sizes, &x, &index, &added, true).compare(&values(made)?, storage)?;
    Ok(())
}
