use super::search::SoftmaxSearch;
use crate::stream::{Fuser, Part, Search, emit::tensor};
use burn_backend::{DType, tensor::IndexingUpdateOp};
use burn_fusion::OperationFuser;
use burn_ir::{
    BaseOperationIr as Base, BinaryOpIr, CastOpIr, CreationOpIr, FloatOperationIr as Float,
    GatherOpIr, MaskFillOpIr, NumericOperationIr as Numeric, OperationIr, ReduceDimOpIr, ScalarIr,
    ScalarOpIr, ScatterOpIr, ShapeOpIr, TensorIr,
    TensorStatus::{self, NotInit, ReadOnly, ReadWrite},
    UnaryOpIr,
};
use burn_std::BoolStore;

/// Sizes as the stream numbers them; 0 is the size 1.
const ROWS: usize = 1;
const COLUMNS: usize = 2;

/// Tensors as the stream numbers them.
const X: u64 = 0;
const PEAK: u64 = 1;
const SHIFTED: u64 = 2;
const EXP: u64 = 3;
const SUM: u64 = 4;
const LOG: u64 = 5;
const Y: u64 = 6;
const PICKED: u64 = 7;
const TARGETS: u64 = 8;
const GRAD: u64 = 9;

fn rows(id: u64, status: TensorStatus) -> TensorIr {
    tensor(id, [ROWS, COLUMNS], status)
}

fn number(id: u64, status: TensorStatus) -> TensorIr {
    tensor(id, [ROWS, 0], status)
}

fn targets(status: TensorStatus) -> TensorIr {
    TensorIr { dtype: DType::I32, ..number(TARGETS, status) }
}

fn numeric(operation: Numeric) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, operation)
}

fn float(of: fn(UnaryOpIr) -> Float, input: TensorIr, out: TensorIr) -> OperationIr {
    OperationIr::Float(DType::F32, of(UnaryOpIr { input, out }))
}

fn reduced(
    of: fn(ReduceDimOpIr) -> Numeric,
    input: TensorIr,
    out: TensorIr,
    axis: usize,
) -> OperationIr {
    numeric(of(ReduceDimOpIr { input, out, axis, accumulator_len: 1 }))
}

fn binary(
    of: fn(BinaryOpIr) -> Numeric,
    lhs: TensorIr,
    rhs: TensorIr,
    out: TensorIr,
) -> OperationIr {
    numeric(of(BinaryOpIr { lhs, rhs, out }))
}

fn scaled(lhs: TensorIr, out: TensorIr) -> OperationIr {
    numeric(Numeric::MulScalar(ScalarOpIr { lhs, rhs: ScalarIr::UInt(0), out }))
}

fn cast(input: TensorIr, from: DType, out: u64, to: DType) -> OperationIr {
    let input = TensorIr { dtype: from, ..input };
    let out = TensorIr { dtype: to, ..rows(out, NotInit) };
    OperationIr::BaseFloat(Base::Cast(CastOpIr { input, out }))
}

fn created(of: fn(CreationOpIr) -> Base, out: TensorIr) -> OperationIr {
    OperationIr::BaseFloat(of(CreationOpIr { out }))
}

/// The view that integers of one dimension get as targets.
fn view() -> OperationIr {
    let of = |tensor: TensorIr| TensorIr { dtype: DType::I32, ..tensor };
    let (input, out) = (of(tensor(99, [ROWS], ReadOnly)), of(number(TARGETS, NotInit)));
    OperationIr::BaseInt(Base::Reshape(ShapeOpIr { input, out }))
}

