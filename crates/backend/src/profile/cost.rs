//! What operations read, write and compute, from Burn's intermediate representation.

use super::{Arithmetic, OperationKind, OperationRecord, TensorUse};
use burn_ir::{
    BaseOperationIr as Base, FloatOperationIr as Float, IntOperationIr as Int,
    ModuleOperationIr as Module, NumericOperationIr as Numeric, OperationIr, TensorIr,
    TensorStatus,
};
use std::fmt::{self, Debug, Write};

/// A record of `operation`.
pub(super) fn record(operation: &OperationIr) -> OperationRecord {
    let kind = kind(operation);
    let reads: Vec<_> = operation.inputs().map(tensor).collect();
    let writes: Vec<_> = operation.outputs().map(tensor).collect();
    let mut record = OperationRecord {
        name: name(operation),
        kind,
        bytes_known: bytes_known(operation),
        arithmetic: arithmetic(operation),
        reads,
        writes,
    };
    if let OperationIr::Drop(ended) = operation {
        record.reads = vec![TensorUse { last: true, ..tensor(ended) }];
        record.writes.clear();
    }
    if let OperationIr::BaseFloat(Base::Slice(_))
    | OperationIr::BaseInt(Base::Slice(_))
    | OperationIr::BaseBool(Base::Slice(_)) = operation
    {
        // Only the part that is taken.
        let taken: u64 = record.writes.iter().map(|tensor| tensor.bytes).sum();
        record.reads.iter_mut().for_each(|tensor| tensor.bytes = tensor.bytes.min(taken));
    }
    if let Some(named) = named_for_its_size(operation) {
        let named = named.id.value();
        let reads = record.reads.iter_mut().filter(|tensor| tensor.id == named);
        reads.for_each(|tensor| tensor.bytes = 0);
    }
    record
}

/// The images that the gradient of a pool or of resized images names, and does not read.
fn named_for_its_size(operation: &OperationIr) -> Option<&TensorIr> {
    let OperationIr::Module(operation) = operation else { return None };
    Some(match operation {
        Module::MaxPool1dWithIndicesBackward(pool) => &pool.x,
        Module::MaxPool2dWithIndicesBackward(pool) => &pool.x,
        Module::AvgPool1dBackward(pool) => &pool.x,
        Module::AvgPool2dBackward(pool) => &pool.x,
        Module::AdaptiveAvgPool1dBackward(pool) => &pool.x,
        Module::AdaptiveAvgPool2dBackward(pool) => &pool.x,
        Module::AdaptiveAvgPool3dBackward(pool) => &pool.x,
        Module::InterpolateBackward(resized) => &resized.x,
        _ => return None,
    })
}

fn tensor(tensor: &TensorIr) -> TensorUse {
    TensorUse {
        id: tensor.id.value(),
        bytes: elements(tensor) * tensor.dtype.size() as u64,
        last: tensor.status == TensorStatus::ReadWrite,
    }
}

fn elements(tensor: &TensorIr) -> u64 {
    tensor.shape.iter().map(|size| *size as u64).product()
}

fn name(operation: &OperationIr) -> String {
    match operation {
        OperationIr::BaseFloat(inner)
        | OperationIr::BaseInt(inner)
        | OperationIr::BaseBool(inner) => variant(inner),
        OperationIr::NumericFloat(_, inner) | OperationIr::NumericInt(_, inner) => variant(inner),
        OperationIr::Bool(inner) => variant(inner),
        OperationIr::Int(inner) => variant(inner),
        OperationIr::Float(_, inner) => variant(inner),
        OperationIr::Module(inner) => variant(inner),
        OperationIr::Distributed(inner) => variant(inner),
        OperationIr::Activation(inner) => variant(inner),
        OperationIr::Custom(custom) => last_of_path(&custom.id).to_owned(),
        OperationIr::Init(_) => "Init".to_owned(),
        OperationIr::Drop(_) => "Drop".to_owned(),
    }
}

/// Ids of extension operations may be paths.
fn last_of_path(id: &str) -> &str {
    id.rsplit("::").next().unwrap_or(id)
}

