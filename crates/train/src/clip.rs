//! Clipping by the global norm or by value.

use blackburn_backend::{loss_scale::Measured, square_sum::SquareSum, steps::repeat::Watch};
use burn::{
    grad_clipping::GradientClipping,
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor},
};
use std::collections::HashSet;

/// Guards the division where all gradients are zero; PyTorch's `clip_grad_norm_` has the same.
const EPSILON: f64 = 1e-6;

/// Tensors that are joined at once. Burn's fusion makes one kernel of a concatenation as long as its
/// inputs fit a kernel's bindings, and Burn 0.22 launches one for each input otherwise.
const JOINED: usize = 16;

/// Elements that one unit of the device adds up. Burn's sums take a unit for each result, whatever the
/// length: over whole rows of GPT-2's gradients they took 10 ms on an H200.
const TERMS: usize = 32;

/// Fewer elements than these are joined with others first.
const LEAST_SUMMED: usize = 16 * 1024;

/// Scales all gradients of `module` by one factor so that their joint L2 norm is at most
/// `max_norm`, and returns the norm that they had.
///
/// The norm is computed in f32 on the device that holds the gradients, and nothing waits for it: read the
/// returned tensor (one element) when it is needed, or not at all. Where a gradient is not finite,
/// the norm is not either, and all gradients are left as they were, so that
/// [`nonfinite_gradients`](crate::nonfinite::nonfinite_gradients) can tell whose it is: check the norm before relying on the step. (The
/// squares of values above 1.8e19 are infinite in f32, and so is the norm then.)
///
/// Each gradient is read once for the norm and once to be scaled. On GPUs the norm takes a kernel for every
/// 32 gradients of a type, and one more for all that is left. Elsewhere it takes one for each matrix, a
/// concatenation for every 16 vectors or sums, and a few last sums; vectors are squared together.
///
/// Pass `f64::INFINITY` to measure without clipping. After accumulation clip the mean, not the parts.
///
/// Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
/// arXiv:1211.5063, section 3.2.
///
/// # Panics
///
/// When `max_norm` is not positive, or there are no gradients.
pub fn clip_global_norm<M: Module>(
    gradients: &mut GradientsParams,
    module: &M,
    max_norm: f64,
) -> Tensor<1> {
    assert!(
        max_norm > 0.0,
        "clip_global_norm: argument `max_norm`: expected a positive number, got {max_norm}"
    );
    let Measured { norm, factor, .. } = Squares::of(gradients, module, None)
        .measured(None, max_norm)
        .expect("clip_global_norm: argument `gradients`: expected at least one gradient, got none");
    if max_norm.is_finite() {
        module.visit(&mut Scaler { gradients, seen: HashSet::new(), factor });
    }
    norm
}

/// What is known of gradients whose squares add up to `squares`, one element: their joint L2 norm in f32, without
/// `scale` if they were multiplied by one, whether it is finite with it, and what undoes the scale and clips them. The
/// factor is 1 where there is nothing to undo or clip.
pub(crate) fn measured_of(squares: Tensor<1>, scale: Option<Tensor<1>>, max_norm: f64) -> Measured {
    let scaled_norm = squares.sqrt();
    let finite = scaled_norm.clone().is_finite().float().cast(FloatDType::F32);
    let unscaling = match scale {
        Some(scale) => scale.recip(),
        None => scaled_norm.ones_like(),
    };
    let norm = scaled_norm * unscaling.clone();
    let factor = match clipping_factor(&norm, max_norm) {
        Some(clipping) => unscaling * clipping,
        None => unscaling,
    };
    Measured { norm, finite, factor }
}

/// What gradients of that norm are multiplied by, 1 where it is not finite; `None` when nothing is
/// clipped.
fn clipping_factor(norm: &Tensor<1>, max_norm: f64) -> Option<Tensor<1>> {
    let limit = max_norm.is_finite().then_some(max_norm)?;
    let factor = norm.clone().add_scalar(EPSILON).recip().mul_scalar(limit).clamp_max(1.0);
    Some(factor.mask_fill(norm.clone().is_finite().bool_not(), 1.0))
}