/// The forward pass along a dimension, of which autodiff keeps `SHIFTED` and `SUM`.
fn forward_along(axis: usize, exp: TensorStatus) -> Vec<OperationIr> {
    let gathered = GatherOpIr {
        tensor: rows(Y, ReadWrite),
        dim: axis,
        indices: targets(ReadOnly),
        out: number(PICKED, NotInit),
    };
    vec![
        reduced(Numeric::MaxDim, rows(X, ReadOnly), number(PEAK, NotInit), axis),
        binary(Numeric::Sub, rows(X, ReadWrite), number(PEAK, ReadWrite), rows(SHIFTED, NotInit)),
        float(Float::Exp, rows(SHIFTED, ReadOnly), rows(EXP, NotInit)),
        reduced(Numeric::SumDim, rows(EXP, exp), number(SUM, NotInit), axis),
        float(Float::Log, number(SUM, ReadOnly), number(LOG, NotInit)),
        binary(Numeric::Sub, rows(SHIFTED, ReadOnly), number(LOG, ReadWrite), rows(Y, NotInit)),
        OperationIr::BaseFloat(Base::Gather(gathered)),
    ]
}

fn forward() -> Vec<OperationIr> {
    forward_along(1, ReadWrite)
}

fn zeros() -> OperationIr {
    created(Base::Zeros, rows(20, NotInit))
}

/// The backward pass behind its zeros.
fn behind_zeros() -> Vec<OperationIr> {
    let scatter = ScatterOpIr {
        tensor: rows(20, ReadWrite),
        dim: 1,
        indices: targets(ReadWrite),
        value: number(GRAD, ReadWrite),
        update: IndexingUpdateOp::Add,
        out: rows(21, NotInit),
    };
    vec![
        OperationIr::BaseFloat(Base::Scatter(scatter)),
        scaled(rows(21, ReadOnly), rows(22, NotInit)),
        reduced(Numeric::SumDim, rows(22, ReadWrite), number(23, NotInit), 1),
        float(Float::Recip, number(SUM, ReadWrite), number(24, NotInit)),
        binary(Numeric::Mul, number(23, ReadWrite), number(24, ReadWrite), number(25, NotInit)),
        created(Base::Ones, rows(26, NotInit)),
        reduced(Numeric::SumDim, number(25, ReadWrite), number(27, NotInit), 1),
        binary(Numeric::Mul, rows(26, ReadWrite), number(27, ReadWrite), rows(28, NotInit)),
        float(Float::Exp, rows(SHIFTED, ReadWrite), rows(29, NotInit)),
        binary(Numeric::Mul, rows(28, ReadWrite), rows(29, ReadWrite), rows(30, NotInit)),
        binary(Numeric::Add, rows(30, ReadWrite), rows(21, ReadWrite), rows(31, NotInit)),
    ]
}

fn backward() -> Vec<OperationIr> {
    [vec![zeros()], behind_zeros()].concat()
}

fn follow(operations: &[OperationIr]) -> Fuser<SoftmaxSearch> {
    Fuser::after(SoftmaxSearch::new(false), operations)
}

/// Which of the operations run as Burn runs them, and which the kernels replace.
fn taken(operations: &[OperationIr]) -> Option<(Vec<usize>, Vec<usize>)> {
    let fuser = follow(operations);
    let claim = fuser.search.claim()?;
    let (mut passengers, mut steps) = (Vec::new(), Vec::new());
    for part in claim.parts {
        match part {
            Part::Unfused(positions) | Part::Casts(positions, _) => passengers.extend(positions),
            Part::Replaced(positions, _) => steps.extend(positions),
        }
    }
    assert_eq!(steps.is_empty(), claim.score == SoftmaxSearch::SCORE_OF_UNCLAIMED);
    assert_eq!(fuser.len(), passengers.len() + steps.len());
    Some((passengers, steps))
}

fn all(range: std::ops::Range<usize>) -> Vec<usize> {
    range.collect()
}

#[test]
fn the_forward_pass_is_taken_with_and_without_the_elements_at_targets() {
    let operations = forward();
    assert_eq!(taken(&operations), Some((vec![], all(0..7))));
    assert_eq!(taken(&operations[..6]), Some((vec![], all(0..6))));
    assert!(!follow(&operations).is_open());
    // What comes behind is left to others.
    let longer =
        [operations, vec![scaled(number(PICKED, ReadWrite), number(40, NotInit))]].concat();
    assert_eq!(taken(&longer), Some((vec![], all(0..7))));
}

