//! Burn's cumulative operations, unmodified: on the kernels of scans, and against f64.

use crate::reduce_cases::numbers;
use blackburn_kernels::scan::{ScanBlueprint, ScanOperation, ScanProblem};
use blackburn_reference::{random::normal, scan::Cumulative, storage::Storage, tolerance::compare};
use blackburn_tests::{
    on_burn_device, on_burn_device_and_client, on_burn_device_with,
    tensors::{tensor, values},
};
use burn::{prelude::*, tensor::TensorData};
use cubecl::{client::Client, ir::ElemType};
use libtest_mimic::{Failed, Trial};

const F32: Storage = Storage::F32;

/// Sizes, and the dimensions that are scanned.
const SHAPES: [([usize; 3], &[usize]); 12] = [
    ([1, 1, 1], &[0, 1, 2]),
    ([3, 5, 7], &[0, 1, 2]),
    // Rows of one tile: vectors, and elements one by one.
    ([2, 3, 1024], &[2]),
    ([2, 3, 1023], &[2]),
    ([300, 2, 33], &[0, 1, 2]),
    // Several tiles of one cube.
    ([40, 2, 2050], &[2]),
    ([40, 2, 2053], &[2]),
    // Chunks: of vectors, and of elements with a ragged end.
    ([1, 1, 65_536], &[2]),
    ([2, 1, 40_001], &[2]),
    // Columns in chunks, the last one shorter.
    ([3, 4100, 6], &[1]),
    ([5003, 1, 2], &[0]),
    // Columns that fill a software device.
    ([2, 20, 9000], &[1]),
];

pub(crate) fn trials() -> Vec<Trial> {
    type Test = fn(&Device) -> Result<(), Failed>;
    let trial = |name: &str, test: Test| {
        Trial::ignorable_test(format!("scan::{name}"), move || {
            on_burn_device(|device| test(&device))
        })
    };
    let tests: [(&str, Test); 7] = [
        ("integers_are_exact_and_wrap", integers),
        ("every_order_of_memory_is_right", orders),
        ("nan_and_infinity_change_what_comes_behind_them_alone", special),
        ("products_survive_parts_that_f32_does_not_hold", far_products),
        ("gradients_are_served_and_right", gradients),
        ("the_same_input_gives_the_same_bits", repeats),
        ("tensors_without_elements_are_burns", empty),
    ];
    let mut trials: Vec<Trial> = tests.map(|(name, test)| trial(name, test)).into();
    for storage in Storage::ALL {
        let name = format!("scan::dimensions_of_every_size_are_within_bounds_in_{storage:?}");
        trials.push(Trial::ignorable_test(name.to_lowercase(), move || {
            on_burn_device_with(storage, |device, client| dimensions(device, client, storage))
        }));
    }
    trials.push(Trial::ignorable_test("scan::a_missing_element_is_caught", || {
        on_burn_device_and_client(missing)
    }));
    trials
}

/// Burn's own operation.
fn run<const D: usize>(cumulative: Cumulative, x: Tensor<D>, dim: usize) -> Tensor<D> {
    match cumulative {
        Cumulative::Sum => x.cumsum(dim),
        Cumulative::Product => x.cumprod(dim),
        Cumulative::Max => x.cummax(dim),
        Cumulative::Min => x.cummin(dim),
    }
}

/// Applies `of` to each row of `x` along `dim`, a tensor of `dims`.
fn along(dims: &[usize], dim: usize, x: &[f64], of: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let inner: usize = dims[dim + 1..].iter().product();
    let mut made = vec![0.0; x.len()];
    for row in 0..x.len() / dims[dim].max(1) {
        let first = row / inner * inner * dims[dim] + row % inner;
        let places: Vec<usize> = (0..dims[dim]).map(|at| first + at * inner).collect();
        let row: Vec<f64> = places.iter().map(|place| x[*place]).collect();
        for (place, y) in places.into_iter().zip(of(&row)) {
            made[place] = y;
        }
    }
    made
}

