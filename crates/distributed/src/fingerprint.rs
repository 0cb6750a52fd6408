//! What a model looks like, so that ranks with different ones are noticed.

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{Bool, Int, Tensor},
};

/// A line for each parameter: its path, shape and type.
pub(crate) fn of<M: Module>(module: &M) -> Vec<String> {
    let mut lines = Lines::default();
    module.visit(&mut lines);
    lines.found
}

/// The first line in which ranks differ, as each of them has it.
pub(crate) fn difference(all: &[Vec<String>]) -> Option<Vec<String>> {
    let longest = all.iter().map(Vec::len).max()?;
    (0..longest).find_map(|line| {
        let lines: Vec<Option<&String>> = all.iter().map(|lines| lines.get(line)).collect();
        let differs = lines.windows(2).any(|pair| pair[0] != pair[1]);
        let shown = |line: &Option<&String>| match line {
            Some(line) => (*line).clone(),
            None => "no further parameter".into(),
        };
        differs.then(|| lines.iter().map(shown).collect())
    })
}

/// A line for each parameter that is trained: its path, and a checksum of its numbers.
pub(crate) fn with_numbers<M: Module>(module: &M) -> Vec<String> {
    let mut lines = Lines { has_numbers: true, ..Lines::default() };
    module.visit(&mut lines);
    lines.found
}

#[derive(Default)]
struct Lines {
    path: Vec<String>,
    /// Whether lines tell of the numbers.
    has_numbers: bool,
    found: Vec<String>,
}

impl Lines {
    fn note(&mut self, shape: &[usize], dtype: impl std::fmt::Debug, trains: bool) {
        let frozen = if trains { "" } else { ", frozen" };
        self.found.push(format!("{} {shape:?} in {dtype:?}{frozen}", self.path.join(".")));
    }
}

impl ModuleVisitor for Lines {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        if !self.has_numbers {
            self.note(&base.dims(), base.dtype(), base.is_require_grad());
        } else if base.is_require_grad() {
            let numbers = base.without_autodiff().into_data();
            let sum = crc32c::crc32c(numbers.as_bytes());
            self.found.push(format!("{} with the checksum {sum:08x}", self.path.join(".")));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        if !self.has_numbers {
            let value = param.val();
            self.note(&value.dims(), value.dtype(), true);
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        if !self.has_numbers {
            let value = param.val();
            self.note(&value.dims(), value.dtype(), true);
        }
    }
}
