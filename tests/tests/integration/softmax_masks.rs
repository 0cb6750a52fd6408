//! Masks that softmax reads where they lie: the same bits as of rows that were masked on the way there.

use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    softmax::{
        RowMask, SoftmaxGradient, SoftmaxOutputs, SoftmaxProblem, masked_softmax_rows,
        softmax_rows_backward,
    },
};
use blackburn_reference::{random::normal, storage::Storage};
use blackburn_tests::buffers::{download, dtype, upload};
use blackburn_tests::{on_device, on_device_with};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
};
use libtest_mimic::{Failed, Trial};

const U8: ElemType = ElemType::UInt(UIntKind::U8);
const U32: ElemType = ElemType::UInt(UIntKind::U32);

/// Dimensions of rows, elements of a row, and from one to the next: vectors that reach beyond rows, a plane's, a cube's,
/// rows that are read twice; and each of these without a rest, whose masks are read by vectors.
const SIZES: [([usize; 3], usize, usize); 7] = [
    ([2, 3, 5], 256, 264),
    ([1, 2, 3], 4096, 4096),
    ([1, 1, 2], 24_640, 24_640),
    ([2, 3, 5], 17, 24),
    ([1, 4, 7], 257, 257),
    ([2, 2, 3], 4097, 4104),
    ([1, 1, 2], 24_577, 24_577),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        let name =
            format!("softmax::masks::are_those_of_masked_rows_in_{storage:?}").to_lowercase();
        trials.push(Trial::ignorable_test(name, move || {
            on_device_with(dtype(storage), |client| both_passes(client, storage))
        }));
    }
    let name = "softmax::masks::bad_arguments_are_named";
    trials.push(Trial::ignorable_test(name, || on_device(arguments)));
    trials
}

/// A mask of rows by strides, and the elements that it masks.
struct Masked {
    mask: RowMask,
    elements: Vec<bool>,
}

impl Masked {
    fn new(client: &Client, dims: [usize; 3], classes: usize, strides: [usize; 4]) -> Self {
        let sizes = [dims[0], dims[1], dims[2], classes];
        let last: usize = sizes.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
        let words: Vec<u32> = normal(9, last + 1, 1.0, Storage::F32)
            .into_iter()
            .map(|x| u32::from(x < -0.5))
            .collect();
        let element = |at: usize| {
            let (row, class) = (at / classes, at % classes);
            let places = [row / dims[2] / dims[1], row / dims[2] % dims[1], row % dims[2], class];
            words[places.iter().zip(strides).map(|(place, stride)| place * stride).sum::<usize>()]
                != 0
        };
        let elements = (0..sizes.iter().product()).map(element).collect();
        // As Burn stores truth values on each.
        let is_cuda = client.name() == "cuda";
        let (dtype, bytes): (_, Vec<u8>) = match is_cuda {
            true => (U8, words.iter().map(|word| *word as u8).collect()),
            false => (U32, words.iter().flat_map(|word| word.to_le_bytes()).collect()),
        };
        let handle = client.create_from_slice(&bytes);
        let buffer = Buffer { handle, elements: words.len(), dtype };
        Self { mask: RowMask { buffer, dims, strides }, elements }
    }
}

/// One for each element, shared by the dimensions in the middle, by all but the outermost, by all rows, by the elements of
/// a row; and one that lies across.
fn layouts(dims: [usize; 3], classes: usize) -> [[usize; 4]; 6] {
    let [_, middle, inner] = dims;
    [
        [middle * inner * classes, inner * classes, classes, 1],
        [inner * classes, 0, classes, 1],
        [classes, 0, 0, 1],
        [0, 0, 0, 1],
        [middle * inner, inner, 1, 0],
        [0, 0, 1, inner],
    ]
}

