//! Gradient accumulation that equals the whole batch.
//!
//! A mean over a batch of weight W (samples, or tokens) splits into micro-batches of weights `w_i` as
//! `mean = sum_i w_i mean_i / W`. [`GradientSum`] does just that for gradients. Micro-batches may have any
//! sizes: a last, smaller one counts for what it holds.
//!
//! The mean is of whatever was added, so a last window with fewer micro-batches needs no special case. Clip
//! what [`GradientSum::mean`] returns and not the parts: the norm of a sum is not the sum of the norms.
//!
//! One set of gradients is held between micro-batches. The first is kept as it is, and the others are added
//! to it. Gradients in 16 bits are weighted and added up in f32.
//!
//! Gradients of a [`GradientGraph`](crate::graph::GradientGraph) may be added like any others. They are the
//! recording's own memory, so the first of them are copied.

use crate::graph::PassTensors;
use blackburn_backend::graph;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor},
};
use std::collections::HashSet;

/// Why gradients cannot be added. The sum is what it was before.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AccumulateError {
    /// The weight counts nothing.
    #[error(
        "GradientSum::add: argument `weight`: expected a finite number of at least 0, got {weight}"
    )]
    Weight {
        /// The weight given.
        weight: f64,
    },
    /// Not one parameter has a gradient: the loss does not depend on the module.
    #[error("GradientSum::add: argument `gradients`: expected at least one gradient, got none")]
    Empty,
    /// Gradients of another module, or of more than this one.
    #[error(
        "GradientSum::add: argument `gradients`: expected the gradients of `module` alone, got \
         {given}, of which {matched} belong to its parameters"
    )]
    Foreign {
        /// Gradients given.
        given: usize,
        /// Those that belong to the module's parameters.
        matched: usize,
    },
    /// The sum so far holds gradients that the module has no parameters for.
    #[error(
        "{operation}: argument `module`: expected the module whose gradients were added before, \
         got one with {matched} of its {held} parameters"
    )]
    ModuleChanged {
        /// The method called.
        operation: &'static str,
        /// Gradients in the sum.
        held: usize,
        /// Those that belong to the module's parameters.
        matched: usize,
    },
}

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

    /// How many micro-batches of weight above 0 were added since the last [`mean`](Self::mean).
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// The weight of all micro-batches that were added since the last [`mean`](Self::mean).
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Adds the gradients of a micro-batch's *mean* loss, which stands for `weight` samples or
    /// tokens. A parameter without a gradient in one micro-batch counts as zero there.
    ///
    /// A micro-batch of weight 0 (all its tokens masked, say) is skipped: its gradients are dropped
    /// unread, and may well be NaN, as those of a mean over nothing are.
    ///
    /// # Panics
    ///
    /// Where [`try_add`](Self::try_add) returns an error.
    pub fn add<M: Module>(&mut self, module: &M, gradients: GradientsParams, weight: f64) {
        if let Err(error) = self.try_add(module, gradients, weight) {
            panic!("{error}");
        }
    }

    /// As [`add`](Self::add), with errors for mistakes that would go unnoticed otherwise.
    ///
    /// # Errors
    ///
    /// When `weight` is negative or not finite, there are no gradients or some that are not of
    /// `module`'s parameters, or other modules' gradients were added before. The sum is then what it
    /// was before.
    pub fn try_add<M: Module>(
        &mut self,
        module: &M,
        gradients: GradientsParams,
        weight: f64,
    ) -> Result<(), AccumulateError> {
        if !(weight.is_finite() && weight >= 0.0) {
            return Err(AccumulateError::Weight { weight });
        }
        if weight == 0.0 {
            return Ok(());
        }
        if gradients.is_empty() {
            return Err(AccumulateError::Empty);
        }
        let (given, matched) = (gradients.len(), matching(module, &gradients));
        if matched != given {
            return Err(AccumulateError::Foreign { given, matched });
        }
        self.check("GradientSum::add", module)?;
        // The sum is kept relative to the first weight: equal micro-batches, the usual case, add
        // up without a multiplication.
        let unit = *self.first_weight.get_or_insert(weight);
        let mut adder = Adder { sum: &mut self.sum, new: gradients, factor: weight / unit };
        module.visit(&mut adder);
        self.weight += weight;
        self.parts += 1;
        Ok(())
    }

    /// The gradient of the mean over everything added, and a fresh start. `None` when nothing was
    /// added, or nothing but micro-batches of weight 0.
    ///
    /// # Panics
    ///
    /// When `module` is not the one whose gradients were added; the sum is kept.
    pub fn mean<M: Module>(&mut self, module: &M) -> Option<GradientsParams> {
        if let Err(error) = self.check("GradientSum::mean", module) {
            panic!("{error}");
        }
        let done = std::mem::take(self);
        let factor = done.first_weight? / done.weight;
        let mut sum = done.sum;
        if factor != 1.0 {
            module.visit(&mut Scaler { gradients: &mut sum, factor, seen: HashSet::new() });
        }
        Some(sum)
    }

    fn check<M: Module>(&self, operation: &'static str, module: &M) -> Result<(), AccumulateError> {
        let (held, matched) = (self.sum.len(), matching(module, &self.sum));
        match matched == held {
            true => Ok(()),
            false => Err(AccumulateError::ModuleChanged { operation, held, matched }),
        }
    }
}

