//! The provider that takes steps of Burn's own AdamW together.
//!
//! It emits some fifteen element-wise operations for each parameter. Burn's fusion makes a kernel of those of parameters
//! that have one shape and follow each other, and names every number and tensor of it anew in each step, on the thread
//! that is the slowest of a loop whose passes are not recorded. Parameters that the pass before has cast to 16 bits are
//! cast for the next one, too ([`kept_casts`]).

use crate::{
    declined::unsupported,
    ops::{copies, overwrite::memory_for},
    steps::operation::stepped,
    stream::{
        ANY_NUMBER, Claim, Done, Elapsed, Matcher, Moment, Name, Next, Part, Pattern,
        PatternStep as Step, Replacement, Search, burn_score, number,
    },
    tensors::{
        Tensors, kept_casts, known_output, register_cube_tensor, rows_of, shape_of,
        take_cube_tensor,
    },
};
use blackburn_kernels::{
    KernelError,
    adamw::AdamwFactors,
    step::{MOST_TENSORS, Update},
};
use burn_ir::{
    FloatOperationIr as Float, NumericOperationIr as Numeric, OperationIr, TensorIr, TensorStatus,
};
use burn_std::DType;
use serde::{Deserialize, Serialize};

const OP: &str = "adamw_update";

/// Elements of a parameter, well within what the kernel counts. Larger ones are Burn's.
const MOST_ELEMENTS: usize = 1 << 31;

/// A parameter's step, from the second one on: the first makes moments of nothing.
const STEP: Pattern = &[
    ("decayed first", Step::MulScalar("first", ANY_NUMBER)),
    ("share of gradient", Step::MulScalar("gradient", ANY_NUMBER)),
    ("new first", Step::Add("decayed first", "share of gradient")),
    ("square", Step::Mul("gradient", "gradient")),
    ("share of square", Step::MulScalar("square", ANY_NUMBER)),
    ("decayed second", Step::MulScalar("second", ANY_NUMBER)),
    ("new second", Step::Add("decayed second", "share of square")),
    ("corrected first", Step::DivScalar("new first", ANY_NUMBER)),
    ("corrected second", Step::DivScalar("new second", ANY_NUMBER)),
    ("deviation", Step::Sqrt("corrected second")),
    ("divisor", Step::AddScalar("deviation", ANY_NUMBER)),
    ("direction", Step::Div("corrected first", "divisor")),
    ("change", Step::MulScalar("direction", ANY_NUMBER)),
    ("decayed parameter", Step::MulScalar("parameter", ANY_NUMBER)),
    ("new parameter", Step::Sub("decayed parameter", "change")),
];

const INPUTS: [Name; 4] = ["parameter", "gradient", "first", "second"];
/// In the order of [`INPUTS`], without the gradient.
const OUTPUTS: [Name; 3] = ["new parameter", "new first", "new second"];
/// What is made with numbers, in the order in which [`PlainStep::factors`] takes these.
const WITH_NUMBERS: [Name; 9] = [
    "decayed first",
    "share of gradient",
    "decayed second",
    "share of square",
    "corrected first",
    "corrected second",
    "divisor",
    "change",
    "decayed parameter",
];

/// One parameter's step.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct PlainStep {
    inputs: [TensorIr; 4],
    outputs: [TensorIr; 3],
    /// Where the numbers are.
    numbers: [u64; 9],
}

impl PlainStep {
    /// The step's numbers, if they are those of AdamW.
    fn factors(&self, tensors: &Tensors) -> Option<AdamwFactors> {
        /// What single precision may leave between two numbers and 1.
        const TOLERANCE: f64 = 1e-6;
        let mut numbers = [0.0; 9];
        for (found, place) in numbers.iter_mut().zip(self.numbers) {
            *found = number(tensors, place)?;
        }
        let [beta_1, share_1, beta_2, share_2, correction_1, correction_2, epsilon, rate, kept] =
            numbers;
        let is_mean = |beta: f64, share: f64| (beta + share - 1.0).abs() <= TOLERANCE;
        (is_mean(beta_1, share_1) && is_mean(beta_2, share_2)).then_some(AdamwFactors {
            share_1,
            share_2,
            correction_1,
            correction_2,
            epsilon,
            rate,
            decay: 1.0 - kept,
        })
    }
}

/// Steps of several parameters by one launch, or as Burn runs them where a number is none of AdamW's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PlainSteps {
    steps: Vec<PlainStep>,
}

