//! Gradients that are not finite, by name.

use crate::path::ModulePath;
use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::{Bool, Int, Tensor},
};
use std::fmt;

/// A gradient with elements that are not finite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The parameter's path in the module.
    pub path: String,
    /// Elements that are NaN.
    pub nan: usize,
    /// Elements that are infinite.
    pub infinite: usize,
    /// All elements.
    pub elements: usize,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, nan, infinite, elements } = self;
        write!(f, "`{path}`: {nan} NaN and {infinite} infinite of {elements} elements")
    }
}

/// Lists the gradients of `module` that hold NaN or infinities, in the order of its parameters.
///
/// Use it for diagnosis, if a norm or a loss is not finite. It waits for the device, with one read for all gradients
/// together.
///
/// ```
/// use blackburn_train::{clip::clip_global_norm, nonfinite::nonfinite_gradients};
/// use burn::{nn::LinearConfig, optim::GradientsParams, prelude::*};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 2).init(&device);
/// let x = Tensor::<2>::from_floats([[1.0, f32::INFINITY]], &device);
/// let loss = model.forward(x).sum();
/// let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let norm: f32 = clip_global_norm(&mut gradients, &model, 1.0).into_scalar();
/// if !norm.is_finite() {
///     let found = nonfinite_gradients(&gradients, &model);
///     assert_eq!(found.len(), 1);
///     assert_eq!(found[0].to_string(), "`weight`: 0 NaN and 2 infinite of 4 elements");
/// }
/// # assert!(!norm.is_finite());
/// ```
///
/// # Panics
///
/// If there are no gradients, or the device fails.
pub fn nonfinite_gradients<M: Module>(gradients: &GradientsParams, module: &M) -> Vec<NonFinite> {
    let mut census =
        Census { gradients, path: ModulePath::default(), found: vec![], counts: vec![] };
    module.visit(&mut census);
    assert!(
        !census.found.is_empty(),
        "nonfinite_gradients: argument `gradients`: expected at least one gradient, got none"
    );
    let counts = Tensor::cat(census.counts, 0).into_data();
    let mut counts = counts.iter::<i64>().map(|count| count as usize);
    let mut found = census.found;
    for gradient in &mut found {
        gradient.nan = counts.next().unwrap_or_default();
        gradient.infinite = counts.next().unwrap_or_default();
    }
    found.retain(|gradient| gradient.nan + gradient.infinite > 0);
    found
}

struct Census<'a> {
    gradients: &'a GradientsParams,
    path: ModulePath,
    /// In the order of visits; what they hold is counted on the device meanwhile.
    found: Vec<NonFinite>,
    counts: Vec<Tensor<1, Int>>,
}

impl ModuleVisitor for Census<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
        let count = |flags: Tensor<D, Bool>| flags.int().sum();
        self.counts.extend([count(gradient.clone().is_nan()), count(gradient.clone().is_inf())]);
        let elements = gradient.shape().num_elements();
        self.found.push(NonFinite { path: self.path.name(), nan: 0, infinite: 0, elements });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{Linear, LinearConfig},
        tensor::{Device, FloatDType},
    };

    fn layer() -> Linear {
        LinearConfig::new(2, 2).init(&Device::flex())
    }

    #[test]
    fn counts_are_those_of_each_parameter_in_order() {
        let model = [layer(), layer()];
        let mut gradients = GradientsParams::new();
        let device = Device::flex();
        gradients.register(model[0].weight.id, Tensor::<2>::ones([2, 2], &device));
        let bias = model[1].bias.as_ref().expect("LinearConfig gives a bias");
        gradients.register(bias.id, Tensor::<1>::from_floats([f32::INFINITY, 1.0], &device));
        assert_eq!(
            nonfinite_gradients(&gradients, &model),
            [NonFinite { path: "1.bias".into(), nan: 0, infinite: 1, elements: 2 }]
        );
        let values = [[f32::NAN, 1.0], [f32::NEG_INFINITY, f32::NAN]];
        for dtype in [FloatDType::BF16, FloatDType::F16, FloatDType::F32] {
            let weight = Tensor::<2>::from_floats(values, &device).cast(dtype);
            gradients.register(model[1].weight.id, weight);
            let found = nonfinite_gradients(&gradients, &model);
            assert_eq!(found.len(), 2);
            assert_eq!(found[0].to_string(), "`1.weight`: 2 NaN and 1 infinite of 4 elements");
        }
    }

    #[test]
    fn finite_gradients_are_not_listed() {
        let model = layer();
        let mut gradients = GradientsParams::new();
        let weight = Tensor::<2>::full([2, 2], f32::MAX, &Device::flex());
        gradients.register(model.weight.id, weight);
        assert_eq!(nonfinite_gradients(&gradients, &model), []);
    }

    #[test]
    #[should_panic(expected = "expected at least one gradient, got none")]
    fn gradients_of_another_module_are_refused() {
        let (model, other) = (layer(), layer());
        let mut gradients = GradientsParams::new();
        let weight = Tensor::<2>::ones([2, 2], &Device::flex());
        gradients.register(model.weight.id, weight);
        let _ = nonfinite_gradients(&gradients, &other);
    }
}