/// The name of an enum's variant, by its `Debug`, of which no more is written than that.
fn variant(value: &impl Debug) -> String {
    struct Name(String);
    impl Write for Name {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            for letter in text.chars() {
                if !letter.is_alphanumeric() && letter != '_' {
                    return Err(fmt::Error);
                }
                self.0.push(letter);
            }
            Ok(())
        }
    }
    let mut name = Name(String::new());
    // An error only says that the name is complete.
    let _ = write!(name, "{value:?}");
    name.0
}

fn kind(operation: &OperationIr) -> OperationKind {
    use OperationKind::{Drop, ElementWise, Other, Product, View};
    match operation {
        OperationIr::BaseFloat(inner)
        | OperationIr::BaseInt(inner)
        | OperationIr::BaseBool(inner) => base_kind(inner),
        OperationIr::NumericFloat(_, inner) | OperationIr::NumericInt(_, inner) => {
            numeric_kind(inner)
        }
        OperationIr::Bool(_) | OperationIr::Activation(_) => ElementWise,
        OperationIr::Int(Int::Matmul(_)) => Product,
        OperationIr::Int(_) => ElementWise,
        OperationIr::Float(_, inner) => match inner {
            Float::Matmul(_) => Product,
            Float::Cross(_)
            | Float::Quantize(_)
            | Float::Dequantize(_)
            | Float::GridSample2d(_) => Other,
            _ => ElementWise,
        },
        OperationIr::Module(inner) if module_arithmetic(inner).is_some() => Product,
        OperationIr::Init(_) => View,
        OperationIr::Drop(_) => Drop,
        // Products, whose arithmetic their tensors do not tell: it depends on masks, for one.
        OperationIr::Custom(custom)
            if ["attention", "matmul"].iter().any(|of| last_of_path(&custom.id).contains(of)) =>
        {
            Product
        }
        OperationIr::Module(_) | OperationIr::Custom(_) | OperationIr::Distributed(_) => Other,
    }
}

fn base_kind(operation: &Base) -> OperationKind {
    use OperationKind::{ElementWise, Other, Reduction, View};
    match operation {
        Base::Reshape(_)
        | Base::SwapDims(_)
        | Base::Permute(_)
        | Base::Expand(_)
        | Base::Unfold(_) => View,
        Base::MaskWhere(_)
        | Base::MaskFill(_)
        | Base::Equal(_)
        | Base::EqualElem(_)
        | Base::NotEqual(_)
        | Base::NotEqualElem(_)
        | Base::Cast(_)
        | Base::Ones(_)
        | Base::Zeros(_) => ElementWise,
        Base::All(_) | Base::Any(_) | Base::AllDim(_) | Base::AnyDim(_) => Reduction,
        // Among them `Empty`, which writes nothing.
        _ => Other,
    }
}

fn numeric_kind(operation: &Numeric) -> OperationKind {
    match operation {
        Numeric::MeanDim(_)
        | Numeric::Mean(_)
        | Numeric::Sum(_)
        | Numeric::SumDim(_)
        | Numeric::SumDims(_)
        | Numeric::Prod(_)
        | Numeric::ProdDim(_)
        | Numeric::ArgMax(_)
        | Numeric::ArgMin(_)
        | Numeric::Max(_)
        | Numeric::MaxDim(_)
        | Numeric::MaxDimWithIndices(_)
        | Numeric::Min(_)
        | Numeric::MinDim(_)
        | Numeric::MinDimWithIndices(_)
        | Numeric::MaxAbs(_)
        | Numeric::MaxAbsDim(_) => OperationKind::Reduction,
        Numeric::CumSum(_)
        | Numeric::CumProd(_)
        | Numeric::CumMin(_)
        | Numeric::CumMax(_)
        | Numeric::Sort(_)
        | Numeric::SortWithIndices(_)
        | Numeric::ArgSort(_)
        | Numeric::ArgTopK(_)
        | Numeric::TopK(_)
        | Numeric::TopKWithIndices(_)
        | Numeric::Pad(_) => OperationKind::Other,
        _ => OperationKind::ElementWise,
    }
}