/// Limits every element of the gradients of `module` to the range from `-max_value` to `max_value`,
/// in their own types, without waiting for the device.
///
/// An infinite element becomes plus or minus `max_value`, as with `PyTorch`'s
/// `clip_grad_value_`; NaN stays NaN.
///
/// # Panics
///
/// When `max_value` is not positive and finite, or there are no gradients.
pub fn clip_value<M: Module>(gradients: &mut GradientsParams, module: &M, max_value: f32) {
    assert!(
        max_value.is_finite() && max_value > 0.0,
        "clip_value: argument `max_value`: expected a positive number, got {max_value}"
    );
    let clipping = GradientClipping::Value(max_value);
    let mut limiter = Limiter { gradients, clipping, found: false };
    module.visit(&mut limiter);
    assert!(
        limiter.found,
        "clip_value: argument `gradients`: expected at least one gradient, got none"
    );
}

/// What the sum of all squares is made of. A parameter in two places counts once.
pub(crate) struct Squares<'a> {
    gradients: &'a GradientsParams,
    seen: HashSet<ParamId>,
    watch: Option<&'a Watch>,
    /// Of all gradients that one kernel each squares and sums.
    on_gpu: Option<SquareSum>,
    /// Gradients of one dimension, not squared yet.
    vectors: Vec<Tensor<1>>,
    /// Sums of squares.
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
        if !self.seen.insert(param.id) {
            return;
        }
        if SquareSum::serves(&gradient) {
            let sum = self.on_gpu.take().unwrap_or_else(|| {
                let none = SquareSum::new(&gradient.device());
                match self.watch {
                    Some(watch) => none.noted(watch.sums()),
                    None => none,
                }
            });
            self.on_gpu = Some(sum.with(gradient));
            return;
        }
        let elements = gradient.shape().num_elements();
        let gradient = gradient.cast(FloatDType::F32).reshape([elements]);
        if elements < LEAST_SUMMED {
            self.vectors.push(gradient);
        } else {
            self.sums.extend(summed(gradient, |some| some.powi_scalar(2)));
        }
    }
}

impl<'a> Squares<'a> {
    pub(crate) fn of<M: Module>(
        gradients: &'a GradientsParams,
        module: &M,
        watch: Option<&'a Watch>,
    ) -> Self {
        let (seen, vectors, sums) = Default::default();
        let mut squares = Self { gradients, seen, watch, on_gpu: None, vectors, sums };
        module.visit(&mut squares);
        squares
    }

    /// As [`measured_of`], by one more launch on GPUs; `None` without gradients.
    pub(crate) fn measured(mut self, scale: Option<Tensor<1>>, max_norm: f64) -> Option<Measured> {
        match self.alone_on_gpu() {
            Some(on_gpu) => Some(on_gpu.measured(scale, (max_norm as f32).max(f32::MIN_POSITIVE))),
            None => Some(measured_of(self.total()?, scale, max_norm)),
        }
    }

    /// The sum on the GPU, taken out, if all of it is there.
    fn alone_on_gpu(&mut self) -> Option<SquareSum> {
        let is_all = self.vectors.is_empty() && self.sums.is_empty();
        self.on_gpu.take_if(|_| is_all)
    }

    /// The sum, one element; `None` without gradients.
    pub(crate) fn total(self) -> Option<Tensor<1>> {
        let vectors = self.vectors.chunks(JOINED).map(|some| join(some).powi_scalar(2));
        let on_gpu = self.on_gpu.map(SquareSum::total);
        let mut parts: Vec<Tensor<1>> = vectors.chain(self.sums).chain(on_gpu).collect();
        while parts.len() > 1 {
            parts = parts.chunks(JOINED).map(join).collect();
        }
        let mut all = parts.pop()?;
        while all.shape().num_elements() >= LEAST_SUMMED {
            all = join(&summed(all, |some| some));
        }
        Some(all.sum())
    }
}

/// Sums of every [`TERMS`] elements, changed before, and what is left over. Terms lie apart, so that
/// neighboring units read neighboring elements.
fn summed(all: Tensor<1>, change: impl Fn(Tensor<2>) -> Tensor<2>) -> Vec<Tensor<1>> {
    let elements = all.shape().num_elements();
    let (columns, rest) = (elements / TERMS, elements % TERMS);
    let (whole, left_over) = match rest {
        0 => (all, None),
        _ => (
            all.clone().slice(0..elements - rest),
            Some(all.slice(elements - rest..elements).reshape([1, rest])),
        ),
    };
    let sums = change(whole.reshape([TERMS, columns])).sum_dim(0).reshape([columns]);
    let left_over = left_over.map(|left_over| change(left_over).reshape([rest]));
    [sums].into_iter().chain(left_over).collect()
}

fn join(parts: &[Tensor<1>]) -> Tensor<1> {
    match parts {
        [one] => one.clone(),
        parts => Tensor::cat(parts.to_vec(), 0),
    }
}

