//! What is found of convolutions in a stream.

use super::*;
use crate::stream::{Fuser, SingleSearch, emit::tensor};
use burn_backend::{DType, Shape};
use burn_ir::{
    BaseOperationIr, CastOpIr, Conv2dOpIr, Conv2dWeightBackwardOpIr, Conv2dXBackwardOpIr,
    ConvTranspose1dOpIr, SwapDimsOpIr,
    TensorStatus::{NotInit, ReadOnly, ReadWrite},
};

fn walk() -> Conv2dOptionsIr {
    Conv2dOptionsIr { stride: [2, 1], padding: [(1, 0); 2], dilation: [1, 3], groups: 2 }
}

fn of(id: u64) -> TensorIr {
    tensor(id, [2, 4, 8, 8], ReadOnly)
}

fn forward() -> OperationIr {
    OperationIr::Module(ModuleOperationIr::Conv2d(Conv2dOpIr {
        x: of(1),
        weight: of(2),
        bias: Some(tensor(3, [4], ReadOnly)),
        options: walk(),
        out: tensor(4, [2, 4, 8, 8], NotInit),
    }))
}

fn found(operation: &OperationIr) -> FoundProduct {
    match Convolution::of(operation, &F32Precision::Full) {
        Some(Convolution::Product(pass)) => *pass,
        other => panic!("{other:?}"),
    }
}

#[test]
fn operands_are_in_the_order_of_the_kernel() {
    let (x, weight, output_grad) = (of(1), of(2), of(3));
    let out = tensor(4, [2, 4, 8, 8], NotInit);
    let operation = Conv2dXBackwardOpIr {
        x: x.clone(),
        weight: weight.clone(),
        output_grad: output_grad.clone(),
        options: walk(),
        out: out.clone(),
    };
    let pass = found(&OperationIr::Module(ModuleOperationIr::Conv2dXBackward(operation)));
    assert_eq!((pass.operands, pass.named), ([of(3), of(2)], Some(of(1))));
    let operation = Conv2dWeightBackwardOpIr { x, weight, output_grad, options: walk(), out };
    let pass = found(&OperationIr::Module(ModuleOperationIr::Conv2dWeightBackward(operation)));
    assert_eq!((pass.operands, pass.named), ([of(1), of(3)], Some(of(2))));
    let pass = found(&forward());
    assert_eq!((pass.result, pass.full_f32), (PassResult::Output, true));
    assert_eq!(pass.options().padding, [[1, 0]; 2]);
    assert_eq!(pass.bias.map(|bias| bias.id.value()), Some(3));
}

#[test]
fn one_dimension_is_the_width_of_images() {
    let options = ConvTranspose1dOptionsIr {
        stride: [3],
        padding: [2],
        padding_out: [1],
        dilation: [4],
        groups: 1,
    };
    let operation = OperationIr::Module(ModuleOperationIr::ConvTranspose1d(ConvTranspose1dOpIr {
        x: tensor(1, [2, 4, 8], ReadOnly),
        weight: tensor(2, [4, 4, 3], ReadOnly),
        bias: None,
        options,
        out: tensor(3, [2, 4, 9], NotInit),
    }));
    let pass = found(&operation);
    let expected =
        ConvOptions { stride: [1, 3], padding: [[0, 0], [2, 2]], dilation: [1, 4], groups: 1 };
    assert_eq!((pass.result, pass.options()), (PassResult::Input, expected));
    assert_eq!(four(&Shape::new([2, 4, 9])).unwrap(), [2, 4, 1, 9]);
    assert_eq!(of_rank([36, 1, 36, 4], 3), [36, 1, 4]);
}

#[test]
fn one_is_taken_alone_and_behind_the_casts_of_its_operands() {
    let cast = OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr {
        input: TensorIr { status: ReadWrite, ..of(0) },
        out: TensorIr { dtype: DType::BF16, ..tensor(1, [2, 4, 8, 8], NotInit) },
    }));
    let taken = |operations: &[OperationIr]| {
        Fuser::after(SingleSearch::<Convolution>::default(), operations).claims()
    };
    assert_eq!(taken(&[forward()]), Some(1));
    assert_eq!(taken(&[cast.clone(), forward()]), Some(2));
    assert_eq!(taken(&[cast.clone(), cast.clone(), forward()]), Some(3));
    // Behind arithmetic they are taken together, so that nothing is left that needs it.
    assert_eq!(taken(&[cast.clone(), forward(), forward()]), Some(3));
    assert_eq!(taken(&[cast.clone(), forward(), cast.clone(), forward(), cast]), Some(4));
}

#[test]
fn the_view_of_a_transposed_ones_gradient_is_taken_along() {
    let convolution = |status| {
        let read = |id| TensorIr { status, ..of(id) };
        OperationIr::Module(ModuleOperationIr::Conv2d(Conv2dOpIr {
            x: read(1),
            weight: read(2),
            bias: None,
            options: walk(),
            out: of(9),
        }))
    };
    let swapped = |id| {
        OperationIr::BaseFloat(BaseOperationIr::SwapDims(SwapDimsOpIr {
            input: of(id),
            out: of(10),
            dim1: 0,
            dim2: 1,
        }))
    };
    let claims = |operations: &[OperationIr]| {
        Fuser::after(SingleSearch::<Convolution>::default(), operations).claims()
    };
    let gradient = convolution(ReadWrite);
    assert_eq!(claims(std::slice::from_ref(&gradient)), Some(1));
    assert_eq!(claims(&[gradient.clone(), swapped(9)]), Some(2));
    assert_eq!(claims(&[gradient.clone(), swapped(1)]), Some(1), "a view of something else");
    assert_eq!(claims(&[gradient.clone(), gradient, swapped(9)]), Some(1));
    assert_eq!(claims(&[convolution(ReadOnly), swapped(9)]), Some(1), "a forward pass");
}
