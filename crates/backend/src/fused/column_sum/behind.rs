use super::Sum;
use crate::stream::{Next, Part, SingleOperation};
use burn_ir::{BaseOperationIr, OperationIr, TensorIr};

/// Looks for the sum of the rows of a gradient, the gradient of a bias, right behind what makes the gradient,
/// or behind a view of it.
#[derive(Clone, Debug)]
pub(crate) struct RowSumSearch {
    /// The gradient, or the view of it.
    value: TensorIr,
    /// The position of the view.
    view: Option<usize>,
    /// The sum and its position.
    sum: Option<(usize, Sum)>,
}

impl RowSumSearch {
    /// The search behind the operation that makes `gradient`.
    pub(crate) fn behind(gradient: TensorIr) -> Self {
        Self { value: gradient, view: None, sum: None }
    }

    /// Whether the next operation is the sum, or the view that it may be of.
    pub(crate) fn follow(&mut self, operation: &OperationIr, position: usize) -> Next {
        if let OperationIr::BaseFloat(BaseOperationIr::Reshape(op)) = operation
            && op.input.id == self.value.id
            && self.view.is_none()
        {
            self.value = op.out.clone();
            self.view = Some(position);
            return Next::Taken;
        }
        let sum = Sum::of(operation, &());
        match sum.filter(|sum| sum.input.id == self.value.id && sum.is_of_rows()) {
            Some(sum) => {
                self.sum = Some((position, sum));
                Next::Last
            }
            None => Next::Refused,
        }
    }

    /// The sum, if it was found.
    pub(crate) fn found(&self) -> Option<&Sum> {
        self.sum.as_ref().map(|(_, sum)| sum)
    }

    /// The view, which runs as Burn runs it, and the sum.
    pub(crate) fn parts(&self) -> Vec<Part<Sum>> {
        let Some((position, sum)) = &self.sum else { return Vec::new() };
        let view = Part::Unfused(self.view.into_iter().collect());
        vec![view, Part::Replaced(vec![*position], sum.clone())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::emit::{sum_along, tensor, view};
    use burn_ir::TensorStatus::NotInit;

    const SHAPE: [usize; 2] = [1, 2];

    /// What became of the last of `operations`, behind tensor 1.
    fn follow(operations: &[OperationIr]) -> (RowSumSearch, Next) {
        let mut search = RowSumSearch::behind(tensor(1, SHAPE, NotInit));
        let followed = operations.iter().enumerate().map(|(at, op)| search.follow(op, at));
        let last = followed.last().unwrap();
        (search, last)
    }

    fn sum(id: u64) -> OperationIr {
        sum_along(id, SHAPE, 0)
    }

    #[test]
    fn a_sum_is_found_behind_the_gradient_or_one_view_of_it() {
        let (search, last) = follow(&[sum(1)]);
        assert!(last == Next::Last && search.found().is_some());
        let (search, last) = follow(&[view(1, SHAPE, 5), sum(5)]);
        assert_eq!(last, Next::Last);
        assert_eq!(search.parts().iter().map(Part::len).sum::<usize>(), 2);
        let views = [view(1, SHAPE, 5), view(5, SHAPE, 6)];
        assert_eq!(follow(&views).1, Next::Refused);
    }

    #[test]
    fn a_sum_of_something_else_is_left_alone() {
        assert_eq!(follow(&[sum(2)]).1, Next::Refused, "another tensor");
        assert_eq!(follow(&[view(2, SHAPE, 5)]).1, Next::Refused, "a view of another");
        // Behind a view the gradient itself is no longer waited for.
        assert_eq!(follow(&[view(1, SHAPE, 5), sum(1)]).1, Next::Refused);
        let of_a_part = sum_along(1, [1, 2, 3], 1);
        assert_eq!(follow(&[of_a_part]).1, Next::Refused, "sums of groups of rows");
    }
}