#[test]
fn a_view_of_targets_is_let_in_before_them_and_run() {
    let (mut operations, at_targets) = (forward(), 6);
    operations.insert(at_targets, view());
    assert_eq!(taken(&operations), Some((vec![6], vec![0, 1, 2, 3, 4, 5, 7])));
    assert_eq!(taken(&operations[..7]), Some((vec![6], all(0..6))), "nothing came of it");
}

#[test]
fn a_cast_to_more_bits_is_taken_and_what_makes_logits_is_run() {
    let behind = |lead: Vec<OperationIr>| taken(&[lead, forward()].concat());
    let widened = cast(rows(50, ReadWrite), DType::BF16, X, DType::F32);
    assert_eq!(behind(vec![widened.clone()]), Some((vec![], all(0..8))));
    let product = scaled(rows(49, ReadOnly), rows(50, NotInit));
    assert_eq!(behind(vec![product.clone(), widened]), Some((vec![0], all(1..9))));
    let rounded = cast(rows(50, ReadWrite), DType::F32, X, DType::BF16);
    assert_eq!(behind(vec![rounded]), Some((vec![0], all(1..8))));
    let unrelated = scaled(rows(49, ReadOnly), rows(48, NotInit));
    assert_eq!(behind(vec![unrelated]), None);
    assert_eq!(behind(vec![product.clone(), product.clone(), product]), None);
}

#[test]
fn a_forward_pass_that_is_another_leaves_all_but_the_peak() {
    let first = Some((vec![0], vec![]));
    assert_eq!(taken(&forward_along(1, ReadOnly)), first, "exponentials are read again");
    let mut operations = forward();
    operations[4] = float(Float::Exp, number(SUM, ReadOnly), number(LOG, NotInit));
    assert_eq!(taken(&operations), first, "no logarithm");
    assert!(!follow(&operations).is_open());
    assert_eq!(taken(&forward_along(0, ReadWrite)), None, "another dimension");
}

#[test]
fn the_backward_pass_is_taken_in_any_order_of_its_blocks() {
    let operations = backward();
    assert_eq!(taken(&operations), Some((vec![], all(0..12))));
    // What waits for nothing may come as soon as something is added to the zeros.
    let mut early = operations.clone();
    for (place, at) in [4, 6, 9].into_iter().enumerate() {
        let step = early.remove(at);
        early.insert(2 + place, step);
    }
    assert_eq!(taken(&early), Some((vec![], all(0..12))));
}

#[test]
fn a_backward_pass_that_is_another_leaves_all_but_what_begins_it() {
    let first = Some((vec![0, 1], vec![]));
    let with = |at: usize, operation: OperationIr| {
        let mut operations = backward();
        operations[at] = operation;
        taken(&operations)
    };
    let read_again =
        binary(Numeric::Mul, rows(28, ReadWrite), rows(29, ReadOnly), rows(30, NotInit));
    assert_eq!(with(10, read_again), first, "an intermediate is read again");
    let columns = reduced(Numeric::SumDim, rows(22, ReadWrite), number(23, NotInit), 0);
    assert_eq!(with(3, columns), first, "a sum of columns");
    let one = created(Base::Ones, tensor(26, [0, COLUMNS], NotInit));
    assert_eq!(with(6, one), first, "ones of another shape");
    assert_eq!(taken(&[zeros(), scaled(rows(20, ReadOnly), rows(40, NotInit))]).unwrap().0, [0]);
}