struct Scaler<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scaler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let dtype = gradient.dtype();
        let factor = self.factor.clone().cast(float_dtype(dtype)).unsqueeze::<D>();
        self.gradients.register::<D>(param.id, gradient.mul(factor));
    }
}

struct Limiter<'a> {
    gradients: &'a mut GradientsParams,
    clipping: GradientClipping,
    found: bool,
}

impl ModuleVisitor for Limiter<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        self.gradients.register::<D>(param.id, self.clipping.clip_gradient(gradient));
        self.found = true;
    }
}

fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{
            Linear, LinearConfig,
            conv::{Conv2d, Conv2dConfig},
        },
        tensor::{Device, TensorData},
    };

    fn gradients(weight: f32, bias: f32) -> (Linear, GradientsParams) {
        let device = Device::flex();
        let model = LinearConfig::new(2, 2).init(&device);
        let mut gradients = GradientsParams::new();
        gradients.register(model.weight.id, Tensor::<2>::full([2, 2], weight, &device));
        let id = model.bias.as_ref().expect("LinearConfig gives a bias").id;
        gradients.register(id, Tensor::<1>::full([2], bias, &device));
        (model, gradients)
    }

    fn scalar(tensor: Tensor<1>) -> f32 {
        tensor.into_scalar()
    }

    #[test]
    fn the_norm_spans_all_parameters() {
        // 4 * 2^2 + 2 * 3^2 = 34
        let (model, mut gradients) = gradients(2.0, 3.0);
        let norm = scalar(clip_global_norm(&mut gradients, &model, f64::INFINITY));
        assert!((norm - 34f32.sqrt()).abs() < 4.0 * f32::EPSILON * norm, "{norm}");
    }

    #[test]
    fn the_norm_of_long_and_odd_gradients_leaves_nothing_out() {
        for columns in [1, 31, 32, 33, LEAST_SUMMED - 1, LEAST_SUMMED, 3 * LEAST_SUMMED + 5] {
            let device = Device::flex();
            let model = LinearConfig::new(3, columns).init(&device);
            let mut gradients = GradientsParams::new();
            gradients.register(model.weight.id, Tensor::<2>::full([3, columns], 2.0, &device));
            let norm = scalar(clip_global_norm(&mut gradients, &model, f64::INFINITY));
            // Squares and their sums are whole numbers below 2^24.
            assert_eq!(norm, (12.0 * columns as f32).sqrt(), "{columns}");
        }
    }

    #[test]
    fn clipped_gradients_have_the_asked_for_norm_and_keep_their_direction() {
        let (model, mut gradients) = gradients(2.0, 3.0);
        clip_global_norm(&mut gradients, &model, 1.0);
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        let id = model.bias.as_ref().unwrap().id;
        let ratio = scalar(gradients.get::<1>(id).unwrap().mean()) / scalar(weight.mean());
        assert!((ratio - 1.5).abs() < 1e-6, "{ratio}");
        let norm = scalar(clip_global_norm(&mut gradients, &model, f64::INFINITY));
        assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    }

    #[test]
    fn gradients_within_the_norm_are_left_alone() {
        let (model, mut gradients) = gradients(0.1, 0.1);
        clip_global_norm(&mut gradients, &model, 1.0);
        let weight = gradients.get::<2>(model.weight.id).unwrap();
        assert_eq!(scalar(weight.max()), 0.1);
    }

    #[test]
    fn a_gradient_that_is_not_finite_shows_in_the_norm() {
        let (model, mut gradients) = gradients(f32::NAN, 1.0);
        assert!(scalar(clip_global_norm(&mut gradients, &model, 1.0)).is_nan());
    }

    /// More parameters than are joined at once, of one to four dimensions, with an empty one.
    fn many() -> (Vec<(Linear, Conv2d)>, Param<Tensor<2>>, GradientsParams, f64) {
        let device = Device::flex();
        let layer = |_| {
            let conv = Conv2dConfig::new([2, 3], [1, 3]).init(&device);
            (LinearConfig::new(3, 2).init(&device), conv)
        };
        let layers: Vec<(Linear, Conv2d)> = (0..2 * JOINED + 1).map(layer).collect();
        let empty = Param::from_tensor(Tensor::<2>::zeros([0, 3], &device));
        let mut fill = Fill { gradients: GradientsParams::new(), next: 0.0, squares: 0.0 };
        (layers.clone(), empty.clone()).visit(&mut fill);
        (layers, empty, fill.gradients, fill.squares)
    }

    struct Fill {
        gradients: GradientsParams,
        next: f32,
        squares: f64,
    }

    impl ModuleVisitor for Fill {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let shape = param.lazy_shape();
            let values: Vec<f32> = (0..shape.num_elements())
                .map(|_| {
                    self.next += 0.125;
                    self.squares += f64::from(self.next).powi(2);
                    self.next
                })
                .collect();
            let data = TensorData::new(values, shape);
            self.gradients.register(param.id, Tensor::<D>::from_data(data, &param.lazy_device()));
        }
    }

    #[test]
    fn the_norm_is_right_for_many_parameters_of_all_shapes() {
        let (layers, empty, mut gradients, squares) = many();
        let model = (layers, empty);
        let norm = scalar(clip_global_norm(&mut gradients, &model, f64::INFINITY));
        // At most as many roundings as elements, each of u = epsilon / 2, halved by the root.
        let bound = squares.sqrt() * model.num_params() as f64 * f64::from(f32::EPSILON) / 4.0;
        let error = (f64::from(norm) - squares.sqrt()).abs();
        assert!(error <= bound, "{norm} against {}: {error} > {bound}", squares.sqrt());
    }

    #[test]
    fn a_parameter_in_two_places_counts_once_and_is_scaled_once() {
        let (model, mut gradients) = gradients(2.0, 3.0);
        let twice = (model.clone(), model.clone());
        let norm = scalar(clip_global_norm(&mut gradients, &twice, 1.0));
        assert!((norm - 34f32.sqrt()).abs() < 4.0 * f32::EPSILON * norm, "{norm}");
        let norm = scalar(clip_global_norm(&mut gradients, &model, f64::INFINITY));
        assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    }

    #[test]
    fn gradients_are_left_alone_where_the_norm_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (model, mut gradients) = gradients(bad, 3.0);
            let norm = scalar(clip_global_norm(&mut gradients, &model, 1.0));
            assert!(!norm.is_finite());
            let id = model.bias.as_ref().expect("LinearConfig gives a bias").id;
            let bias = gradients.get::<1>(id).expect("the bias has a gradient");
            assert_eq!(scalar(bias.max()), 3.0);
            let weight = gradients.get::<2>(model.weight.id).expect("the weight has one");
            assert_eq!(scalar(weight.sum()).is_nan(), bad.is_nan());
        }
    }

    #[test]
    fn every_element_is_limited_and_nan_stays() {
        let (model, mut gradients) = gradients(0.0, -3.0);
        let values = [[f32::NAN, f32::NEG_INFINITY], [0.25, 7.0]];
        let device = Device::flex();
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let weight = Tensor::<2>::from_floats(values, &device).cast(dtype);
            gradients.register(model.weight.id, weight);
            clip_value(&mut gradients, &model, 0.5);
            let weight = gradients.get::<2>(model.weight.id).expect("the weight has one");
            assert_eq!(float_dtype(weight.dtype()), dtype);
            let found: Vec<f32> = weight.into_data().iter().collect();
            assert!(found[0].is_nan(), "{found:?}");
            assert_eq!(found[1..], [-0.5, 0.25, 0.5]);
        }
        let id = model.bias.as_ref().expect("LinearConfig gives a bias").id;
        let bias = gradients.get::<1>(id).expect("the bias has a gradient");
        assert_eq!(scalar(bias.max()), -0.5);
    }

    #[test]
    #[should_panic(expected = "clip_global_norm: argument `gradients`")]
    fn the_norm_of_another_modules_gradients_is_refused() {
        let (_, mut gradients) = gradients(1.0, 1.0);
        let other: Linear = LinearConfig::new(2, 2).init(&Device::flex());
        clip_global_norm(&mut gradients, &other, 1.0);
    }

    #[test]
    #[should_panic(expected = "clip_value: argument `gradients`")]
    fn clipping_another_modules_gradients_by_value_is_refused() {
        let (_, mut gradients) = gradients(1.0, 1.0);
        let other: Linear = LinearConfig::new(2, 2).init(&Device::flex());
        clip_value(&mut gradients, &other, 1.0);
    }

    #[test]
    #[should_panic(expected = "argument `max_value`")]
    fn a_limit_that_is_not_finite_is_refused() {
        let (model, mut gradients) = gradients(1.0, 1.0);
        clip_value(&mut gradients, &model, f32::NAN);
    }

    #[test]
    #[should_panic(expected = "argument `max_norm`")]
    fn a_maximum_of_zero_is_refused() {
        let (model, mut gradients) = gradients(1.0, 1.0);
        clip_global_norm(&mut gradients, &model, 0.0);
    }
}