impl Replacement for PlainSteps {
    const NAME: &'static str = "BlackburnPlainAdamw";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let count = self.steps.len();
        let mut factors = Vec::with_capacity(count);
        for step in &self.steps {
            let found = step.factors(tensors);
            let found = found.ok_or_else(|| unsupported(OP, "numbers that are not AdamW's"))?;
            found.check()?;
            factors.push(found);
            for input in &step.inputs {
                if shape_of(tensors, input, OP)?.num_elements() > MOST_ELEMENTS {
                    return Err(unsupported(OP, "parameters of more than 2^31 elements"));
                }
            }
            for output in &step.outputs {
                known_output(tensors, output, OP)?;
            }
        }
        let (mut updates, mut casts) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (PlainStep { inputs: [parameter, gradient, first, second], .. }, step) in
            self.steps.iter().zip(factors)
        {
            let cast = kept_casts::wanted(tensors, parameter);
            let taken = [
                take_cube_tensor(tensors, parameter, OP)?,
                take_cube_tensor(tensors, gradient, OP)?,
                take_cube_tensor(tensors, first, OP)?,
                take_cube_tensor(tensors, second, OP)?,
            ];
            // A copy that a recording reads is written instead.
            let cast = cast.filter(|_| !copies::has(&taken[0].handle)).and_then(|dtype| {
                let cast = memory_for(&taken[0], taken[0].meta.shape().clone(), dtype);
                Some((rows_of(&cast)?, cast))
            });
            let (copy, cast) = cast.unzip();
            updates.push(Update { step, tensors: taken, draw: 0, copy });
            casts.push(cast);
        }
        let made = stepped(updates, None, None, None).into_iter().zip(casts);
        for (step, ([parameter, _, first, second], cast)) in self.steps.iter().zip(made) {
            for (out, tensor) in step.outputs.iter().zip([parameter, first, second]) {
                register_cube_tensor(tensors, out, tensor, OP)?;
            }
            if let Some(cast) = cast {
                kept_casts::keep(tensors, &step.outputs[0], cast, Self::NAME);
            }
        }
        Ok(Done::All)
    }
}

/// A parameter's operations, as far as they have come.
#[derive(Clone)]
struct Followed {
    matcher: Matcher,
    /// Whether the parameter's old numbers ended behind its step.
    is_dropped: bool,
}

impl Followed {
    /// Operations that have come.
    fn len(&self) -> usize {
        self.matcher.positions().len() + usize::from(self.is_dropped)
    }

    /// The step, once all of it has come, if nobody else reads what is made on the way, and all tensors are four of one
    /// shape and what is made of them.
    fn step(&self) -> Option<PlainStep> {
        let matcher = &self.matcher;
        let is_way = |name: &&Name| !OUTPUTS.contains(name);
        let made = STEP.iter().map(|(made, _)| made);
        if !matcher.is_complete() || !made.filter(is_way).all(|name| matcher.is_dead(name)) {
            return None;
        }
        let mut numbers = [0; 9];
        for (place, made) in numbers.iter_mut().zip(WITH_NUMBERS) {
            *place = matcher.scalar_of(made)?;
        }
        let mut inputs = INPUTS.map(|name| matcher.tensor(name).cloned());
        if let (Some(parameter), true) = (&mut inputs[0], self.is_dropped) {
            parameter.status = TensorStatus::ReadWrite;
        }
        let [parameter, gradient, first, second] = inputs;
        let outputs = OUTPUTS.map(|name| matcher.tensor(name).cloned());
        let [new_parameter, new_first, new_second] = outputs;
        let inputs = [parameter?, gradient?, first?, second?];
        let outputs = [new_parameter?, new_first?, new_second?];
        let has_shape = |tensor: &TensorIr| tensor.shape == inputs[0].shape;
        let are_apart = (1..4).all(|at| inputs[..at].iter().all(|other| other.id != inputs[at].id));
        (are_apart && inputs.iter().chain(&outputs).all(has_shape)).then_some(PlainStep {
            inputs,
            outputs,
            numbers,
        })
    }
}

/// Takes steps that follow each other. It is over when Burn shows an operation of another kind, to whichever block.
#[derive(Clone, Default)]
pub(crate) struct PlainSearch {
    followed: Vec<Followed>,
}

