//! Names of registers, variables and labels, by the scope that declares them.

use super::{
    instruction::{File, Operand, Reg},
    syntax::bytes_of,
};
use crate::error::ParseError;
use std::collections::HashMap;

/// How many registers of each kind a thread has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegisterCounts {
    pub(crate) predicates: u32,
    pub(crate) words: u32,
    pub(crate) doubles: u32,
}

impl RegisterCounts {
    fn take(&mut self, file: File, count: u32) -> u32 {
        let counter = match file {
            File::Predicate => &mut self.predicates,
            File::Word => &mut self.words,
            File::Double => &mut self.doubles,
        };
        let first = *counter;
        *counter += count;
        first
    }
}

/// What one pair of braces declares.
#[derive(Debug, Default)]
struct Scope {
    parent: Option<usize>,
    single: HashMap<String, Reg>,
    /// The first register of those that end in a number, and how many there are.
    numbered: HashMap<String, (Reg, u32)>,
    values: HashMap<String, u64>,
    labels: HashMap<String, usize>,
}

/// All scopes of a kernel.
#[derive(Debug)]
pub(super) struct Names {
    scopes: Vec<Scope>,
    current: usize,
    pub(super) counts: RegisterCounts,
}

impl Names {
    pub(super) fn new() -> Self {
        Self { scopes: vec![Scope::default()], current: 0, counts: RegisterCounts::default() }
    }

    pub(super) fn open(&mut self) {
        self.scopes.push(Scope { parent: Some(self.current), ..Scope::default() });
        self.current = self.scopes.len() - 1;
    }

    pub(super) fn close(&mut self) {
        self.current = self.scopes[self.current].parent.unwrap_or(0);
    }

    /// The scope that is open, for [`Names::label`].
    pub(super) fn scope(&self) -> usize {
        self.current
    }

    pub(super) fn registers(
        &mut self,
        line: u32,
        ty: &str,
        name: &str,
        count: Option<u32>,
    ) -> Result<(), ParseError> {
        let file = match ty {
            ".pred" => File::Predicate,
            _ => match bytes_of(ty) {
                Some(..=4) => File::Word,
                Some(8) => File::Double,
                _ => return Err(ParseError::new(line, format!("registers of type `{ty}`"))),
            },
        };
        let index = self.counts.take(file, count.unwrap_or(1));
        let first = Reg { file, index };
        let scope = &mut self.scopes[self.current];
        match count {
            Some(count) => drop(scope.numbered.insert(name.to_owned(), (first, count))),
            None => drop(scope.single.insert(name.to_owned(), first)),
        }
        Ok(())
    }

    /// An address that a name stands for.
    pub(super) fn define(&mut self, name: &str, value: u64) {
        self.scopes[self.current].values.insert(name.to_owned(), value);
    }

    pub(super) fn place_label(&mut self, name: &str, at: usize) {
        self.scopes[self.current].labels.insert(name.to_owned(), at);
    }

    fn outward(&self, from: usize) -> impl Iterator<Item = &Scope> {
        std::iter::successors(Some(from), |at| self.scopes[*at].parent).map(|at| &self.scopes[at])
    }

    pub(super) fn register(&self, name: &str) -> Option<Reg> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number: Option<u32> = name[prefix.len()..].parse().ok();
        self.outward(self.current).find_map(|scope| {
            scope.single.get(name).copied().or_else(|| {
                let (first, count) = scope.numbered.get(prefix)?;
                let number = number.filter(|number| number < count)?;
                Some(Reg { index: first.index + number, ..*first })
            })
        })
    }

    pub(super) fn value(&self, name: &str) -> Option<Operand> {
        let value = self.outward(self.current).find_map(|scope| scope.values.get(name))?;
        Some(Operand::Value(*value))
    }

    /// Where a label lies that is named in `scope`.
    pub(super) fn label(&self, scope: usize, name: &str) -> Option<usize> {
        self.outward(scope).find_map(|scope| scope.labels.get(name)).copied()
    }
}