/// Runs `work`, in which the provider has to run `times`.
fn serving<T>(times: u64, work: impl FnOnce() -> Result<T, Failed>) -> Result<T, Failed> {
    let served = || blackburn_backend::profile::served().get("BlackburnScan").copied().unwrap_or(0);
    let before = served();
    let made = work()?;
    match served() - before {
        count if count >= times => Ok(made),
        count => Err(format!("the provider ran {count} times, and not {times}").into()),
    }
}

/// Additions of an element on its way, by the plan.
fn additions(client: &Client, dims: &[usize], dim: usize, dtype: ElemType) -> usize {
    let problem = ScanProblem::new(ScanOperation::Sum, dims, dim, dtype);
    problem.map_or(0, |problem| ScanBlueprint::plan(&problem, client).most_combinations())
}

/// Compares a scan with the textbook's, with `additions` of an element on its way.
fn check(
    cumulative: Cumulative,
    x: &Tensor<3>,
    dim: usize,
    additions: usize,
    storage: Storage,
) -> Result<(), Failed> {
    /// Where elements of 32 bits lie apart, as CUDA pads rows, Burn keeps what is no longer.
    const SHORT: usize = 16;
    let (dims, logical) = (x.dims(), values(x.clone())?);
    let times = u64::from(dims[dim] > SHORT || storage != F32);
    let made = serving(times, || values(run(cumulative, x.clone(), dim)))
        .map_err(|error| format!("{cumulative:?} of {dims:?} along {dim}: {error:?}"))?;
    let expected = along(&dims, dim, &logical, |row| cumulative.of_row(row));
    let bounds = along(&dims, dim, &logical, |row| cumulative.bounds(row, additions, storage));
    compare(&made, &expected, &bounds)
        .map_err(|error| format!("{cumulative:?} of {dims:?} along {dim}: {error}"))?;
    Ok(())
}

/// Numbers whose products stay in range.
fn drawn(cumulative: Cumulative, count: usize, storage: Storage) -> Vec<f64> {
    let numbers = normal(3, count, 1.0, storage);
    if cumulative != Cumulative::Product {
        return numbers;
    }
    // A random walk of logarithms, of steps that storage tells from one.
    numbers.iter().map(|x| storage.round(1.0 + 0.01 * x)).collect()
}

fn dimensions(device: &Device, client: &Client, storage: Storage) -> Result<(), Failed> {
    for (shape, dims) in SHAPES {
        for cumulative in Cumulative::ALL {
            let numbers = drawn(cumulative, shape.iter().product(), storage);
            let x = tensor(&numbers, shape, storage, device);
            device.sync().map_err(|error| error.to_string())?;
            for dim in dims {
                let dtype = blackburn_tests::buffers::dtype(storage);
                let additions = additions(client, &shape, *dim, dtype);
                check(cumulative, &x, *dim, additions, storage)?;
            }
        }
    }
    Ok(())
}

fn integers(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in [([5, 1023], 1), ([2, 40_001], 1), ([3000, 4], 0), ([100, 7], 0)] {
        // Large enough for sums and products to wrap.
        let x: Vec<i32> = normal(5, shape.iter().product(), 1.0, F32)
            .iter()
            .map(|x| ((x * 4.0).round() as i32).wrapping_mul(200_000_001).wrapping_add(1))
            .collect();
        let data: Tensor<2, Int> = Tensor::from_data(TensorData::new(x.clone(), shape), device);
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        device.sync().map_err(|error| error.to_string())?;
        let combined = |combine: fn(i32, i32) -> i32| {
            along(&shape, dim, &wide, |row| {
                let mut all: Option<i32> = None;
                row.iter()
                    .map(|x| {
                        let next = all.map_or(*x as i32, |all| combine(all, *x as i32));
                        all = Some(next);
                        f64::from(next)
                    })
                    .collect()
            })
        };
        let pairs = serving(4, || {
            let read = |y: Tensor<2, Int>| numbers(y.try_into_data());
            Ok([
                (read(data.clone().cumsum(dim))?, combined(i32::wrapping_add)),
                (read(data.clone().cumprod(dim))?, combined(i32::wrapping_mul)),
                (read(data.clone().cummax(dim))?, combined(i32::max)),
                (read(data.clone().cummin(dim))?, combined(i32::min)),
            ])
        })?;
        for (at, (made, expected)) in pairs.iter().enumerate() {
            if made != expected {
                return Err(format!("operation {at} of {shape:?} along {dim} differs").into());
            }
        }
    }
    // Burn counts by a sum of ones.
    let counted: Tensor<1, Int> = Tensor::arange(3..50_003, device);
    let counted = numbers(counted.try_into_data())?;
    let is_right = counted.iter().enumerate().all(|(at, x)| *x == (at + 3) as f64);
    if is_right { Ok(()) } else { Err("a range is counted wrongly".into()) }
}

