//! The primitives by a backend's own operations, with copies of the logits: for the CPU, and for what no
//! kernel serves.
//!
//! The precision is that of the kernels: types of 16 bits are computed in f32 and rounded once.

use super::{AtOnce, Output, Reduced, Reduction, Settings};
use crate::tensors::{Optional, cast, wide};
#[cfg(feature = "flex")]
use burn::backend::try_read_sync;
use burn::{
    backend::{
        Backend, TensorMetadata, get_or_init_device_settings,
        tensor::{BoolTensor, FloatTensor, IntTensor},
    },
    tensor::{IndexingUpdateOp, Shape},
};

#[cfg(feature = "flex")]
impl super::CrossEntropyPrimitives for burn::backend::Flex {
    fn cross_entropy_forward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
    ) -> Output<Self> {
        forward::<Self>(logits, targets, settings)
    }

    fn cross_entropy_reduce(
        loss: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> Reduced<Self> {
        reduce::<Self>(loss, targets, settings, reduction)
    }

    fn cross_entropy_at_once(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        settings: Settings,
        reduction: Reduction,
    ) -> AtOnce<Self> {
        at_once::<Self>(logits, targets, settings, reduction)
    }

    fn cross_entropy_rescale(
        dlogits: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if is_one::<Self>(grad.clone()) { dlogits } else { rescale::<Self>(dlogits, grad) }
    }

    fn cross_entropy_backward(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        lse: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        factor: Optional<Self>,
        settings: Settings,
    ) -> FloatTensor<Self> {
        backward::<Self>(logits, targets, lse, grad, factor, settings)
    }
}

/// Minus infinity less this is minus infinity, and not NaN as less itself.
const LEAST: f32 = f32::MIN;

pub(super) fn forward<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    settings: Settings,
) -> Output<B> {
    let (rows, classes) = (logits.shape()[0], logits.shape()[1]);
    let logits = wide::<B>(logits);
    let most = B::float_clamp_min(B::float_max_dim(logits.clone(), 1), LEAST.into());
    let weights = B::float_exp(B::float_sub(logits.clone(), most.clone()));
    let lse = B::float_add(most, B::float_log(B::float_sum_dim(weights, 1)));
    let row = Row::<B>::of(targets, classes, settings);
    let logit = B::float_gather(1, logits.clone(), row.class.clone());
    let mut loss = B::float_sub(lse.clone(), logit);
    if settings.smoothing > 0.0 {
        let of_all = B::float_sub(lse.clone(), B::float_mean_dim(logits, 1));
        loss = B::float_add(
            B::float_mul_scalar(loss, (1.0 - settings.smoothing).into()),
            B::float_mul_scalar(of_all, settings.smoothing.into()),
        );
    }
    let shape = Shape::new([rows]);
    Output {
        loss: B::float_reshape(row.settled(loss), shape.clone()),
        lse: B::float_reshape(lse, shape),
    }
}

pub(super) fn reduce<B: Backend>(
    loss: FloatTensor<B>,
    targets: IntTensor<B>,
    settings: Settings,
    reduction: Reduction,
) -> Reduced<B> {
    let rows = loss.shape()[0];
    let ones = B::float_ones(loss.shape(), &loss.device(), loss.dtype().into());
    let sum = |values: FloatTensor<B>| B::float_sum_dim(values, 0);
    if reduction != Reduction::Mean {
        let one = B::float_ones(Shape::new([1]), &loss.device(), loss.dtype().into());
        return Reduced { loss: sum(loss), factor: one };
    }
    let counted = match settings.ignore_index {
        Some(index) => {
            let ignored = equal::<B>(B::int_reshape(targets, Shape::new([rows])), index);
            B::float_mask_fill(ones, ignored, 0f32.into())
        }
        None => ones,
    };
    let number = sum(counted);
    Reduced {
        loss: B::float_div(sum(loss), number.clone()),
        // Where no row counts, no gradient is asked.
        factor: B::float_recip(B::float_clamp_min(number, 1f32.into())),
    }
}