/// How many of `gradients` belong to parameters of `module`.
fn matching<M: Module>(module: &M, gradients: &GradientsParams) -> usize {
    let mut visitor = Matching { gradients, seen: HashSet::new() };
    module.visit(&mut visitor);
    visitor.seen.len()
}

struct Matching<'a> {
    gradients: &'a GradientsParams,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Matching<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.gradients.get::<D>(param.id).is_some() {
            self.seen.insert(param.id);
        }
    }
}

/// Memory that somebody else holds may be written to by them: a recording's is, by each replay.
fn own<const D: usize>(gradient: Tensor<D>) -> Tensor<D> {
    match gradient.can_mut() || !graph::is_supported(&gradient.device()) {
        true => gradient,
        false => gradient.held(),
    }
}

/// Sums of 16-bit gradients are in f32, or they would lose what a micro-batch adds.
fn widened<const D: usize>(gradient: Tensor<D>) -> Tensor<D> {
    match gradient.dtype() {
        DType::F16 | DType::BF16 => gradient.cast(FloatDType::F32),
        _ => gradient,
    }
}

struct Adder<'a> {
    sum: &'a mut GradientsParams,
    new: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Adder<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.new.remove::<D>(param.id) else { return };
        // In f32 before it is weighted: the product may be out of range for 16 bits.
        let weighted = match self.factor == 1.0 {
            true => gradient,
            false => widened(gradient).mul_scalar(self.factor),
        };
        let sum = match self.sum.remove::<D>(param.id) {
            Some(sum) => widened(sum).add(widened(weighted)),
            None => own(weighted),
        };
        self.sum.register::<D>(param.id, sum);
    }
}

