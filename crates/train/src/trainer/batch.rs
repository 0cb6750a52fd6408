//! Micro-batches and their weights.

use super::TrainerError;
use crate::graph::{PassTensors, TensorLayout};

/// A part of a step's batch, and how much it counts.
#[derive(Clone, Debug)]
pub struct MicroBatch<I> {
    /// What the closure is given.
    pub tensors: I,
    /// What its mean loss stands for: samples, or tokens that count. A micro-batch of weight 0 is left out.
    pub weight: f64,
}

impl<I: PassTensors> MicroBatch<I> {
    /// A micro-batch whose weight is its number of rows: the first dimension of its tensors.
    ///
    /// # Errors
    ///
    /// When its tensors differ in that, or there are none.
    pub fn new(tensors: I) -> Result<Self, TrainerError> {
        let rows = rows(&tensors)?;
        Ok(Self { tensors, weight: rows as f64 })
    }
}

/// A batch in `parts` of as many rows, but for the last.
pub(super) fn split<I: PassTensors>(
    batch: I,
    parts: usize,
) -> Result<Vec<MicroBatch<I>>, TrainerError> {
    if parts == 1 {
        // On one rank the weight does not matter, so tensors without rows are as good.
        let weight = rows(&batch).map_or(1.0, |rows| rows.max(1) as f64);
        return Ok(vec![MicroBatch { tensors: batch, weight }]);
    }
    let rows = rows(&batch)?;
    let size = rows.div_ceil(parts).max(1);
    let starts = (0..rows).step_by(size);
    Ok(starts
        .map(|start| {
            let length = size.min(rows - start);
            MicroBatch { tensors: batch.rows(start, length), weight: length as f64 }
        })
        .collect())
}

/// Size of the first dimension.
fn rows<I: PassTensors>(tensors: &I) -> Result<usize, TrainerError> {
    let refused = |actual: String| TrainerError::Batch {
        argument: "batch",
        expected: "tensors that share their first dimension, to split the batch or weight it by"
            .into(),
        actual,
    };
    let layouts = tensors.layout();
    let first = |layout: &TensorLayout| layout.dims.first().copied();
    let Some(rows) = layouts.first().and_then(first) else {
        return Err(refused("none".into()));
    };
    match layouts.iter().all(|layout| first(layout) == Some(rows)) {
        true => Ok(rows),
        false => {
            let shapes: Vec<_> = layouts.iter().map(|layout| &layout.dims).collect();
            Err(refused(format!("shapes {shapes:?}")))
        }
    }
}

/// Micro-batches that count.
pub(super) struct Weighted<I> {
    pub(super) tensors: Vec<I>,
    /// What the loss of each is multiplied by so that the mean over all of them is the batch's: 1 for each where
    /// all weigh the same.
    pub(super) factors: Vec<f64>,
    /// Of all of them.
    pub(super) weight: f64,
}

/// Leaves out those of no weight.
pub(super) fn weighted<I>(micro_batches: Vec<MicroBatch<I>>) -> Result<Weighted<I>, TrainerError> {
    let wrong = |part: &&MicroBatch<I>| !(part.weight.is_finite() && part.weight >= 0.0);
    if let Some(part) = micro_batches.iter().find(wrong) {
        return Err(TrainerError::Batch {
            argument: "weight",
            expected: "a finite number of at least 0".into(),
            actual: part.weight.to_string(),
        });
    }
    let counted: Vec<_> = micro_batches.into_iter().filter(|part| part.weight > 0.0).collect();
    let weight: f64 = counted.iter().map(|part| part.weight).sum();
    let count = counted.len() as f64;
    let (tensors, factors) =
        counted.into_iter().map(|part| (part.tensors, part.weight * count / weight)).unzip();
    Ok(Weighted { tensors, factors, weight })
}

/// A step of nothing, which only a rank among others can take.
pub(super) fn nothing_counts() -> TrainerError {
    TrainerError::Batch {
        argument: "micro_batches",
        expected: "at least one micro-batch with a weight above 0".into(),
        actual: "none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Int, Tensor};

    fn batch(rows: usize) -> (Tensor<2>, Tensor<1, Int>) {
        let device = Device::flex();
        (Tensor::zeros([rows, 3], &device), Tensor::arange(0..rows as i64, &device))
    }

    #[test]
    fn a_batch_is_split_by_rows_and_the_last_part_may_be_smaller() {
        let parts = split(batch(7), 3).expect("both tensors have 7 rows");
        let sizes: Vec<_> = parts.iter().map(|part| part.tensors.0.dims()[0]).collect();
        assert_eq!(sizes, [3, 3, 1]);
        let last: Vec<i64> = parts[2].tensors.1.to_data().iter::<i64>().collect();
        assert_eq!((last, parts[2].weight), (vec![6], 1.0));
        assert_eq!(split(batch(2), 5).expect("rows are fewer than parts").len(), 2);
    }

    #[test]
    fn factors_are_shares_of_the_mean() {
        let parts = split(batch(7), 3).expect("both tensors have 7 rows");
        let Weighted { factors, weight, .. } = weighted(parts).expect("the weights are sound");
        assert_eq!(weight, 7.0);
        let expected = [9.0 / 7.0, 9.0 / 7.0, 3.0 / 7.0];
        assert!(factors.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{factors:?}");
        let equal = weighted(split(batch(6), 3).expect("6 rows")).expect("sound");
        assert_eq!(equal.factors, [1.0; 3]);
    }

    #[test]
    fn micro_batches_of_no_weight_are_left_out_and_wrong_weights_refused() {
        let part = |weight| MicroBatch { tensors: weight, weight };
        let left = weighted(vec![part(0.0), part(2.0)]).expect("one counts");
        assert_eq!((left.tensors, left.factors), (vec![2.0], vec![1.0]));
        for nothing in [vec![part(0.0)], vec![]] {
            assert!(weighted(nothing).expect("the weights are sound").tensors.is_empty());
        }
        for (weights, expected) in [
            (vec![1.0, f64::NAN], "`weight`: expected a finite number of at least 0, got NaN"),
            (vec![-1.0], "`weight`"),
        ] {
            let parts = weights.iter().map(|weight| part(*weight)).collect();
            let refused = weighted(parts).err().expect(expected);
            let message = refused.to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn tensors_without_rows_in_common_are_named_by_their_shapes() {
        let (x, _) = batch(7);
        let (_, y) = batch(6);
        let message = split((x, y), 2).expect_err("7 and 6 rows").to_string();
        assert!(message.contains("shapes [[7, 3], [6]]"), "{message}");
        assert!(split((), 2).is_err());
        assert_eq!(split((), 1).expect("it is not split").len(), 1);
    }
}