pub(super) fn at_once<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    settings: Settings,
    reduction: Reduction,
) -> AtOnce<B> {
    let Output { loss, lse } = forward::<B>(logits.clone(), targets.clone(), settings);
    let Reduced { loss, factor } = reduce::<B>(loss, targets.clone(), settings, reduction);
    let one = B::float_ones(Shape::new([1]), &loss.device(), loss.dtype().into());
    let factor = Optional::Present(factor);
    let dlogits = backward::<B>(logits, targets, lse, one, factor, settings);
    AtOnce { loss, dlogits }
}

/// Whether a number, which is on the host already, is 1.
#[cfg(feature = "flex")]
fn is_one<B: Backend>(number: FloatTensor<B>) -> bool {
    let read = try_read_sync(B::float_into_data(number));
    matches!(read, Some(Ok(number)) if number.iter::<f64>().eq([1.0]))
}

pub(super) fn rescale<B: Backend>(dlogits: FloatTensor<B>, grad: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = dlogits.dtype();
    let grad = B::float_reshape(grad, Shape::new([1, 1]));
    cast::<B>(B::float_mul(wide::<B>(dlogits), grad), dtype)
}

pub(super) fn backward<B: Backend>(
    logits: FloatTensor<B>,
    targets: IntTensor<B>,
    lse: FloatTensor<B>,
    grad: FloatTensor<B>,
    factor: Optional<B>,
    settings: Settings,
) -> FloatTensor<B> {
    let (rows, classes, dtype) = (logits.shape()[0], logits.shape()[1], logits.dtype());
    let column = Shape::new([rows, 1]);
    let grad = match factor {
        Optional::Absent => B::float_reshape(grad, column.clone()),
        Optional::Present(factor) => {
            B::float_reshape(B::float_mul(grad, factor), Shape::new([1, 1]))
        }
    };
    let logits = wide::<B>(logits);
    let excess = B::float_exp(B::float_sub(logits, B::float_reshape(lse, column.clone())));
    let excess = if settings.smoothing > 0.0 {
        B::float_sub_scalar(excess, (settings.smoothing / classes as f64).into())
    } else {
        excess
    };
    let row = Row::<B>::of(targets, classes, settings);
    let at_target = B::float_full(
        column,
        (settings.smoothing - 1.0).into(),
        &excess.device(),
        excess.dtype().into(),
    );
    let excess = B::float_scatter(1, excess, row.class.clone(), at_target, IndexingUpdateOp::Add);
    cast::<B>(row.settled(B::float_mul(excess, grad)), dtype)
}

/// What targets say, `[rows, 1]`.
struct Row<B: Backend> {
    /// The class, or the first where there is none.
    class: IntTensor<B>,
    is_no_class: BoolTensor<B>,
    is_ignored: Option<BoolTensor<B>>,
}

impl<B: Backend> Row<B> {
    fn of(targets: IntTensor<B>, classes: usize, settings: Settings) -> Self {
        let rows = targets.shape()[0];
        let targets = B::int_reshape(targets, Shape::new([rows, 1]));
        let bool_dtype = get_or_init_device_settings::<B>(&targets.device()).bool_dtype;
        let below = B::int_lower_elem(targets.clone(), 0i64.into(), bool_dtype);
        let beyond =
            B::int_greater_equal_elem(targets.clone(), (classes as i64).into(), bool_dtype);
        let is_no_class = B::bool_or(below, beyond);
        Self {
            is_ignored: settings.ignore_index.map(|index| equal::<B>(targets.clone(), index)),
            class: B::int_mask_fill(targets, is_no_class.clone(), 0i64.into()),
            is_no_class,
        }
    }

    /// Rows of one or more values: NaN without a class, zero where they do not count.
    fn settled(&self, values: FloatTensor<B>) -> FloatTensor<B> {
        let fill = |values: FloatTensor<B>, mask: &BoolTensor<B>, value: f32| {
            let mask = B::bool_expand(mask.clone(), values.shape());
            B::float_mask_fill(values, mask, value.into())
        };
        let values = fill(values, &self.is_no_class, f32::NAN);
        match &self.is_ignored {
            Some(ignored) => fill(values, ignored, 0.0),
            None => values,
        }
    }
}

fn equal<B: Backend>(targets: IntTensor<B>, index: i32) -> BoolTensor<B> {
    let bool_dtype = get_or_init_device_settings::<B>(&targets.device()).bool_dtype;
    B::int_equal_elem(targets, i64::from(index).into(), bool_dtype)
}