#[test]
fn what_makes_the_gradient_of_a_loss_is_let_in_and_run() {
    let with = |operation: OperationIr| taken(&[vec![zeros(), operation], behind_zeros()].concat());
    let of_loss = created(Base::Ones, tensor(60, [0], NotInit));
    let steps: Vec<usize> = std::iter::once(0).chain(2..13).collect();
    assert_eq!(with(of_loss), Some((vec![1], steps)));
    // Or label smoothing, or something as long as the rows.
    let of_smoothing = created(Base::Ones, number(60, NotInit));
    assert_eq!(with(of_smoothing), Some((vec![0], vec![])));
    assert_eq!(with(scaled(rows(60, ReadOnly), rows(61, NotInit))), Some((vec![0], vec![])));
}

#[test]
fn a_cast_behind_the_backward_pass_is_waited_for_until_another_operation_comes() {
    let to_bf16 = |status| cast(rows(31, status), DType::F32, 70, DType::BF16);
    let mut fuser = follow(&backward());
    assert!(fuser.is_open());
    fuser.fuse(&to_bf16(ReadWrite));
    assert_eq!(fuser.len(), 13);
    assert!(!fuser.is_open());
    assert_eq!(taken(&[backward(), vec![to_bf16(ReadOnly)]].concat()).unwrap().1.len(), 12);

    let fuser = follow(&backward());
    // A fuser of another block.
    fuser.clone().fuse(&zeros());
    assert!(!fuser.is_open());
    assert_eq!(fuser.len(), 12);
}

/// Softmax itself, of which autodiff keeps `SHIFTED`, `EXP` and `SUM`.
fn probabilities() -> Vec<OperationIr> {
    let mut operations = forward_along(1, ReadOnly);
    operations.truncate(4);
    let (exp, sum) = (rows(EXP, ReadOnly), number(SUM, ReadOnly));
    operations.push(binary(Numeric::Div, exp, sum, rows(Y, NotInit)));
    operations
}

#[test]
fn softmax_is_taken_and_waited_for_behind_no_arithmetic() {
    let operations = probabilities();
    assert_eq!(taken(&operations), Some((vec![], all(0..5))));
    assert!(!follow(&operations).is_open());
    assert_eq!(taken(&operations[..4]), Some((vec![0], vec![])), "without its last step");
    let lead = scaled(rows(49, ReadOnly), rows(X, NotInit));
    assert_eq!(taken(&[vec![lead], probabilities()].concat()), None);
}

/// What fills masked elements of `input`.
fn filled(input: TensorIr, out: u64) -> OperationIr {
    let mask = TensorIr { dtype: DType::Bool(BoolStore::U32), ..rows(80, ReadOnly) };
    let value = ScalarIr::UInt(1);
    OperationIr::BaseFloat(Base::MaskFill(MaskFillOpIr {
        tensor: input,
        mask,
        value,
        out: rows(out, NotInit),
    }))
}

#[test]
fn the_last_mask_in_front_of_softmax_is_taken_along() {
    let behind = |leads: &[OperationIr]| taken(&[leads, &probabilities()].concat());
    let last = filled(rows(49, ReadWrite), X);
    assert_eq!(behind(std::slice::from_ref(&last)), Some((vec![], all(0..6))));
    let first = filled(rows(48, ReadWrite), 49);
    assert_eq!(behind(&[first, last.clone()]), Some((vec![0], all(1..7))));
    let unrelated = filled(rows(48, ReadWrite), 47);
    assert_eq!(behind(&[unrelated]), Some((vec![0], all(1..6))));
    // Of a type that no kernel reads.
    let mut of_integers = last;
    if let OperationIr::BaseFloat(Base::MaskFill(op)) = &mut of_integers {
        op.mask.dtype = DType::I32;
    }
    assert_eq!(behind(&[of_integers]), Some((vec![0], all(1..6))));
}

#[test]
fn masked_elements_that_are_read_again_are_filled_first() {
    let mut operations = [vec![filled(rows(49, ReadWrite), X)], probabilities()].concat();
    operations[2] =
        binary(Numeric::Sub, rows(X, ReadOnly), number(PEAK, ReadWrite), rows(SHIFTED, NotInit));
    assert_eq!(taken(&operations), Some((vec![0], all(1..6))));
}