/// Indices decide how much of a tensor is read or written, and `Empty` writes nothing.
fn bytes_known(operation: &OperationIr) -> bool {
    let base = |inner: &Base| {
        !matches!(
            inner,
            Base::Select(_)
                | Base::SelectAssign(_)
                | Base::Gather(_)
                | Base::GatherNd(_)
                | Base::Scatter(_)
                | Base::ScatterNd(_)
                | Base::SliceAssign(_)
                | Base::Empty(_)
        )
    };
    match operation {
        OperationIr::BaseFloat(inner)
        | OperationIr::BaseInt(inner)
        | OperationIr::BaseBool(inner) => base(inner),
        OperationIr::Module(Module::Embedding(_) | Module::EmbeddingBackward(_)) => false,
        // Blackburn's own looks rows up as well.
        OperationIr::Custom(custom) => !custom.id.contains("embedding"),
        _ => true,
    }
}

fn arithmetic(operation: &OperationIr) -> Option<Arithmetic> {
    match operation {
        OperationIr::Float(_, Float::Matmul(product)) => {
            let shared = product.lhs.shape.iter().last().copied()? as u64;
            Some(of_floats(elements(&product.out) * shared, &product.lhs))
        }
        OperationIr::Module(inner) => module_arithmetic(inner),
        _ => None,
    }
}

fn of_floats(pairs: u64, operand: &TensorIr) -> Arithmetic {
    Arithmetic { flops: 2 * pairs, element_bytes: operand.dtype.size() as u8 }
}

fn module_arithmetic(operation: &Module) -> Option<Arithmetic> {
    // Every element of the output (or of its gradient) meets the weights of its own channel once, in the
    // forward pass and in both backward.
    let convolution = |output: &TensorIr, weight: &TensorIr| {
        let channels = weight.shape.iter().next().copied()? as u64;
        let weights = elements(weight).checked_div(channels)?;
        Some(of_floats(elements(output) * weights, weight))
    };
    match operation {
        Module::Conv1d(conv) => convolution(&conv.out, &conv.weight),
        Module::Conv2d(conv) => convolution(&conv.out, &conv.weight),
        Module::Conv3d(conv) => convolution(&conv.out, &conv.weight),
        Module::Conv1dXBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Conv2dXBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Conv3dXBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Conv1dWeightBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Conv2dWeightBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Conv3dWeightBackward(conv) => convolution(&conv.output_grad, &conv.weight),
        Module::Attention(attention) => {
            let sizes = |tensor: &TensorIr| -> Option<[u64; 4]> {
                let sizes: Vec<u64> = tensor.shape.iter().map(|size| *size as u64).collect();
                sizes.try_into().ok()
            };
            let [batch, heads, seq_q, head_dim] = sizes(&attention.query)?;
            let [_, _, seq_kv, value_dim] = sizes(&attention.value)?;
            let pairs = if attention.options.is_causal {
                causal_pairs(seq_q, seq_kv)
            } else {
                seq_q * seq_kv
            };
            Some(of_floats(batch * heads * pairs * (head_dim + value_dim), &attention.query))
        }
        _ => None,
    }
}

