//! The faults, as data.
//!
//! A fault replaces a text that its file must hold exactly once. [`device`] and [`host`] replace an
//! expression; [`statement`] replaces statements of device code. Both versions are compiled, so both
//! must have the type that the place takes, and neither may declare a name that is used behind it.

mod attention;
mod backend;
mod conv;
mod cross_entropy;
mod elementwise;
mod indexing;
mod interpolate;
mod matmul;
mod optimizers;
mod pool;
mod rows;
mod tensor_cores;

use std::fmt;

/// Which run a fault belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suite {
    /// Code that runs on every device, tested on a software one.
    Lavapipe,
    /// Code of the tensor-core families, tested on an NVIDIA GPU.
    TensorCores,
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lavapipe => "lavapipe",
            Self::TensorCores => "cuda-tensor-cores",
        })
    }
}

/// What code a fault is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An expression that the host evaluates.
    Host,
    /// An expression of a kernel.
    Device,
    /// Statements of a kernel.
    DeviceStatement,
}

/// A fault that can be planted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fault {
    /// From 1, in the table's order.
    pub(super) number: usize,
    pub(super) suite: Suite,
    pub(super) file: &'static str,
    /// Parts of the names of the tests that ought to notice it.
    pub(super) tests: &'static [&'static str],
    pub(super) kind: Kind,
    /// What is wrong with it, in a few words.
    pub(super) what: &'static str,
    pub(super) find: &'static str,
    pub(super) replace: &'static str,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:4} {}: {}", self.number, self.file, self.what)
    }
}

/// A file's faults, and the tests of what it holds.
struct InFile {
    file: &'static str,
    tests: &'static [&'static str],
    rows: &'static [Row],
}

/// A fault of a file.
struct Row {
    kind: Kind,
    what: &'static str,
    find: &'static str,
    replace: &'static str,
}

const fn device(what: &'static str, find: &'static str, replace: &'static str) -> Row {
    Row { kind: Kind::Device, what, find, replace }
}

const fn statement(what: &'static str, find: &'static str, replace: &'static str) -> Row {
    Row { kind: Kind::DeviceStatement, what, find, replace }
}

const fn host(what: &'static str, find: &'static str, replace: &'static str) -> Row {
    Row { kind: Kind::Host, what, find, replace }
}

/// All faults of all suites.
pub(super) fn all() -> Vec<Fault> {
    let everywhere = [
        elementwise::FILES,
        rows::FILES,
        cross_entropy::FILES,
        optimizers::FILES,
        matmul::FILES,
        conv::FILES,
        pool::FILES,
        interpolate::FILES,
        indexing::FILES,
        attention::FILES,
        backend::FILES,
    ];
    let everywhere = everywhere.into_iter().flatten().map(|in_file| (Suite::Lavapipe, in_file));
    let tensor_cores = tensor_cores::FILES.iter().chain(conv::TENSOR_CORE_FILES);
    let tensor_cores = tensor_cores.map(|in_file| (Suite::TensorCores, in_file));
    everywhere
        .chain(tensor_cores)
        .flat_map(|(suite, in_file)| in_file.rows.iter().map(move |row| (suite, in_file, row)))
        .enumerate()
        .map(|(at, (suite, in_file, row))| {
            let InFile { file, tests, .. } = *in_file;
            let Row { kind, what, find, replace } = *row;
            Fault { number: at + 1, suite, file, tests, kind, what, find, replace }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_faults_as_the_figure_takes() {
        let all = all();
        let of = |suite| all.iter().filter(|fault| fault.suite == suite).count();
        assert!(of(Suite::Lavapipe) >= 100, "{}", of(Suite::Lavapipe));
        assert!(of(Suite::TensorCores) >= 30, "{}", of(Suite::TensorCores));
    }
}
