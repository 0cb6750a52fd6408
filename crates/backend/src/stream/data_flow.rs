use super::{ExpectedScalar, Name, Pattern};
use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};

/// How far a stream has followed a pattern in any order that the flow of data allows, whatever the shapes.
///
/// Where Burn joins two blocks it shows what stands in the second behind what stands in the first, so that
/// steps which wait for nothing of the pattern come early or late.
#[derive(Clone, Debug)]
pub(crate) struct DataFlow {
    pattern: Pattern,
    /// Steps that were found, by their place in the pattern.
    found: Vec<usize>,
    /// Tensors by name, as their latest reader describes them.
    tensors: Vec<(Name, TensorIr)>,
    scalars: Vec<ExpectedScalar>,
}

impl DataFlow {
    /// A stream that has not started on `pattern`.
    pub(crate) fn new(pattern: Pattern) -> Self {
        Self { pattern, found: Vec::new(), tensors: Vec::new(), scalars: Vec::new() }
    }

    /// Whether `operation` is one of the pattern that has not come yet, and reads and makes the tensors
    /// that it should. After a `false` nothing has changed.
    pub(crate) fn follow(&mut self, operation: &OperationIr) -> bool {
        let open = (0..self.pattern.len()).filter(|at| !self.found.contains(at));
        let next = open.into_iter().find_map(|at| Some((at, self.with(at, operation)?)));
        let Some((at, tensors)) = next else { return false };
        let (_, step) = self.pattern[at];
        if let Some((ScalarIr::UInt(id), value)) = step.find(operation).and_then(|op| op.scalar) {
            self.scalars.push(ExpectedScalar { id, value });
        }
        self.tensors = tensors;
        self.found.push(at);
        true
    }

    /// The tensors there are once `operation` was taken for that step, if it can be.
    fn with(&self, at: usize, operation: &OperationIr) -> Option<Vec<(Name, TensorIr)>> {
        let (made, step) = self.pattern[at];
        let found = step.find(operation)?;
        let is_placeholder = |(scalar, _)| matches!(scalar, ScalarIr::UInt(_));
        if !found.scalar.is_none_or(is_placeholder) {
            return None;
        }
        let mut tensors = self.tensors.clone();
        for (name, tensor) in found.reads {
            match tensors.iter_mut().find(|(other, _)| *other == name) {
                Some((_, known)) if known.id == tensor.id => known.status = tensor.status,
                Some(_) => return None,
                // A first mention is an input, which nothing in the pattern may have made.
                None if self.makes(name) || self.has_made(tensor.id) => return None,
                None => tensors.push((name, tensor.clone())),
            }
        }
        tensors.push((made, found.out.clone()));
        Some(tensors)
    }

    /// Whether the step that makes that tensor was found.
    pub(crate) fn has(&self, made: Name) -> bool {
        self.found.iter().any(|at| self.pattern[*at].0 == made)
    }

    /// Whether every step was found.
    pub(crate) fn is_complete(&self) -> bool {
        self.found.len() == self.pattern.len()
    }

    /// The tensor of that name, with the status that its last reader gives it.
    pub(crate) fn tensor(&self, name: Name) -> Option<&TensorIr> {
        self.tensors.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// Whether what a step made is read by the pattern alone.
    pub(crate) fn is_dead(&self, name: Name) -> bool {
        self.tensor(name).is_some_and(|tensor| tensor.status == TensorStatus::ReadWrite)
    }

    /// The numbers to check when the operations run.
    pub(crate) fn scalars(&self) -> &[ExpectedScalar] {
        &self.scalars
    }

    fn makes(&self, name: Name) -> bool {
        self.pattern.iter().any(|(made, _)| *made == name)
    }

    fn has_made(&self, id: TensorId) -> bool {
        self.tensors.iter().any(|(name, tensor)| tensor.id == id && self.makes(name))
    }
}
