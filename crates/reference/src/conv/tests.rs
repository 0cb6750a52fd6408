use super::*;
use crate::{gradcheck::check_derivative, random::normal, storage::Storage};

/// Everything that shifts an index, differently in each dimension.
const SKEWED: ConvCase = ConvCase {
    batch: 2,
    in_channels: 4,
    out_channels: 6,
    groups: 2,
    input: [7, 9],
    kernel: [3, 2],
    stride: [2, 3],
    padding: [[1, 2], [3, 0]],
    dilation: [2, 1],
};

fn tensor(seed: u64, shape: [usize; 4]) -> Vec<f64> {
    normal(seed, shape.iter().product(), 1.0, Storage::F32)
}

/// The sum of y, weighed: what gradients are taken of.
fn weighed(case: &ConvCase, x: &[f64], w: &[f64], dy: &[f64]) -> f64 {
    let y = conv(case, ConvPass::Fprop, x, w).values;
    y.iter().zip(dy).map(|(y, dy)| y * dy).sum()
}

fn moved(values: &[f64], at: usize, value: f64) -> Vec<f64> {
    let mut values = values.to_vec();
    values[at] = value;
    values
}

#[test]
fn gradients_are_those_of_central_differences() {
    for case in [SKEWED, ConvCase::square(1, [3, 2], 4, 3).padded(1), SKEWED.strided(1)] {
        let (x, w) = (tensor(1, case.x_shape()), tensor(2, case.weight_shape()));
        let dy = tensor(3, case.y_shape());
        let dx = conv(&case, ConvPass::Dgrad, &dy, &w).values;
        for at in 0..x.len() {
            let function = |value| weighed(&case, &moved(&x, at, value), &w, &dy);
            check_derivative(function, |_| dx[at], x[at]).unwrap();
        }
        let dw = conv(&case, ConvPass::Wgrad, &x, &dy).values;
        for at in 0..w.len() {
            let function = |value| weighed(&case, &x, &moved(&w, at, value), &dy);
            check_derivative(function, |_| dw[at], w[at]).unwrap();
        }
    }
}

#[test]
fn a_single_tap_in_the_middle_copies_the_image() {
    let case = ConvCase::square(2, [1, 1], 5, 3).padded(1);
    let x = tensor(1, case.x_shape());
    let mut w = vec![0.0; 9];
    w[4] = 1.0;
    assert_eq!(conv(&case, ConvPass::Fprop, &x, &w).values, x);
    // A tap above looks at the row above, and at the padding there.
    w.swap(4, 1);
    let y = conv(&case, ConvPass::Fprop, &x, &w).values;
    assert_eq!((&y[..5], &y[5..25]), (&[0.0; 5][..], &x[..20]));
}

#[test]
fn sizes_count_padding_stride_and_dilation() {
    assert_eq!(SKEWED.output(), [3, 4]);
    assert_eq!(SKEWED.weight_shape(), [6, 2, 3, 2]);
    assert_eq!(ConvPass::ALL.map(|pass| SKEWED.terms(pass)), [12, 18, 24]);
    // ResNet's first layer.
    let stem = ConvCase::square(1, [3, 64], 224, 7).strided(2).padded(3);
    assert_eq!(stem.output(), [112; 2]);
    assert_eq!(
        stem.to_string(),
        "N1C3H224W224K64R7S7 stride [2, 2] padding [[3, 3], [3, 3]] dilation [1, 1] groups 1"
    );
}

#[test]
fn groups_do_not_see_each_other() {
    let case = ConvCase::square(1, [4, 4], 3, 3).padded(1).grouped(2);
    let (x, w) = (tensor(1, case.x_shape()), tensor(2, case.weight_shape()));
    let before = conv(&case, ConvPass::Fprop, &x, &w).values;
    let after = conv(&case, ConvPass::Fprop, &moved(&x, 0, 100.0), &w).values;
    assert_ne!(before[..18], after[..18]);
    assert_eq!(before[18..], after[18..]);
}

#[test]
fn a_result_that_was_rounded_once_is_within_bounds_and_a_lost_tap_is_not() {
    use crate::matmul::MatmulPrecision;

    let case = ConvCase::square(2, [8, 8], 6, 3).padded(1);
    let (x, w) = (tensor(1, case.x_shape()), tensor(2, case.weight_shape()));
    let sums = conv(&case, ConvPass::Fprop, &x, &w);
    let precision = MatmulPrecision::exact(Storage::F16);
    let rounded: Vec<f64> = sums.values.iter().map(|y| Storage::F16.round(*y)).collect();
    precision.check_random(&rounded, &sums.random()).unwrap();
    let without: Vec<f64> =
        w.iter().enumerate().map(|(at, w)| if at % 9 == 8 { 0.0 } else { *w }).collect();
    let short = conv(&case, ConvPass::Fprop, &x, &without).values;
    assert!(precision.check_random(&short, &sums.random()).is_err());
}
