use super::search::{MatmulSearch, MatmulSettings};
use crate::fused::gelu;
use crate::stream::{
    Fuser,
    emit::{emit, sum_along, tensor, view},
};
use burn_backend::DType;
use burn_fusion::{FuserStatus, OperationFuser};
use burn_ir::OperationIr;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CastOpIr, FloatOperationIr, MaskFillOpIr, MatmulOpIr,
    NumericOperationIr, ScalarIr, ScalarOpIr, ShapeOpIr, TensorIr,
    TensorStatus::{self, ReadOnly, ReadWrite},
};

/// Sizes as the stream numbers them; 0 is the size 1.
const M: usize = 1;
const K: usize = 2;
const N: usize = 3;

/// `t2 = t0 t1`.
fn matmul() -> OperationIr {
    product_of([tensor(0, [M, K], ReadOnly), tensor(1, [K, N], ReadOnly)])
}

fn product_of([lhs, rhs]: [TensorIr; 2]) -> OperationIr {
    let dtype = lhs.dtype;
    let out = TensorIr { dtype, ..tensor(2, [M, N], TensorStatus::NotInit) };
    OperationIr::Float(dtype, FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out }))
}

fn reshape(input: TensorIr, out: TensorIr) -> OperationIr {
    OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
}

/// `t4 = reshape(t3)`: a bias gets the shape of a row.
fn bias_row() -> OperationIr {
    reshape(tensor(3, [N], ReadOnly), tensor(4, [0, N], TensorStatus::NotInit))
}

fn add(lhs: TensorIr, rhs: TensorIr, out: u64) -> OperationIr {
    let out = tensor(out, [M, N], TensorStatus::NotInit);
    let add = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
    OperationIr::NumericFloat(DType::F32, add)
}

/// `t{out} = t{value} + t4`.
fn add_bias(value: u64, status: TensorStatus, out: u64) -> OperationIr {
    add(tensor(value, [M, N], status), tensor(4, [0, N], ReadWrite), out)
}

/// `t{out} = t9 + t{value}`.
fn add_residual(value: u64, out: u64) -> OperationIr {
    add(tensor(9, [M, N], ReadOnly), tensor(value, [M, N], ReadWrite), out)
}

/// `t{out} = t{value} * t9`, where t9 has that shape.
fn multiply(value: u64, shape: [usize; 2], out: u64) -> OperationIr {
    let mul = NumericOperationIr::Mul(BinaryOpIr {
        lhs: tensor(value, [M, N], ReadWrite),
        rhs: tensor(9, shape, ReadOnly),
        out: tensor(out, [M, N], TensorStatus::NotInit),
    });
    OperationIr::NumericFloat(DType::F32, mul)
}

/// The two operations of a rectifier from `t{value}` to `t{out}`.
fn relu(value: u64, status: TensorStatus, out: u64) -> [OperationIr; 2] {
    let mask = out + 100;
    let scalar = |id| ScalarIr::UInt(id);
    let at_most = NumericOperationIr::LowerEqualElem(ScalarOpIr {
        lhs: tensor(value, [M, N], ReadOnly),
        rhs: scalar(0),
        out: tensor(mask, [M, N], TensorStatus::NotInit),
    });
    let fill = BaseOperationIr::MaskFill(MaskFillOpIr {
        tensor: tensor(value, [M, N], status),
        mask: tensor(mask, [M, N], ReadWrite),
        value: scalar(1),
        out: tensor(out, [M, N], TensorStatus::NotInit),
    });
    [OperationIr::NumericFloat(DType::F32, at_most), OperationIr::BaseFloat(fill)]
}

fn scale(value: u64, out: u64) -> OperationIr {
    let scale = NumericOperationIr::MulScalar(ScalarOpIr {
        lhs: tensor(value, [M, N], ReadWrite),
        rhs: ScalarIr::UInt(0),
        out: tensor(out, [M, N], TensorStatus::NotInit),
    });
    OperationIr::NumericFloat(DType::F32, scale)
}

