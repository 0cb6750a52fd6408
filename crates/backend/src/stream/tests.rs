use super::{
    Claim, Done, Fuser, Matcher, Moment, Next, Part, Pattern, PatternStep as Step, Replacement,
    Search, burn_score, emit::tensor as shaped, is_parameter_cast, pattern::ExpectedScalar,
};
use crate::tensors::Tensors;
use blackburn_kernels::KernelError;
use burn_backend::DType;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CastOpIr, FloatOperationIr, NumericOperationIr, OperationIr,
    ScalarIr, ScalarOpIr, TensorId, TensorIr, TensorStatus, UnaryOpIr,
};
use serde::{Deserialize, Serialize};

/// x (erf(x) + 1)
const PATTERN: Pattern =
    &[("erf", Step::Erf("x")), ("sum", Step::AddScalar("erf", 1.0)), ("y", Step::Mul("x", "sum"))];

fn tensor(id: u64, status: TensorStatus) -> TensorIr {
    shaped(id, [1, 2], status)
}

/// The pattern's operations, the last of which multiplies `lhs` by `rhs`.
fn stream(lhs: u64, rhs: u64, erf_status: TensorStatus) -> [OperationIr; 3] {
    use TensorStatus::{NotInit, ReadOnly, ReadWrite};

    let erf = UnaryOpIr { input: tensor(0, ReadOnly), out: tensor(1, NotInit) };
    let sum =
        ScalarOpIr { lhs: tensor(1, erf_status), rhs: ScalarIr::UInt(7), out: tensor(2, NotInit) };
    let product = BinaryOpIr {
        lhs: tensor(lhs, ReadWrite),
        rhs: tensor(rhs, ReadWrite),
        out: tensor(3, NotInit),
    };
    [
        OperationIr::Float(DType::F32, FloatOperationIr::Erf(erf)),
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::AddScalar(sum)),
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::Mul(product)),
    ]
}

fn follow(stream: &[OperationIr]) -> Option<Matcher> {
    let mut matcher = Matcher::element_wise(PATTERN);
    stream.iter().all(|operation| matcher.follow(operation, 0)).then_some(matcher)
}

#[test]
fn a_stream_that_follows_the_pattern_tells_its_tensors_and_numbers() {
    let matcher = follow(&stream(0, 2, TensorStatus::ReadWrite)).unwrap();
    assert!(matcher.is_complete());
    assert_eq!(matcher.tensor("x").unwrap().status, TensorStatus::ReadWrite);
    assert_eq!(matcher.output().unwrap().id, TensorId::new(3));
    assert_eq!(matcher.scalars(), [ExpectedScalar { id: 7, value: 1.0 }]);
}

#[test]
fn other_tensors_in_the_same_operations_are_off_the_pattern() {
    assert!(follow(&stream(2, 0, TensorStatus::ReadWrite)).is_none(), "swapped");
    assert!(follow(&stream(9, 2, TensorStatus::ReadWrite)).is_none(), "another input");
}

#[test]
fn an_intermediate_that_is_read_later_is_off_the_pattern() {
    assert!(follow(&stream(0, 2, TensorStatus::ReadOnly)).is_none());
}

#[test]
fn a_number_may_be_off_by_what_single_precision_makes_of_it() {
    let expected = ExpectedScalar { id: 0, value: std::f64::consts::SQRT_2 };
    assert!(expected.is(ScalarIr::Float(f64::from(std::f32::consts::SQRT_2))));
    assert!(!expected.is(ScalarIr::Float(1.415)));
    assert!(ExpectedScalar { id: 0, value: 3.0 }.is(ScalarIr::Int(3)));
}

#[test]
fn the_score_counts_what_one_kernel_saves() {
    // Of 4 reads and 3 writes, one of each is left, and 2 of 3 launches are saved.
    assert_eq!(burn_score(PATTERN, 2), 520);
}

/// A cast from f32.
fn cast(input: u64, status: TensorStatus, to: DType) -> OperationIr {
    let out = TensorIr { dtype: to, ..tensor(100 + input, TensorStatus::NotInit) };
    OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr { input: tensor(input, status), out }))
}