struct Scaler<'a> {
    gradients: &'a mut GradientsParams,
    factor: f64,
    /// A parameter in two places of a module is visited twice, and its gradient scaled once.
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scaler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let scaled = widened(gradient).mul_scalar(self.factor);
            self.gradients.register::<D>(param.id, scaled);
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
    fn an_incomplete_last_window_is_the_mean_of_what_it_holds() {
        let (model, x) = model_and_batch();
        let tail = x.clone().slice([4..7, 0..5]);
        let expected = weight_gradient(&model, &gradients(&model, tail));
        let mut sum = GradientSum::new();
        // Windows of two micro-batches of two rows; the last has one of two and one of one.
        for (from, to) in [(0, 2), (2, 4), (4, 6), (6, 7)] {
            let part = x.clone().slice([from..to, 0..5]);
            sum.add(&model, gradients(&model, part), (to - from) as f64);
            if to == 4 {
                assert!(sum.mean(&model).is_some());
            }
        }
        assert_eq!(sum.parts(), 2);
        let mean = sum.mean(&model).expect("two parts were added");
        assert_close(&weight_gradient(&model, &mean), &expected);
    }

    #[test]
    fn a_micro_batch_of_weight_zero_is_skipped_even_when_its_loss_is_nan() {
        let (model, x) = model_and_batch();
        let masked = model.forward(x.clone()).sum().mul_scalar(0.0).div_scalar(0.0);
        let masked = GradientsParams::from_grads(masked.backward(), &model);
        assert!(weight_gradient(&model, &masked).iter().all(|value| value.is_nan()));
        let expected = weight_gradient(&model, &gradients(&model, x.clone()));
        let mut sum = GradientSum::new();
        sum.add(&model, masked, 0.0);
        assert_eq!(sum.parts(), 0);
        assert!(sum.mean(&model).is_none());
        sum.add(&model, gradients(&model, x.clone()), 7.0);
        sum.add(&model, gradients(&model, x), 0.0);
        let mean = sum.mean(&model).expect("one part was added");
        assert_eq!(weight_gradient(&model, &mean), expected);
    }

    #[test]
    fn what_cannot_be_added_is_refused_and_the_sum_kept() {
        let (model, x) = model_and_batch();
        let (other, _) = model_and_batch();
        let mut sum = GradientSum::new();
        sum.add(&model, gradients(&model, x.clone()), 7.0);
        let foreign = gradients(&other, x.clone());
        for (error, expected) in [
            (sum.try_add(&model, foreign, 7.0), "got 2, of which 0 belong to its parameters"),
            (sum.try_add(&model, GradientsParams::new(), 7.0), "expected at least one gradient"),
            (
                sum.try_add(&other, gradients(&other, x.clone()), 7.0),
                "argument `module`: expected the module whose gradients were added before, got one \
                 with 0 of its 2 parameters",
            ),
            (sum.try_add(&model, gradients(&model, x.clone()), -1.0), "`weight`"),
            (sum.try_add(&model, gradients(&model, x.clone()), f64::NAN), "at least 0, got NaN"),
            (sum.try_add(&model, gradients(&model, x.clone()), f64::INFINITY), "got inf"),
        ] {
            let message = error.expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert_eq!(sum.parts(), 1);
        let expected = weight_gradient(&model, &gradients(&model, x));
        let mean = sum.mean(&model).expect("one part was added");
        assert_eq!(weight_gradient(&model, &mean), expected);
    }

    #[test]
    #[should_panic(expected = "GradientSum::mean: argument `module`")]
    fn the_mean_for_another_module_is_refused() {
        let (model, x) = model_and_batch();
        let mut sum = GradientSum::new();
        sum.add(&model, gradients(&model, x), 7.0);
        let (other, _) = model_and_batch();
        let _ = sum.mean(&other);
    }

    #[test]
    fn the_gradient_of_a_parameter_in_two_places_is_scaled_once() {
        let (model, x) = model_and_batch();
        let twice = (model.clone(), model.clone());
        let expected = weight_gradient(&model, &gradients(&model, x.clone()));
        let mut sum = GradientSum::new();
        for _ in 0..2 {
            sum.add(&twice, gradients(&model, x.clone()), 7.0);
        }
        let mean = sum.mean(&twice).expect("two parts were added");
        assert_eq!(weight_gradient(&model, &mean), expected);
    }

    /// Neither 100000 nor its inverse is a number of f16 (the inverse is, to 6 % of itself).
    #[test]
    fn gradients_in_16_bits_are_weighted_in_f32() {
        let (model, _) = model_and_batch();
        let device = Device::flex();
        let ones = |dtype| {
            let mut gradients = GradientsParams::new();
            let ones = Tensor::<2>::ones(model.weight.dims(), (&device, dtype));
            gradients.register::<2>(model.weight.id, ones);
            gradients
        };
        for dtype in [DType::F16, DType::BF16] {
            for weights in [[1.0, 1e5], [1e5, 1.0]] {
                let mut sum = GradientSum::new();
                for weight in weights {
                    sum.add(&model, ones(dtype), weight);
                }
                let mean = sum.mean(&model).expect("two parts were added");
                assert_close(&weight_gradient(&model, &mean), &[1.0; 15]);
            }
        }
    }

    /// Its sum is that of one part, so it is still in 16 bits when the mean is made.
    #[test]
    fn a_parameter_with_a_gradient_in_one_part_alone_is_divided_in_f32() {
        let (model, _) = model_and_batch();
        let mut sum = GradientSum::new();
        let bias = model.bias.as_ref().expect("LinearConfig gives a bias");
        for with_weight in [true, false] {
            let mut gradients = GradientsParams::new();
            let half = (&Device::flex(), DType::F16);
            gradients.register::<1>(bias.id, Tensor::ones([3], half));
            if with_weight {
                gradients.register::<2>(model.weight.id, Tensor::ones([5, 3], half));
            }
            sum.add(&model, gradients, if with_weight { 1.0 } else { 99_999.0 });
        }
        let mean = sum.mean(&model).expect("two parts were added");
        assert_close(&weight_gradient(&model, &mean), &[1e-5; 15]);
    }

    #[test]
    #[should_panic(expected = "argument `weight`")]
    fn a_negative_weight_is_refused() {
        let (model, x) = model_and_batch();
        GradientSum::new().add(&model, gradients(&model, x), -1.0);
    }
}