fn sum(id: u64) -> OperationIr {
    sum_along(id, [M, N], 0)
}

fn after(operations: impl IntoIterator<Item = OperationIr>) -> Fuser<MatmulSearch> {
    let settings = MatmulSettings { takes_gelu: true, takes_sum: true, ..Default::default() };
    let operations: Vec<_> = operations.into_iter().collect();
    Fuser::after(MatmulSearch::new(settings), &operations)
}

/// How many operations the fuser would take, if it is ready.
fn taken(operations: impl IntoIterator<Item = OperationIr>) -> Option<usize> {
    after(operations).claims()
}

#[test]
fn a_linear_layer_is_taken_and_so_is_each_part_of_it() {
    let layer = [matmul(), bias_row(), add_bias(2, ReadWrite, 5)];
    assert_eq!(taken(layer[..1].to_vec()), Some(1));
    // The shape of the bias waits for the addition.
    assert_eq!(taken(layer[..2].to_vec()), Some(1));
    assert_eq!(taken(layer.to_vec()), Some(3));
    let mut fuser = after(layer);
    assert!(fuser.is_open(), "an activation may follow");
    fuser.reset();
    assert!(!fuser.properties().ready && fuser.is_open());
}

#[test]
fn the_bias_may_have_its_shape_before_the_product() {
    assert_eq!(taken([matmul(), add_bias(2, ReadWrite, 5)]), Some(2));
}

#[test]
fn what_is_read_again_later_is_not_built_upon() {
    let fuser = after([matmul(), add_bias(2, ReadOnly, 5)]);
    assert_eq!(fuser.len(), 1);
    assert!(!fuser.is_open());
}

#[test]
fn steps_are_taken_in_the_order_of_the_epilogue_only() {
    let [mask, fill] = relu(5, ReadWrite, 6);
    let in_order = [matmul(), scale(2, 4), add_residual(4, 5)];
    assert_eq!(taken(in_order), Some(3));
    // The epilogue adds last: an activation behind it is for others.
    assert_eq!(taken([matmul(), add_residual(2, 5), mask, fill]), Some(2));
    assert_eq!(taken([matmul(), add_residual(2, 5), scale(5, 6)]), Some(2));
}

#[test]
fn a_mask_of_the_same_shape_is_taken_in_the_place_of_a_residual() {
    assert_eq!(taken([matmul(), scale(2, 4), multiply(4, [M, N], 5)]), Some(3));
    assert_eq!(taken([matmul(), multiply(2, [0, N], 5)]), Some(1), "a row");
    assert_eq!(taken([matmul(), multiply(2, [M, N], 5), add_residual(5, 6)]), Some(2));
    assert_eq!(taken([matmul(), add_residual(2, 5), multiply(5, [M, N], 6)]), Some(2));
}

#[test]
fn an_activation_is_taken_whole_or_not_at_all() {
    let [mask, fill] = relu(2, ReadWrite, 6);
    assert_eq!(taken([matmul(), mask.clone()]), Some(1));
    assert_eq!(taken([matmul(), mask.clone(), fill.clone()]), Some(3));
    assert_eq!(taken([matmul(), mask.clone(), fill, add_residual(6, 7)]), Some(4));
    let [_, kept] = relu(2, ReadOnly, 6);
    let with_kept = if super::activations::fuses_kept_preactivation() { 3 } else { 1 };
    assert_eq!(taken([matmul(), mask, kept]), Some(with_kept));
}

#[test]
fn a_cast_that_frees_the_product_begins_a_block_of_what_follows() {
    let cast = |status| {
        let input = tensor(2, [M, N], status);
        let out = TensorIr { dtype: DType::BF16, ..tensor(5, [M, N], TensorStatus::NotInit) };
        OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr { input, out }))
    };
    let is_open = |status| after([matmul(), cast(status)]).status() == FuserStatus::Open;
    // SiLU reads the product again.
    assert!(is_open(ReadOnly));
    assert!(!is_open(ReadWrite));
    assert_eq!(taken([matmul(), cast(ReadWrite)]), Some(1));
}