/// Permuted and reversed tensors, parts of larger ones, and one row for all.
fn orders(device: &Device) -> Result<(), Failed> {
    let shape = [20, 70, 90];
    let all = drawn(Cumulative::Product, shape.iter().product(), F32);
    let x = tensor(&all, shape, F32, device);
    let row = tensor(&all[..90], [1, 1, 90], F32, device);
    let laid_out = [
        x.clone().permute([2, 0, 1]),
        x.clone().flip([1, 2]),
        x.clone().slice([2..19, 3..70, 5..86]),
        x.slice([2..19, 3..70, 5..86]).swap_dims(0, 2),
        row.expand([20, 70, 90]),
    ];
    for x in laid_out {
        device.sync().map_err(|error| error.to_string())?;
        for cumulative in Cumulative::ALL {
            // No more additions than elements, whatever the plan.
            (0..3).try_for_each(|dim| check(cumulative, &x, dim, 90, F32))?;
        }
    }
    Ok(())
}

/// NaN and infinities at the ends of rows, of units, planes, tiles and chunks.
fn special(device: &Device) -> Result<(), Failed> {
    for length in [12, 300, 5000, 40_000] {
        let mut all: Vec<f64> = normal(3, 6 * length, 1.0, F32);
        let [_, last, middle, low, high, both]: [usize; 6] =
            std::array::from_fn(|row| row * length);
        all[last + length - 1] = f64::NAN;
        all[middle + length / 2] = f64::NAN;
        all[low..low + length].fill(f64::NEG_INFINITY);
        all[high + 4..high + length].fill(f64::INFINITY);
        all[both + length / 3] = f64::INFINITY;
        all[both + 2 * length / 3] = f64::NEG_INFINITY;
        let rows = tensor(&all, [1, 6, length], F32, device);
        let columns = rows.clone().swap_dims(1, 2).mul_scalar(1.0);
        device.sync().map_err(|error| error.to_string())?;
        for cumulative in [Cumulative::Sum, Cumulative::Max, Cumulative::Min] {
            check(cumulative, &rows, 2, length, F32)?;
            check(cumulative, &columns, 1, length, F32)?;
        }
        let signs = tensor(
            &all.iter().map(|x| x.signum()).collect::<Vec<_>>(),
            [1, 6, length],
            F32,
            device,
        );
        device.sync().map_err(|error| error.to_string())?;
        check(Cumulative::Product, &signs, 2, length, F32)?;
    }
    Ok(())
}

/// A zero in front of what overflows, what overflows and underflows in turns, and subnormal factors.
fn far_products(device: &Device) -> Result<(), Failed> {
    for length in [200, 5000, 40_000] {
        let mut zero = vec![10.0; length];
        zero[0] = 0.0;
        let turns = (0..length).map(|at| if at / 20 % 2 == 0 { 0.125 } else { 8.0 });
        let large = (0..length).map(|at| if at % 40 < 20 { 1024.0 } else { 1.0 / 1024.0 });
        let mut all: Vec<f64> = zero.into_iter().chain(turns).chain(large).collect();
        all[length + 1] = f64::from(f32::MIN_POSITIVE) / 4.0;
        all[length + 2] = f64::from(f32::MAX);
        let x = tensor(&all, [1, 3, length], F32, device);
        device.sync().map_err(|error| error.to_string())?;
        let made = serving(1, || values(x.clone().cumprod(2)))?;
        // The device may read a subnormal factor as zero.
        let all = values(x)?;
        let rounded = |row: &[f64]| -> Vec<f64> {
            Cumulative::Product.of_row(row).iter().map(|y| F32.round(*y)).collect()
        };
        let expected = along(&[1, 3, length], 2, &all, rounded);
        let bounds = along(&[1, 3, length], 2, &all, |row| Cumulative::Product.bounds(row, 0, F32));
        compare(&made, &expected, &bounds).map_err(|error| format!("{length}: {error}"))?;
    }
    Ok(())
}