#[test]
fn a_parameter_is_cast_from_f32_that_stays_to_16_bits() {
    use TensorStatus::{ReadOnly, ReadWrite};

    assert!(is_parameter_cast(&cast(0, ReadOnly, DType::BF16)));
    assert!(is_parameter_cast(&cast(0, ReadOnly, DType::F16)));
    assert!(!is_parameter_cast(&cast(0, ReadOnly, DType::F64)));
    assert!(!is_parameter_cast(&cast(0, ReadWrite, DType::BF16)), "nobody reads it again");
    assert!(!is_parameter_cast(&stream(0, 2, ReadWrite)[0]));
}

/// Takes what it is shown, and claims the first two operations in one part each, the second one first.
#[derive(Clone, Default)]
struct TwoOperations<const MAY_CAST_FIRST: bool>(Vec<usize>);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Nothing;

impl Replacement for Nothing {
    const NAME: &'static str = "Nothing";

    fn launch(&self, _tensors: &mut Tensors) -> Result<Done, KernelError> {
        Ok(Done::All)
    }
}

impl<const MAY_CAST_FIRST: bool> Search for TwoOperations<MAY_CAST_FIRST> {
    type Replacement = Nothing;
    const MAY_CAST_FIRST: bool = MAY_CAST_FIRST;

    fn follow(&mut self, _operation: &OperationIr, now: Moment) -> Next {
        self.0.push(now.position);
        Next::Taken
    }

    fn claim(&self) -> Option<Claim<Nothing>> {
        let [first, second, ..] = self.0[..] else { return None };
        let parts = vec![Part::Unfused(vec![second]), Part::Replaced(vec![first], Nothing)];
        Some(Claim { score: 1, parts })
    }
}

/// What is claimed of `operations`, in the order in which it runs.
fn claimed(operations: &[OperationIr]) -> Option<Vec<Vec<usize>>> {
    let claim = Fuser::after(TwoOperations::<true>::default(), operations).claim()?;
    let positions = |part| match part {
        Part::Unfused(positions)
        | Part::Casts(positions, _)
        | Part::Replaced(positions, Nothing) => positions,
    };
    Some(claim.parts.into_iter().map(positions).collect())
}

#[test]
fn searches_do_not_see_casts_of_parameters_which_run_first() {
    let parameter = |id| cast(id, TensorStatus::ReadOnly, DType::BF16);
    let [erf, sum, product] = stream(0, 2, TensorStatus::ReadWrite);
    let in_between =
        [erf.clone(), parameter(20), parameter(21), sum.clone(), parameter(22), product.clone()];
    assert_eq!(claimed(&in_between), Some(vec![vec![1, 2], vec![3], vec![0]]));
    assert_eq!(claimed(&[erf.clone(), sum.clone(), product]), Some(vec![vec![1], vec![0]]));
    assert_eq!(claimed(&[parameter(20), erf, sum]), None, "it runs alone");
}

#[test]
fn a_cast_of_what_the_block_makes_stays_in_its_place() {
    let [erf, sum, _] = stream(0, 2, TensorStatus::ReadOnly);
    let kept = cast(2, TensorStatus::ReadOnly, DType::BF16);
    let fuser = Fuser::after(TwoOperations::<true>::default(), &[erf, sum, kept]);
    assert_eq!(fuser.search.0, [0, 1, 2]);
}

#[test]
fn a_search_of_operations_that_overwrite_sees_casts_of_parameters() {
    let [erf, sum, _] = stream(0, 2, TensorStatus::ReadWrite);
    let parameter = cast(20, TensorStatus::ReadOnly, DType::BF16);
    let fuser = Fuser::after(TwoOperations::<false>::default(), &[erf, parameter, sum]);
    assert_eq!(fuser.search.0, [0, 1, 2]);
}

#[test]
fn a_fuser_that_has_seen_nothing_keeps_its_search() {
    use burn_fusion::OperationFuser;

    let mut fuser = Fuser::new(TwoOperations::<true>(vec![7]));
    fuser.reset();
    assert_eq!(fuser.search.0, [7]);
    let [erf, ..] = stream(0, 2, TensorStatus::ReadOnly);
    fuser.fuse(&erf);
    fuser.reset();
    assert!(fuser.is_open());
    assert_eq!(fuser.search.0, [7]);
}