impl PlainSearch {
    /// Fewer steps are left to Burn's fusion, which makes a kernel or two of them: between weights of convolutions
    /// vectors come in fours and fives.
    const FEWEST: usize = 8;
    /// Weights of convolutions have more dimensions. Their gradients lie in another order of memory than they do, which
    /// Burn's fusion reads as it is: here each would be copied first.
    const MOST_DIMENSIONS: usize = 2;

    /// Steps from the first one on that are there as a whole, and how many operations they are.
    fn complete(&self) -> (Vec<PlainStep>, usize) {
        let steps: Vec<_> = self.followed.iter().map_while(Followed::step).collect();
        let operations = self.followed[..steps.len()].iter().map(Followed::len).sum();
        (steps, operations)
    }

    /// Whether the last parameter's old numbers, whose step has come, are `tensor`.
    fn ends(&mut self, tensor: &TensorIr) -> Next {
        let most = self.followed.len() == MOST_TENSORS;
        let Some(last) = self.followed.last_mut() else { return Next::Refused };
        let old = last.matcher.tensor(INPUTS[0]).filter(|old| old.id == tensor.id);
        let is_old = old.is_some_and(|old| old.status == TensorStatus::ReadOnly);
        if !is_old || last.is_dropped || !last.matcher.is_complete() {
            return Next::Refused;
        }
        last.is_dropped = true;
        if most { Next::Last } else { Next::Taken }
    }
}

/// Whether it is of a kind that steps are made of.
fn is_part(operation: &OperationIr) -> bool {
    match operation {
        OperationIr::Drop(_) => true,
        OperationIr::Float(_, operation) => matches!(operation, Float::Sqrt(_)),
        OperationIr::NumericFloat(_, operation) => matches!(
            operation,
            Numeric::Add(_)
                | Numeric::AddScalar(_)
                | Numeric::Div(_)
                | Numeric::DivScalar(_)
                | Numeric::Mul(_)
                | Numeric::MulScalar(_)
                | Numeric::Sub(_)
        ),
        _ => false,
    }
}

impl Search for PlainSearch {
    type Replacement = PlainSteps;
    const MAY_CAST_FIRST: bool = false;

    fn follow(&mut self, operation: &OperationIr, now: Moment) -> Next {
        if let OperationIr::Drop(tensor) = operation {
            return self.ends(tensor);
        }
        let mut tensors = operation.inputs().chain(operation.outputs());
        let is_served = |tensor: &TensorIr| {
            tensor.dtype == DType::F32 && tensor.shape.num_dims() <= Self::MOST_DIMENSIONS
        };
        if !is_part(operation) || !tensors.all(is_served) {
            return Next::Refused;
        }
        if let Some((last, before)) = self.followed.split_last_mut()
            && !last.matcher.is_complete()
        {
            let is_made = |id| before.iter().any(|other| other.matcher.has_made(id));
            let depends = operation.inputs().any(|input| is_made(input.id));
            return Next::taken_if(!depends && last.matcher.follow(operation, now.position));
        }
        let is_known =
            |id| self.followed.iter().any(|followed: &Followed| followed.matcher.knows(id));
        let mut matcher = Matcher::data_flow(STEP);
        let begins = self.followed.len() < MOST_TENSORS
            && !operation.inputs().any(|input| is_known(input.id))
            && matcher.follow(operation, now.position);
        if begins {
            self.followed.push(Followed { matcher, is_dropped: false });
        }
        Next::taken_if(begins)
    }

    fn claim(&self) -> Option<Claim<PlainSteps>> {
        let (steps, operations) = self.complete();
        // More than all that Burn's own fusion may save of them and of a step that has begun.
        let score = 2 * burn_score(STEP, 0) * steps.len() as u64;
        let is_worth_it = steps.len() >= Self::FEWEST;
        let parts = vec![Part::Replaced((0..operations).collect(), PlainSteps { steps })];
        is_worth_it.then_some(Claim { score, parts })
    }

    fn gives_up(&self, elapsed: Elapsed) -> bool {
        elapsed.since_last > 0
    }