/// Keys that the queries see, where the last query sees all and each before it one less.
fn causal_pairs(seq_q: u64, seq_kv: u64) -> u64 {
    (0..seq_q).map(|row| (seq_kv + row + 1).saturating_sub(seq_q)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::traffic_bytes;
    use burn::tensor::{DType, Shape};
    use burn_ir::{
        BinaryOpIr, InterpolateBackwardOpIr, InterpolateModeIr, InterpolateOptionsIr, MatmulOpIr,
        MaxPool2dWithIndicesBackwardOpIr, ShapeOpIr, TensorId,
    };

    fn ir(id: u64, shape: &[usize], dtype: DType, status: TensorStatus) -> TensorIr {
        TensorIr { id: TensorId::new(id), shape: Shape::from(shape.to_vec()), status, dtype }
    }

    #[test]
    fn a_matrix_product_is_two_operations_for_each_pair() {
        let product = OperationIr::Float(
            DType::BF16,
            Float::Matmul(MatmulOpIr {
                lhs: ir(1, &[3, 5, 7], DType::BF16, TensorStatus::ReadOnly),
                rhs: ir(2, &[1, 7, 11], DType::BF16, TensorStatus::ReadWrite),
                out: ir(3, &[3, 5, 11], DType::BF16, TensorStatus::NotInit),
            }),
        );
        let record = record(&product);
        assert_eq!((record.name.as_str(), record.kind), ("Matmul", OperationKind::Product));
        let flops = 2 * 3 * 5 * 7 * 11;
        assert_eq!(record.arithmetic, Some(Arithmetic { flops, element_bytes: 2 }));
        let uses: Vec<_> = record.reads.iter().map(|r| (r.id, r.bytes, r.last)).collect();
        assert_eq!(uses, [(1, 3 * 5 * 7 * 2, false), (2, 7 * 11 * 2, true)]);
        assert_eq!(record.writes[0].bytes, 3 * 5 * 11 * 2);
    }

    #[test]
    fn operations_are_named_by_their_variant() {
        let a = ir(1, &[2], DType::F32, TensorStatus::ReadOnly);
        let add = Numeric::Add(BinaryOpIr { lhs: a.clone(), rhs: a.clone(), out: a.clone() });
        let reshape = Base::Reshape(ShapeOpIr { input: a.clone(), out: a.clone() });
        let named = |operation: OperationIr| {
            let record = record(&operation);
            (record.name, record.kind)
        };
        assert_eq!(
            named(OperationIr::NumericFloat(DType::F32, add)),
            ("Add".into(), OperationKind::ElementWise)
        );
        assert_eq!(named(OperationIr::BaseInt(reshape)), ("Reshape".into(), OperationKind::View));
        assert_eq!(named(OperationIr::Drop(a)), ("Drop".into(), OperationKind::Drop));
    }

    #[test]
    fn the_gradient_of_a_pool_moves_gradients_and_indices() {
        let tensor = |id, dtype, status| ir(id, &[2, 3, 4, 4], dtype, status);
        let pooled = |id, dtype| ir(id, &[2, 3, 2, 2], dtype, TensorStatus::ReadWrite);
        let gradient = Module::MaxPool2dWithIndicesBackward(MaxPool2dWithIndicesBackwardOpIr {
            x: tensor(1, DType::BF16, TensorStatus::ReadWrite),
            grad: pooled(2, DType::BF16),
            indices: pooled(3, DType::I32),
            kernel_size: [2; 2],
            stride: [2; 2],
            padding: [0; 2],
            dilation: [1; 2],
            ceil_mode: false,
            out: tensor(4, DType::BF16, TensorStatus::NotInit),
        });
        let record = record(&OperationIr::Module(gradient));
        assert_eq!((record.kind, record.arithmetic), (OperationKind::Other, None));
        assert_eq!(traffic_bytes([&record]), Some(24 * 2 + 24 * 4 + 96 * 2));
    }

    #[test]
    fn the_gradient_of_resized_images_moves_both_gradients() {
        let tensor = |id, shape: &[usize], status| ir(id, shape, DType::F16, status);
        let gradient = Module::InterpolateBackward(InterpolateBackwardOpIr {
            x: tensor(1, &[2, 3, 4, 4], TensorStatus::ReadWrite),
            grad: tensor(2, &[2, 3, 8, 8], TensorStatus::ReadWrite),
            output_size: [8; 2],
            options: InterpolateOptionsIr {
                mode: InterpolateModeIr::Bilinear,
                align_corners: true,
            },
            out: tensor(3, &[2, 3, 4, 4], TensorStatus::NotInit),
        });
        let record = record(&OperationIr::Module(gradient));
        assert_eq!((record.kind, record.arithmetic), (OperationKind::Other, None));
        assert_eq!(traffic_bytes([&record]), Some(2 * (384 + 96)));
    }

    #[test]
    fn causal_attention_sees_a_triangle_at_the_bottom_right() {
        assert_eq!(causal_pairs(4, 4), 1 + 2 + 3 + 4);
        assert_eq!(causal_pairs(2, 5), 4 + 5);
        // Of six queries the first four see nothing.
        assert_eq!(causal_pairs(6, 2), 1 + 2);
    }
}
