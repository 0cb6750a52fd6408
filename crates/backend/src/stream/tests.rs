use super::{
    Matcher, Pattern, PatternStep as Step, burn_score, emit::tensor as shaped,
    pattern::ExpectedScalar,
};
use burn_backend::DType;
use burn_ir::{
    BinaryOpIr, FloatOperationIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId,
    TensorIr, TensorStatus, UnaryOpIr,
};

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
