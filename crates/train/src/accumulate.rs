//! Gradient accumulation that equals the whole batch.
//!
//! A mean over a batch of weight W (samples, or tokens) splits into micro-batches of weights `w_i` as
//! `mean = sum_i w_i mean_i / W`. [`GradientSum`] does just that for gradients, whatever the sizes
//! of the micro-batches; the last, smaller one counts for what it holds.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::Tensor,
};

/// A weighted sum of the gradients of micro-batches.
#[derive(Debug, Default)]
pub struct GradientSum {
    sum: GradientsParams,
    weight: f64,
    first_weight: Option<f64>,
    parts: usize,
}

impl GradientSum {
    /// An empty sum.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many micro-batches were added since the last [`mean`](Self::mean).
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Adds the gradients of a micro-batch's *mean* loss, which stands for `weight` samples or
    /// tokens. A parameter without a gradient in one micro-batch counts as zero there.
    ///
    /// # Panics
    ///
    /// When `weight` is not positive and finite.
    pub fn add<M: Module>(&mut self, module: &M, gradients: GradientsParams, weight: f64) {
        assert!(
            weight.is_finite() && weight > 0.0,
            "GradientSum::add: argument `weight`: expected a positive number, got {weight}"
        );
        // The sum is kept relative to the first weight: equal micro-batches, the usual case, add
        // up without a multiplication, and sums stay in range for 16-bit gradients.
        let unit = *self.first_weight.get_or_insert(weight);
        let mut adder = Adder { sum: &mut self.sum, new: gradients, factor: weight / unit };
        module.visit(&mut adder);
        self.weight += weight;
        self.parts += 1;
    }

    /// The gradient of the mean over everything added, and a fresh start. `None` when nothing was
    /// added.
    pub fn mean<M: Module>(&mut self, module: &M) -> Option<GradientsParams> {
        let done = std::mem::take(self);
        let factor = done.first_weight? / done.weight;
        let mut sum = done.sum;
        if factor != 1.0 {
            module.visit(&mut Scaler { gradients: &mut sum, factor });
        }
        Some(sum)
    }
}

struct Adder<'a> {
    sum: &'a mut GradientsParams,
    new: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(mut gradient) = self.new.remove::<D>(param.id) else { return };
        if self.factor != 1.0 {
            gradient = gradient.mul_scalar(self.factor);
        }
        if let Some(sum) = self.sum.remove::<D>(param.id) {
            gradient = sum.add(gradient);
        }
        self.sum.register::<D>(param.id, gradient);
    }
}

struct Scaler<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scaler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.gradients.register::<D>(param.id, gradient.mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{Linear, LinearConfig},
        tensor::{Device, Distribution},
    };

    const ROWS: usize = 7;

    fn gradients(model: &Linear, x: Tensor<2>) -> GradientsParams {
        let loss = model.forward(x).powi_scalar(2).mean();
        GradientsParams::from_grads(loss.backward(), model)
    }

    fn weight_gradient(model: &Linear, gradients: &GradientsParams) -> Vec<f32> {
        let gradient = gradients.get::<2>(model.weight.id).expect("the weight has a gradient");
        gradient.into_data().try_to_vec().expect("gradients are f32")
    }

    /// Each sum of `ROWS` rounded terms of magnitude `scale` is off by at most ROWS u scale.
    fn assert_close(actual: &[f32], expected: &[f32]) {
        let scale = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
        let bound = 2.0 * ROWS as f32 * f32::EPSILON * scale;
        for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert!((a - e).abs() <= bound, "element {i}: {a} against {e}, bound {bound}");
        }
    }

    fn model_and_batch() -> (Linear, Tensor<2>) {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(5, 3).init(&device);
        let x = Tensor::random([ROWS, 5], Distribution::Default, &device);
        (model, x)
    }

    #[test]
    fn unequal_micro_batches_add_up_to_the_whole_batch() {
        let (model, x) = model_and_batch();
        let whole = weight_gradient(&model, &gradients(&model, x.clone()));
        let mut sum = GradientSum::new();
        for (from, to) in [(0, 4), (4, 6), (6, 7)] {
            let part = x.clone().slice([from..to, 0..5]);
            sum.add(&model, gradients(&model, part), (to - from) as f64);
        }
        assert_eq!(sum.parts(), 3);
        let mean = sum.mean(&model).expect("three parts were added");
        assert_close(&weight_gradient(&model, &mean), &whole);
    }

    #[test]
    fn ignoring_the_weights_would_be_noticed() {
        let (model, x) = model_and_batch();
        let whole = weight_gradient(&model, &gradients(&model, x.clone()));
        let mut sum = GradientSum::new();
        for (from, to) in [(0, 6), (6, 7)] {
            sum.add(&model, gradients(&model, x.clone().slice([from..to, 0..5])), 1.0);
        }
        let wrong = weight_gradient(&model, &sum.mean(&model).expect("two parts were added"));
        let off = wrong.iter().zip(&whole).any(|(a, b)| (a - b).abs() > 1e-3 * b.abs());
        assert!(off, "equal weights for unequal parts gave the whole batch's gradient");
    }

    #[test]
    fn a_mean_starts_the_sum_afresh() {
        let (model, x) = model_and_batch();
        let mut sum = GradientSum::new();
        sum.add(&model, gradients(&model, x), 7.0);
        assert!(sum.mean(&model).is_some());
        assert!(sum.mean(&model).is_none());
    }

    #[test]
    #[should_panic(expected = "argument `weight`")]
    fn a_weight_of_zero_is_refused() {
        let (model, x) = model_and_batch();
        GradientSum::new().add(&model, gradients(&model, x), 0.0);
    }
}