fn both_passes(client: &Client, storage: Storage) -> Result<(), Failed> {
    for (dims, classes, row_stride) in SIZES {
        let rows = dims.iter().product::<usize>();
        let problem = SoftmaxProblem {
            rows,
            classes,
            row_stride,
            dtype: dtype(storage),
            out: dtype(storage),
        };
        let place = |row: usize, class: usize| row * row_stride + class;
        let [x, dy] = [3, 4].map(|seed| normal(seed, rows * row_stride, 2.0, storage));
        for strides in layouts(dims, classes) {
            let Masked { mask, elements } = Masked::new(client, dims, classes, strides);
            let at = |element: usize| place(element / classes, element % classes);
            let masked = || (0..rows * classes).filter(|element| elements[*element]).map(at);
            let within = |buffer: Buffer| -> Result<Vec<f64>, Failed> {
                let all = download(client, buffer, storage)?;
                Ok((0..rows * classes).map(|element| all[at(element)]).collect())
            };
            for value in [-1e4f32, f32::NEG_INFINITY] {
                let mut filled = x.clone();
                masked().for_each(|at| filled[at] = storage.round(f64::from(value)));
                let outputs =
                    SoftmaxOutputs { logarithms: false, shifted: true, exponentials: true };
                let run = |x: &[f64], mask| {
                    let x = upload(client, x, storage);
                    let made = masked_softmax_rows(client, &problem, outputs, &x, mask, None)?;
                    [Some(made.y), made.shifted, made.exponentials]
                        .into_iter()
                        .flatten()
                        .map(within)
                        .collect::<Result<Vec<_>, Failed>>()
                };
                for (actual, expected) in
                    run(&x, Some((&mask, value)))?.iter().zip(&run(&filled, None)?)
                {
                    same(actual, expected)
                        .map_err(|error| format!("{problem:?}, {strides:?}: {error}"))?;
                }
            }
            let [y, dy] = [&x, &dy].map(|values| upload(client, values, storage));
            let inputs =
                SoftmaxGradient { factor: 0.125, ..SoftmaxGradient::of(&y, &dy, row_stride) };
            let run = |mask| {
                let inputs = SoftmaxGradient { mask, ..inputs };
                within(softmax_rows_backward(client, &problem, &inputs)?)
            };
            let mut expected = run(None)?;
            elements
                .iter()
                .zip(&mut expected)
                .filter(|(masked, _)| **masked)
                .for_each(|(_, dx)| *dx = 0.0);
            same(&run(Some(&mask))?, &expected)
                .map_err(|error| format!("the gradient of {problem:?}, {strides:?}: {error}"))?;
        }
    }
    Ok(())
}

fn same(actual: &[f64], expected: &[f64]) -> Result<(), String> {
    let differs = |(a, b): (&f64, &f64)| a != b && !(a.is_nan() && b.is_nan());
    match actual.iter().zip(expected).position(differs) {
        None => Ok(()),
        Some(at) => Err(format!("element {at}: {} instead of {}", actual[at], expected[at])),
    }
}

fn arguments(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let float = dtype(storage);
    let problem = SoftmaxProblem { rows: 6, classes: 9, row_stride: 9, dtype: float, out: float };
    let x = upload(client, &[1.0; 54], storage);
    let of = |dims, strides, elements, dtype| RowMask {
        buffer: Buffer::empty(client, elements, dtype),
        dims,
        strides,
    };
    let refused = [
        ("other rows", of([1, 2, 2], [0, 0, 9, 1], 54, U32)),
        ("too short", of([1, 2, 3], [0, 27, 9, 1], 53, U32)),
        ("no mask", of([1, 2, 3], [0, 27, 9, 1], 54, float)),
    ];
    for (what, mask) in refused {
        let outputs = SoftmaxOutputs::default();
        let forward = masked_softmax_rows(client, &problem, outputs, &x, Some((&mask, 0.0)), None);
        let inputs = SoftmaxGradient { mask: Some(&mask), ..SoftmaxGradient::of(&x, &x, 9) };
        let backward = softmax_rows_backward(client, &problem, &inputs);
        for result in [forward.map(drop), backward.map(drop)] {
            if !matches!(result, Err(KernelError::InvalidProblem { argument: "mask", .. })) {
                return Err(format!("{what}: {result:?}").into());
            }
        }
    }
    let mask = of([1, 2, 3], [0, 27, 9, 1], 54, U32);
    masked_softmax_rows(client, &problem, SoftmaxOutputs::default(), &x, Some((&mask, 0.0)), None)?;
    Ok(())
}
