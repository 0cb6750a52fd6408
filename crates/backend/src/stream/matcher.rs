use super::pattern::{ExpectedScalar, Name, Pattern};
use burn_ir::{OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};

/// In what order a pattern's operations may come, and what holds of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rules {
    /// As they are written. All tensors have one shape, and none that is made on the way is read later.
    ElementWise,
    /// In any order that the flow of data allows, whatever the shapes.
    ///
    /// Where Burn joins two blocks it shows what stands in the second behind what stands in the first, so
    /// that steps which wait for nothing of the pattern come early or late.
    DataFlow,
}

/// How far a stream has followed a [`Pattern`], operation by operation.
#[derive(Clone, Debug)]
pub(crate) struct Matcher {
    pattern: Pattern,
    rules: Rules,
    /// Steps that were found, by their place in the pattern.
    found: Vec<usize>,
    /// Where each of them was in the stream.
    positions: Vec<usize>,
    /// Tensors by name, as their latest reader describes them.
    tensors: Vec<(Name, TensorIr)>,
    scalars: Vec<ExpectedScalar>,
    /// What the steps with a number make, in the order of the numbers.
    made_with_scalars: Vec<Name>,
}

impl Matcher {
    /// A stream that has not started on `pattern`, of element-wise operations that follow each other as
    /// they are written. All tensors have one shape, and none that is made on the way is read later.
    pub(crate) fn element_wise(pattern: Pattern) -> Self {
        Self::new(pattern, Rules::ElementWise)
    }

    /// A stream that has not started on `pattern`, whose operations may come in any order that the flow of
    /// data allows, whatever the shapes.
    pub(crate) fn data_flow(pattern: Pattern) -> Self {
        Self::new(pattern, Rules::DataFlow)
    }

    fn new(pattern: Pattern, rules: Rules) -> Self {
        let (found, positions) = (Vec::new(), Vec::new());
        let (tensors, scalars, made_with_scalars) = (Vec::new(), Vec::new(), Vec::new());
        Self { pattern, rules, found, positions, tensors, scalars, made_with_scalars }
    }

    /// Whether `operation`, at `position` of the stream, is one of the pattern that may come next, and reads
    /// and makes the tensors that it should. After a `false` nothing has changed.
    pub(crate) fn follow(&mut self, operation: &OperationIr, position: usize) -> bool {
        let all = self.pattern.len();
        let steps = match self.rules {
            Rules::ElementWise => self.found.len()..all.min(self.found.len() + 1),
            Rules::DataFlow => 0..all,
        };
        let mut open = steps.filter(|at| !self.found.contains(at));
        let next = open.find_map(|at| Some((at, self.tensors_with(at, operation)?)));
        let Some((at, tensors)) = next else { return false };
        let (made, step) = self.pattern[at];
        if let Some((ScalarIr::UInt(id), value)) = step.find(operation).and_then(|op| op.scalar) {
            self.scalars.push(ExpectedScalar { id, value });
            self.made_with_scalars.push(made);
        }
        self.tensors = tensors;
        self.found.push(at);
        self.positions.push(position);
        true
    }

    /// The tensors there are once `operation` was taken for that step, if it can be.
    fn tensors_with(&self, at: usize, operation: &OperationIr) -> Option<Vec<(Name, TensorIr)>> {
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
        let is_last = self.found.len() + 1 == self.pattern.len();
        let fits = self.rules == Rules::DataFlow
            || tensors.iter().all(|(_, tensor)| tensor.shape == tensors[0].1.shape)
                && (!is_last || self.intermediates_are_dead(&tensors));
        fits.then_some(tensors)
    }

    /// Whether the step that makes that tensor was found.
    pub(crate) fn has(&self, made: Name) -> bool {
        self.found.iter().any(|at| self.pattern[*at].0 == made)
    }

    /// Whether every step was found.
    pub(crate) fn is_complete(&self) -> bool {
        self.found.len() == self.pattern.len()
    }

    /// What the first step that was not found makes.
    pub(crate) fn awaits(&self) -> Option<Name> {
        let open = (0..self.pattern.len()).find(|at| !self.found.contains(at));
        open.map(|at| self.pattern[at].0)
    }

    /// Where the steps that were found are in the stream.
    pub(crate) fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// Where the step that makes that tensor is in the stream.
    pub(crate) fn position_of(&self, made: Name) -> Option<usize> {
        let at = self.found.iter().position(|at| self.pattern[*at].0 == made)?;
        self.positions.get(at).copied()
    }

    /// The tensor of that name, with the status that its last reader gives it.
    pub(crate) fn tensor(&self, name: Name) -> Option<&TensorIr> {
        self.tensors.iter().find(|(other, _)| *other == name).map(|(_, tensor)| tensor)
    }

    /// What the last step makes, once it was found.
    pub(crate) fn output(&self) -> Option<&TensorIr> {
        self.pattern.last().and_then(|(name, _)| self.tensor(name))
    }

    /// Whether what a step made is read by the pattern alone.
    pub(crate) fn is_dead(&self, name: Name) -> bool {
        self.tensor(name).is_some_and(|tensor| tensor.status == TensorStatus::ReadWrite)
    }

    /// The tensor of that name, if others than the pattern read it later: then it has to be written.
    pub(crate) fn kept(&self, name: Name) -> Option<TensorIr> {
        self.tensor(name).filter(|_| !self.is_dead(name)).cloned()
    }

    /// The numbers to check when the operations run.
    pub(crate) fn scalars(&self) -> &[ExpectedScalar] {
        &self.scalars
    }

    /// Where the number is by which a step made that tensor.
    pub(crate) fn scalar_of(&self, made: Name) -> Option<u64> {
        let at = self.made_with_scalars.iter().position(|other| *other == made)?;
        self.scalars.get(at).map(|scalar| scalar.id)
    }

    /// Whether `tensor` has the shape of the pattern's tensors, if these have one.
    pub(crate) fn fits(&self, tensor: &TensorIr) -> bool {
        self.tensors.first().is_none_or(|(_, first)| first.shape == tensor.shape)
    }

    fn makes(&self, name: Name) -> bool {
        self.pattern.iter().any(|(made, _)| *made == name)
    }

    /// Whether a step that was found reads or makes that tensor.
    pub(crate) fn knows(&self, id: TensorId) -> bool {
        self.tensors.iter().any(|(_, tensor)| tensor.id == id)
    }

    /// Whether a step that was found makes that tensor.
    pub(crate) fn has_made(&self, id: TensorId) -> bool {
        self.tensors.iter().any(|(name, tensor)| tensor.id == id && self.makes(name))
    }

    fn intermediates_are_dead(&self, tensors: &[(Name, TensorIr)]) -> bool {
        let output = self.pattern.last().map(|(name, _)| *name);
        let mut made = tensors.iter().filter(|(name, _)| self.makes(name) && output != Some(*name));
        made.all(|(_, tensor)| tensor.status == TensorStatus::ReadWrite)
    }
}
