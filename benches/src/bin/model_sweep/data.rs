//! Batches of random data, and where pairs of tokens find their bias.

use super::Case;
use crate::names::Shape;
use burn::tensor::{Distribution, Int, Tensor};

impl Case<'_> {
    pub(crate) fn ids<const D: usize>(&self, dims: [usize; D]) -> Tensor<D, Int> {
        self.ids_below(self.shape.classes, dims)
    }

    pub(crate) fn ids_below<const D: usize>(
        &self,
        upper: usize,
        dims: [usize; D],
    ) -> Tensor<D, Int> {
        let ids = Tensor::random(dims, Distribution::Uniform(0.0, upper as f64), self.device);
        Tensor::from_inner(ids)
    }

    pub(crate) fn places(&self, count: usize) -> Tensor<2, Int> {
        let places = Tensor::<1, Int>::arange(0..count as i64, self.device).unsqueeze::<2>();
        Tensor::from_inner(places.repeat_dim(0, self.shape.batch))
    }

    pub(crate) fn numbers<const D: usize>(&self, dims: [usize; D]) -> Tensor<D> {
        let numbers: Tensor<D> = Tensor::random(dims, Distribution::Normal(0.0, 1.0), self.device);
        Tensor::from_inner(numbers.cast(self.precision.dtype()))
    }

    pub(crate) fn images(&self) -> Tensor<4> {
        let Shape { batch, length, .. } = self.shape;
        self.numbers([batch, 3, length, length])
    }

    /// Where pairs of a query and a key find their bias in T5, `[tokens, tokens]`: by their distance where it is small,
    /// and by its logarithm where it is not.
    pub(crate) fn buckets(&self, tokens: usize, is_causal: bool) -> Tensor<2, Int> {
        const BUCKETS: usize = 32;
        const FARTHEST: f64 = 128.0;
        // Without causality, half of them are for what follows.
        let count = if is_causal { BUCKETS } else { BUCKETS / 2 };
        let bucket = |pair: usize| {
            let (query, key) = (pair / tokens, pair % tokens);
            let is_behind = key > query;
            let first = if is_behind && !is_causal { count } else { 0 };
            let distance = if is_behind && is_causal { 0 } else { query.abs_diff(key) };
            let exact = count / 2;
            if distance < exact {
                return (first + distance) as i64;
            }
            let far = (distance as f64 / exact as f64).ln() / (FARTHEST / exact as f64).ln();
            let place = exact + (far * (count - exact) as f64) as usize;
            (first + place.min(count - 1)) as i64
        };
        let buckets: Vec<i64> = (0..tokens * tokens).map(bucket).collect();
        let buckets = Tensor::<1, Int>::from_ints(buckets.as_slice(), self.device);
        Tensor::from_inner(buckets.reshape([tokens, tokens]))
    }
}