#[test]
fn a_row_that_takes_the_product_s_operand_away_is_not_waited_for() {
    let rhs = tensor(1, [K, N], ReadWrite);
    let fuser = after([matmul(), reshape(rhs, tensor(4, [0, N], TensorStatus::NotInit))]);
    assert!(!fuser.is_open());
    // Nor is one made of the product itself.
    let product = tensor(2, [M, N], ReadOnly);
    let fuser = after([matmul(), reshape(product, tensor(4, [0, N], TensorStatus::NotInit))]);
    assert!(!fuser.is_open());
}

#[test]
fn views_in_front_are_left_to_burn_at_once() {
    let fuser = after([bias_row()]);
    assert!(!fuser.is_open() && !fuser.properties().ready);
}

#[test]
fn one_arithmetic_operation_is_let_in_in_front_and_bids_low() {
    let fuser = after([scale(8, 0), matmul()]);
    assert_eq!((fuser.len(), fuser.properties().score), (2, MatmulSearch::SCORE_BEHIND_ARITHMETIC));
    assert_eq!(after([matmul()]).properties().score, MatmulSearch::SCORE);
    assert_eq!(taken([scale(8, 7), scale(7, 0), matmul()]), None);
}

#[test]
fn types_that_no_kernel_takes_are_left_alone() {
    let of = |dtype| TensorIr { dtype, ..tensor(0, [M, K], ReadOnly) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(taken([product_of([of(dtype), of(dtype)])]), Some(1), "{dtype:?}");
    }
    assert_eq!(taken([product_of([of(DType::F64), of(DType::F64)])]), None);
    assert_eq!(taken([product_of([of(DType::F16), of(DType::F32)])]), None);
}

/// The gradient of GELU by `t9`, of which the product is `dy`.
fn gelu_gradient(dy: u64, shape: [usize; 2]) -> Vec<OperationIr> {
    emit(gelu::BACKWARD, &[("x", 9), ("dy", dy)], 20, shape)
}

fn after_product(behind: Vec<OperationIr>) -> Fuser<MatmulSearch> {
    after([vec![matmul()], behind].concat())
}

#[test]
fn the_gradient_of_gelu_is_taken_whole_or_not_at_all() {
    let fuser = after_product(gelu_gradient(2, [M, N])[..15].to_vec());
    assert!(fuser.is_open() && fuser.len() == 1);
    let fuser = after_product(gelu_gradient(2, [M, N]));
    assert!(fuser.is_open() && fuser.len() == 17, "a sum of its rows may follow");
}

#[test]
fn the_sum_of_the_gradient_s_rows_is_taken_with_it() {
    const DX: u64 = 35;

    let gradient = || gelu_gradient(2, [M, N]);
    let behind = |others: &[OperationIr]| after_product([&gradient()[..], others].concat());
    let fuser = behind(&[sum(DX)]);
    assert!(!fuser.is_open() && fuser.len() == 18);
    let (viewed, sum_of_view) = (view(DX, [M, N], 40), sum(40));
    let fuser = behind(std::slice::from_ref(&viewed));
    assert!(fuser.is_open() && fuser.len() == 17, "the view waits for the sum");
    assert_eq!(behind(&[viewed, sum_of_view]).len(), 19);
    let fuser = behind(&[sum(9)]);
    assert!(!fuser.is_open() && fuser.len() == 17, "the sum of another");
    let settings = MatmulSettings { takes_gelu: true, ..Default::default() };
    let operations = [vec![matmul()], gradient()].concat();
    let alone = Fuser::after(MatmulSearch::new(settings), &operations);
    assert!(!alone.is_open() && alone.len() == 17, "the sum is another provider's");
}

#[test]
fn the_gradient_of_gelu_that_is_another_product_s_is_left_alone() {
    let fuser = after_product(gelu_gradient(7, [M, N]));
    assert!(!fuser.is_open() && fuser.len() == 1);
    assert!(!after_product(gelu_gradient(2, [K, N])[..1].to_vec()).is_open());
}
