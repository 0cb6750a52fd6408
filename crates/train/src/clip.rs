//! Clipping by the global norm.

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{DType, FloatDType, Tensor},
};

/// Guards the division where all gradients are zero; PyTorch's `clip_grad_norm_` has the same.
const EPSILON: f64 = 1e-6;

/// Scales all gradients of `module` by one factor so that their joint L2 norm is at most
/// `max_norm`, and returns the norm that they had.
///
/// The norm is computed in f32 on the device that holds the gradients, and nothing waits for it: read the
/// returned tensor (one element) when it is needed, or not at all. Where a gradient is not finite,
/// the norm is not either, and so are all gradients afterwards: check the norm before relying on
/// the step.
///
/// Pass `f64::INFINITY` to measure without clipping.
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
    let mut squares = SumOfSquares { gradients, total: None };
    module.visit(&mut squares);
    let norm = squares
        .total
        .expect("clip_global_norm: argument `gradients`: expected at least one gradient, got none")
        .sqrt();
    if max_norm.is_finite() {
        let factor = norm.clone().add_scalar(EPSILON).recip().mul_scalar(max_norm).clamp_max(1.0);
        module.visit(&mut Scaler { gradients, factor });
    }
    norm
}

struct SumOfSquares<'a> {
    gradients: &'a GradientsParams,
    total: Option<Tensor<1>>,
}

impl ModuleVisitor for SumOfSquares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
        let squares = gradient.cast(FloatDType::F32).powi_scalar(2);
        // Rows first: they are summed side by side, and a sum of one long vector is not.
        let sum = if D > 1 { squares.sum_dim(D - 1).sum() } else { squares.sum() };
        self.total = Some(match self.total.take() {
            Some(total) => total.add(sum),
            None => sum,
        });
    }
}

struct Scaler<'a> {
    gradients: &'a mut GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scaler<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let dtype = gradient.dtype();
        let factor = self.factor.clone().cast(float_dtype(dtype)).unsqueeze::<D>();
        self.gradients.register::<D>(param.id, gradient.mul(factor));
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
        nn::{Linear, LinearConfig},
        tensor::Device,
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

    #[test]
    #[should_panic(expected = "argument `max_norm`")]
    fn a_maximum_of_zero_is_refused() {
        let (model, mut gradients) = gradients(1.0, 1.0);
        clip_global_norm(&mut gradients, &model, 0.0);
    }
}