/// Sums of reversed gradients; products' gradients are made of three scans.
fn gradients(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    for (shape, dim) in [([6, 500], 1), ([600, 5], 0)] {
        let count = shape.iter().product();
        let (numbers, of_y) = (normal(3, count, 1.0, F32), normal(4, count, 1.0, F32));
        let x: Tensor<2> = tensor(&numbers, shape, F32, &device).require_grad();
        let weights: Tensor<2> = tensor(&of_y, shape, F32, &device);
        let made = serving(2, || {
            let gradients = (x.clone().cumsum(dim) * weights.clone()).sum().backward();
            let gradient = x.grad(&gradients).ok_or("no gradient")?;
            values(gradient)
        })?;
        let reversed = |row: &[f64], of: &dyn Fn(&[f64]) -> Vec<f64>| -> Vec<f64> {
            let back: Vec<f64> = row.iter().rev().copied().collect();
            of(&back).into_iter().rev().collect()
        };
        let expected =
            along(&shape, dim, &of_y, |row| reversed(row, &|row| Cumulative::Sum.of_row(row)));
        let bounds = along(&shape, dim, &of_y, |row| {
            reversed(row, &|row| Cumulative::Sum.bounds(row, row.len(), F32))
        });
        compare(&made, &expected, &bounds)?;
        let served = serving(3, || {
            let gradients = x.clone().cumprod(dim).sum().backward();
            values(x.grad(&gradients).ok_or("no gradient")?)
        })?;
        if served.iter().any(|dx| !dx.is_finite()) {
            return Err("a product's gradient is not finite".into());
        }
    }
    Ok(())
}

fn repeats(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in [([2, 1, 40_001], 2), ([3, 4100, 6], 1), ([9, 3, 700], 2)] {
        let x = tensor(&normal(8, shape.iter().product(), 1.0, F32), shape, F32, device);
        let bits = || -> Result<Vec<u64>, Failed> {
            Ok(values(x.clone().cumsum(dim))?.iter().map(|y| y.to_bits()).collect())
        };
        if bits()? != bits()? {
            return Err(format!("{shape:?} along {dim} gave other bits").into());
        }
    }
    Ok(())
}

fn empty(device: &Device) -> Result<(), Failed> {
    for (shape, dim) in [([0, 3], 0), ([0, 3], 1), ([3, 0], 1)] {
        let made = values(Tensor::<2>::zeros(shape, device).cumsum(dim))?;
        if !made.is_empty() {
            return Err(format!("of nothing: {made:?}").into());
        }
    }
    Ok(())
}

/// What a scan would make that loses the first element of a row.
fn missing(device: &Device, client: &Client) -> Result<(), Failed> {
    let numbers = drawn(Cumulative::Sum, 2000, F32);
    let x = tensor(&numbers[1..], [1, 1, 1999], F32, device);
    let made = values(x.cumsum(2))?;
    let dtype = blackburn_tests::buffers::dtype(F32);
    let additions = additions(client, &[1, 1, 2000], 2, dtype);
    let expected = &Cumulative::Sum.of_row(&numbers)[1..];
    let bounds = &Cumulative::Sum.bounds(&numbers, additions, F32)[1..];
    match compare(&made, expected, bounds) {
        Err(error) if error.count > 1900 => Ok(()),
        other => Err(format!("a sum without its first element: {other:?}").into()),
    }
}
