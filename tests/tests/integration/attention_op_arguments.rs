//! What attention takes, and what it says of the rest.

use super::{Test, mask_of};
use blackburn::attention::{AttentionOptions, Dropout, attention, attention_packed};
use blackburn_reference::{
    attention::{AttentionCase, AttentionInputs, AttentionOptions as CaseOptions},
    random::normal,
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::tensors::float;
use burn::{
    prelude::*,
    tensor::{DType, FloatDType},
};
use libtest_mimic::Failed;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(super) const TESTS: [(&str, Test); 3] = [
    ("doubles_are_for_the_cpu", doubles),
    ("bad_arguments_are_named", bad_arguments),
    ("bad_starts_are_named", bad_starts),
];

fn doubles(device: &Device) -> Result<(), Failed> {
    let on_cpu = *device == Device::flex();
    if !on_cpu && !device.supports_dtype(FloatDType::F64) {
        return Ok(());
    }
    let numbers = [normal(1, 24, 1.0, Storage::F32), normal(2, 24, 1.0, Storage::F32)];
    let double = |values: &[f64]| {
        let data = TensorData::new(values.to_vec(), [1, 2, 3, 4]);
        Tensor::<4>::from_data(data, (device, DType::F64))
    };
    let call = || {
        let (q, k) = (double(&numbers[0]), double(&numbers[1]));
        attention(q, k.clone(), k, AttentionOptions::default())
    };
    if !on_cpu {
        return refused(&call, "`q`: expected f32, f16 or bf16, got F64");
    }
    let name = "doubles";
    let (batch, heads_q, heads_kv, seq_q, seq_kv, head_dim) = (1, 2, 2, 3, 3, 4);
    let options = CaseOptions::PLAIN;
    let case = AttentionCase { name, batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, options };
    let [q, k] = numbers.clone();
    let inputs =
        AttentionInputs { v: k.clone(), q, k, mask: None, bias: None, dout: vec![0.0; 24] };
    let expected = inputs.attention(case).forward().o;
    let actual: Vec<f64> = call().into_data().try_to_vec().map_err(|error| format!("{error:?}"))?;
    compare(&actual, &expected, &[1e-14; 24]).map_err(|error| error.to_string())?;
    Ok(())
}

/// Whether `call` panics and says so.
fn refused<const D: usize>(call: &dyn Fn() -> Tensor<D>, expected: &str) -> Result<(), Failed> {
    let panic = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(y) => return Err(format!("no panic but {:?}, where {expected:?}", y.dims()).into()),
        Err(panic) => panic,
    };
    match panic.downcast_ref::<String>() {
        Some(message) if message.contains(&format!("attention: argument {expected}")) => Ok(()),
        other => Err(format!("{other:?} does not say {expected:?}").into()),
    }
}

fn bad_arguments(device: &Device) -> Result<(), Failed> {
    type Options = AttentionOptions;
    let ones = |dims: [usize; 4]| Tensor::<4>::ones(dims, device);
    let shapes = |q, k, v, expected: &str| {
        refused(&|| attention(ones(q), ones(k), ones(v), Options::default()), expected)
    };
    let (q, k) = ([2, 4, 3, 8], [2, 2, 5, 8]);
    shapes([2, 4, 0, 8], k, k, "`q`: expected at least 1 in every dimension, got shape [2, 4, 0")?;
    shapes(q, [2, 0, 5, 8], k, "`k`: expected at least 1")?;
    shapes(q, k, [2, 2, 0, 8], "`v`: expected at least 1")?;
    shapes(q, [2, 2, 5, 7], k, "`k`: expected 8 in the last dimension")?;
    shapes(q, [1, 2, 5, 8], k, "`k`: expected 2 sequences")?;
    shapes(q, [2, 3, 5, 8], k, "`k`: expected a number of heads that divides the 4 of q, got 3")?;
    shapes(
        q,
        k,
        [2, 2, 4, 8],
        "`v`: expected the shape of k, [2, 2, 5, 8], got shape [2, 2, 4, 8]",
    )?;
    if *device != Device::flex() {
        let wide = [1, 1, 2, 257];
        shapes(wide, wide, wide, "`q`: expected at most 256 in the last dimension, got 257")?;
        let elsewhere = || Tensor::<4>::ones(k, &Device::flex());
        let call = || attention(ones(q), ones(k), elsewhere(), Options::default());
        refused(&call, "`v`: expected Device")?;
    }
    let half = || ones(k).cast(float(Storage::F16));
    refused(
        &|| attention(ones(q), half(), half(), Options::default()),
        "`k`: expected F32, as q is, got F16",
    )?;

    let refuses = |options: Options, expected: &str| {
        refused(&|| attention(ones(q), ones(k), ones(k), options.clone()), expected)
    };
    let plain = Options::default;
    let scale = |scale| Options { scale: Some(scale), ..plain() };
    refuses(scale(f64::NAN), "`scale`: expected a finite number, got NaN")?;
    refuses(scale(1e300), "`scale`: expected a finite number")?;
    for softcap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let options = Options { softcap: Some(softcap), ..plain() };
        refuses(options, "`softcap`: expected a finite number above zero")?;
    }
    for rate in [1.0, -0.1, f64::NAN] {
        let dropout = Some(Dropout::new(rate, 0));
        refuses(
            Options { dropout, ..plain() },
            "`dropout`: expected a rate of at least 0 and below",
        )?;
    }
    let mask = |dims: [usize; 4]| mask_of(&vec![false; dims.iter().product()], dims, device);
    for dims in [[3, 4, 3, 5], [2, 2, 3, 5], [2, 4, 2, 5], [2, 4, 3, 1]] {
        let expected = "[2 or 1, 4 or 1, 3 or 1, 5] as its shape, got";
        let options = Options { mask: Some(mask(dims)), ..plain() };
        refuses(options, &format!("`mask`: expected {expected} {dims:?}"))?;
        let options = Options { bias: Some(ones(dims)), ..plain() };
        refuses(options, &format!("`bias`: expected {expected} {dims:?}"))?;
    }
    let key_padding = Some(mask_of(&[false; 6], [2, 3], device));
    let options = Options { key_padding, ..plain() };
    refuses(options, "`key_padding`: expected [2, 5] as its shape, got [2, 3]")
}

fn bad_starts(device: &Device) -> Result<(), Failed> {
    let ones = |rows| Tensor::<3>::ones([rows, 2, 8], device);
    let refuses = |q: &[usize], kv: &[usize], options: AttentionOptions, expected: &str| {
        let call = || attention_packed(ones(6), ones(9), ones(9), q, kv, options.clone());
        refused(&call, expected)
    };
    let plain = AttentionOptions::default;
    for starts in [&[][..], &[0], &[0, 5], &[1, 6], &[0, 4, 2, 6]] {
        let expected = "`starts_q`: expected two numbers or more, ascending from 0 to 6, got";
        refuses(starts, &[0, 9], plain(), &format!("{expected} {starts:?}"))?;
    }
    refuses(&[0, 6], &[0, 10], plain(), "`starts_kv`: expected two numbers or more, ascending")?;
    refuses(
        &[0, 6],
        &[0, 3, 9],
        plain(),
        "`starts_kv`: expected 2 numbers, as starts_q has, got 3",
    )?;
    let bias = Some(Tensor::ones([1, 1, 6, 9], device));
    let options = AttentionOptions { bias, ..plain() };
    refuses(&[0, 6], &[0, 9], options, "`bias`: expected none with packed sequences")
}