    fn takes_time(operation: &OperationIr) -> bool {
        !is_part(operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{
        Fuser,
        emit::{emit, tensor, view},
    };
    use burn_ir::TensorId;

    const OPERATIONS: usize = STEP.len() + 1;

    /// The operations of a parameter, whose tensors are numbered from `first` on, and the end of its old numbers.
    fn step(first: u64, shape: [usize; 2]) -> Vec<OperationIr> {
        let inputs = [0, 1, 2, 3].map(|at| (INPUTS[at], first + at as u64));
        let mut operations = emit(STEP, &inputs, first + 10, shape);
        // The state keeps the moments, and the loop the parameter.
        operations.push(OperationIr::Drop(tensor(first, shape, TensorStatus::ReadWrite)));
        operations
    }

    fn steps(count: u64) -> Vec<OperationIr> {
        (1..=count).flat_map(|at| step(100 * at, [2, 2])).collect()
    }

    fn fuser(operations: &[OperationIr]) -> Fuser<PlainSearch> {
        Fuser::after(PlainSearch::default(), operations)
    }

    #[test]
    fn parameters_of_any_shapes_are_taken_together() {
        let shape = |at: usize| [at, 9 - at];
        let all: Vec<_> = (1..=8).flat_map(|at| step(100 * at as u64, shape(at))).collect();
        let fuser = fuser(&all);
        assert!(fuser.is_open());
        assert_eq!(fuser.claims(), Some(8 * OPERATIONS));
        let (steps, _) = fuser.search.complete();
        assert!(steps.iter().all(|step| step.inputs[0].status == TensorStatus::ReadWrite));
    }

    #[test]
    fn a_launch_takes_as_many_as_it_can() {
        let fuser = fuser(&steps(19));
        assert!(!fuser.is_open());
        assert_eq!(fuser.claims(), Some(MOST_TENSORS * OPERATIONS));
    }

    #[test]
    fn a_step_that_has_begun_is_left() {
        let nine = steps(9);
        let eight = 8 * OPERATIONS;
        assert_eq!(fuser(&nine[..eight + 9]).claims(), Some(eight));
        assert_eq!(fuser(&nine[..eight - 1]).claims(), Some(eight - 1), "the old numbers stay");
        assert_eq!(fuser(&nine[..eight - 9]).claims(), None, "seven are too few");
    }

    #[test]
    fn what_reads_another_steps_tensors_is_left() {
        let eight = steps(8);
        // The parameter and the first moment that the first one makes.
        let [parameter, first] = [110 + STEP.len() as u64 - 1, 112];
        let inputs = [("parameter", parameter), ("gradient", 1), ("first", first), ("second", 3)];
        let again = emit(STEP, &inputs, 1900, [2, 2]);
        for other in [again, vec![view(100, [2, 2], 500)]] {
            let fuser = fuser(&[eight.clone(), other].concat());
            assert!(!fuser.is_open());
            assert_eq!(fuser.claims(), Some(8 * OPERATIONS));
        }
    }

    #[test]
    fn a_gradient_that_another_step_makes_ends_it() {
        let eight = steps(8);
        let inputs = [("parameter", 901), ("gradient", 112), ("first", 902), ("second", 903)];
        let fuser = fuser(&[eight, emit(STEP, &inputs, 1900, [2, 2])].concat());
        assert!(!fuser.is_open());
        assert_eq!(fuser.claims(), Some(8 * OPERATIONS));
    }

    #[test]
    fn tensors_that_broadcast_and_one_in_two_places_are_left() {
        let others = |change: &dyn Fn(&mut TensorIr)| {
            let mut others = steps(8);
            for operation in &mut others {
                if let OperationIr::NumericFloat(_, Numeric::MulScalar(op)) = operation {
                    change(&mut op.lhs);
                }
            }
            fuser(&others).claims()
        };
        assert_eq!(others(&|_| ()), Some(8 * OPERATIONS));
        // The first moments, and in the last case the second ones.
        let is =
            |tensor: &TensorIr, at: u64| (1..=8).any(|step| tensor.id.value() == 100 * step + at);
        assert_eq!(
            others(&|tensor| if is(tensor, 2) {
                tensor.shape = [1, 2].into()
            }),
            None
        );
        assert_eq!(
            others(&|tensor| if is(tensor, 3) {
                tensor.id = TensorId::new(tensor.id.value() - 1)
            }),
            None
        );
    }

    #[test]
    fn weights_of_convolutions_are_left() {
        let mut eight = steps(8);
        let OperationIr::NumericFloat(_, Numeric::MulScalar(op)) = &mut eight[0] else {
            panic!("a step begins otherwise");
        };
        op.lhs.shape = [2, 2, 1, 1].into();
        assert!(!fuser(&eight).is_open());
        assert_eq!(fuser(&eight).claims(), None);
    }
}
