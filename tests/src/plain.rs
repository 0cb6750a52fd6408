//! Judging whole modules by the plain computation: the same formula, in the same type and on the same
//! device, with no provider of Blackburn's or Burn's, so that each operation runs by itself.
//!
//! Both are compared with the formula in f64. What kernels make of a module may err by twice what the
//! plain computation errs by at worst in the same tensor, and one unit in the last place of the largest
//! number: in its type, or in that which products cut it to, TF32 where CUDA multiplies f32. Plain products
//! may be more exact than that: Burn picks for each shape whether it runs on tensor cores. The layers of an
//! attention count as one tensor each of weights and biases.
//!
//! Providers are settled once a process, so the plain computation has a process of its own: the test
//! runs there too, says how far off each tensor is, and judges nothing.

use crate::{on_burn_device_with, run_alone};
use blackburn_backend::providers;
use blackburn_reference::{matmul::MatmulPrecision, storage::Storage, tolerance::compare};
use burn::tensor::Device;
use libtest_mimic::{Failed, Trial};
use std::{collections::BTreeMap, env};

/// Set in the process that computes plainly.
const PLAIN: &str = "BLACKBURN_TEST_PLAIN";
/// What that process starts the line with that it ends with.
const MARK: &str = "errors of the plain computation:";

/// Tensors by name.
pub type Tensors = Vec<(String, Vec<f64>)>;

/// The largest error of each tensor of each subject, by their names.
type Errors = BTreeMap<String, BTreeMap<String, f64>>;

/// What a test in one type says of its subjects.
#[derive(Debug)]
pub struct Judge {
    storage: Storage,
    /// One unit in the last place, relative to a number.
    unit: f64,
    is_plain: bool,
    errors: Errors,
}

/// A test of modules in `storage`, which gives a [`Judge`] its subjects; ignored where the device does
/// not compute in that type.
pub fn trial(
    name: String,
    storage: Storage,
    test: impl Fn(&Device, &mut Judge) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        on_burn_device_with(storage, |device, client| {
            let is_plain = env::var_os(PLAIN).is_some();
            let errors = if is_plain { Errors::new() } else { plain_errors(&name)? };
            let unit = match (storage, client.name()) {
                (Storage::F32, "cuda") => MatmulPrecision::tf32().operand_error,
                _ => 2.0 * storage.unit_roundoff(),
            };
            let mut judge = Judge { storage, unit, is_plain, errors };
            test(device, &mut judge)?;
            if is_plain {
                eprintln!("{MARK}{}", serde_json::to_string(&judge.errors)?);
            }
            Ok(())
        })
    })
}

/// What the test of that name says in a process without providers.
fn plain_errors(name: &str) -> Result<Errors, Failed> {
    let variables = [(PLAIN, "1"), ("BLACKBURN_DISABLE", &providers::names().join(","))];
    let output = run_alone(name, &variables)?;
    let log = String::from_utf8_lossy(&output.stderr);
    let errors = log.lines().find_map(|line| line.strip_prefix(MARK));
    let errors = errors.ok_or_else(|| format!("no errors were reported: {log}"))?;
    Ok(serde_json::from_str(errors)?)
}

impl Judge {
    /// Whether this process computes plainly.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Whether what `served` computes is close enough to `exact`, where `plain` says how close that is.
    ///
    /// # Errors
    ///
    /// The worst number of the first tensor that is off.
    pub fn check(
        &mut self,
        subject: &str,
        exact: &Tensors,
        plain: impl FnOnce() -> Result<Tensors, Failed>,
        served: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        if !self.is_plain {
            return self.within(subject, exact, &served()?);
        }
        let plain = plain()?;
        expect_alike(&plain, exact)?;
        let errors = plain.iter().zip(exact).map(|((name, plain), (_, exact))| {
            let errors = plain.iter().zip(exact).map(|(p, e)| (p - e).abs());
            // `max` would pass over NaN.
            let worst = errors.fold(0f64, |w, e| if e > w || e.is_nan() { e } else { w });
            match worst.is_finite() {
                true => Ok((name.clone(), worst)),
                false => Err(format!("{subject}: plainly computed, {name} is off by {worst}")),
            }
        });
        let errors: BTreeMap<String, f64> = errors.collect::<Result<_, String>>()?;
        self.errors.insert(subject.into(), errors);
        Ok(())
    }

    /// The negative control: whether what `faulty` computes, which is `subject` with a fault, is found
    /// to be wrong.
    ///
    /// # Errors
    ///
    /// A fault that passes.
    pub fn expect_caught(
        &self,
        subject: &str,
        fault: &str,
        exact: &Tensors,
        faulty: impl FnOnce() -> Result<Tensors, Failed>,
    ) -> Result<(), Failed> {
        if self.is_plain {
            return Ok(());
        }
        match self.within(subject, exact, &faulty()?) {
            Err(_) => Ok(()),
            Ok(()) => Err(format!("{subject}: {fault} passes").into()),
        }
    }

    fn within(&self, subject: &str, exact: &Tensors, actual: &Tensors) -> Result<(), Failed> {
        let errors = self.errors.get(subject);
        let errors = errors.ok_or_else(|| format!("{subject} was not computed plainly"))?;
        expect_alike(actual, exact)?;
        for ((name, actual), (_, expected)) in actual.iter().zip(exact) {
            let of_group = |other: &&String| group(other) == group(name);
            let plain = errors.iter().filter(|(other, _)| of_group(other));
            let plain = plain.fold(0f64, |worst, (_, error)| worst.max(*error));
            let alike = exact.iter().filter(|(other, _)| of_group(&other));
            let largest = alike.flat_map(|(_, e)| e).fold(0f64, |most, e| most.max(e.abs()));
            let bound = 2.0 * plain + self.unit * largest + self.storage.underflow();
            compare(actual, expected, &vec![bound; expected.len()]).map_err(|error| {
                format!("{subject} in {:?}, {name} ({plain:e} plainly): {error}", self.storage)
            })?;
        }
        Ok(())
    }
}

/// Tensors with the same group are judged alike. The layers of an attention are one: what is off in its
/// weights reaches all of them, and the gradient of a key's bias is a sum of terms as large as theirs
/// that cancel out.
fn group(name: &str) -> String {
    let is_projection = |part: &&str| ["query", "key", "value", "output"].contains(part);
    let parts: Vec<&str> = name.split('.').collect();
    let projection = parts.iter().rev().nth(1).filter(|part| is_projection(part));
    match projection {
        Some(_) => format!("{}.{}", parts[..parts.len() - 2].join("."), parts[parts.len() - 1]),
        None => name.to_string(),
    }
}

fn expect_alike(actual: &Tensors, exact: &Tensors) -> Result<(), Failed> {
    let shape = |tensors: &Tensors| -> Vec<(String, usize)> {
        tensors.iter().map(|(name, values)| (name.clone(), values.len())).collect()
    };
    let (actual, exact) = (shape(actual), shape(exact));
    if actual == exact {
        return Ok(());
    }
    Err(format!("tensors {actual:?}, where {exact:?} are expected").into())
}
