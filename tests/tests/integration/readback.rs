//! Numbers that are asked for, and read when the device has more to do.

use blackburn_backend::readback::Readback;
use blackburn_tests::on_burn_device;
use burn::{prelude::*, tensor::FloatDType};
use libtest_mimic::{Failed, Trial};

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 3] = [
    ("they_are_those_of_the_moment_when_they_were_asked_for", before),
    ("they_come_in_f32_from_other_types", in_f32),
    ("elements_that_do_not_follow_each_other_come_too", apart),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(name, test): (&str, Test)| {
        let name = format!("readback::{name}");
        Trial::ignorable_test(name, move || on_burn_device(|device| test(&device)))
    };
    TESTS.into_iter().map(trial).collect()
}

fn compare(found: Readback, expected: &[f32]) -> Result<(), Failed> {
    let found = found.wait()?;
    (found == expected).then_some(()).ok_or_else(|| format!("{found:?}").into())
}

fn before(device: &Device) -> Result<(), Failed> {
    let numbers = Tensor::<1>::from_floats([1.0, 2.5, -3.0], device).mul_scalar(2.0);
    let asked = Readback::of(numbers.clone());
    // Takes the memory over, if nobody else has the numbers.
    let later = Readback::of(numbers.add_scalar(100.0).mul_scalar(0.5));
    compare(later, &[51.0, 52.5, 47.0])?;
    compare(asked, &[2.0, 5.0, -6.0])
}

fn in_f32(device: &Device) -> Result<(), Failed> {
    let numbers = Tensor::<1>::from_floats([0.25, -7.0], device).cast(FloatDType::F16);
    compare(Readback::of(numbers), &[0.25, -7.0])
}

fn apart(device: &Device) -> Result<(), Failed> {
    let numbers = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device);
    let column = numbers.slice([0..3, 1..2]).squeeze_dim::<1>(1);
    compare(Readback::of(column), &[2.0, 4.0, 6.0])
}
