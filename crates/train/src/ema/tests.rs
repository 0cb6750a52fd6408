use super::*;
use burn::{
    module::{Reparameterization, Reparameterizer},
    nn::{BatchNorm, BatchNormConfig, Initializer, Linear, LinearConfig},
    tensor::{Device, Distribution, Int},
};

/// Powers of two, so that sums are exact.
const HALF: EmaConfig = EmaConfig { decay: 0.5, warmup: false };

fn linear(device: &Device) -> Linear {
    LinearConfig::new(3, 2).with_initializer(Initializer::Zeros).init(device)
}

struct Set(f64);

impl ModuleMapper for Set {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let required = value.is_require_grad();
            let filled = Tensor::full(value.shape(), self.0, (&value.device(), value.dtype()));
            filled.set_require_grad(required)
        })
    }
}

fn values<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    param.base().into_data().iter().collect()
}

fn of<const D: usize>(ema: &Ema, param: &Param<Tensor<D>>) -> Vec<f32> {
    let average = ema.shadows.get::<Tensor<D>>(&param.id).expect("the parameter is averaged");
    average.into_data().iter().collect()
}

#[test]
fn the_average_is_the_closed_form() {
    let device = Device::flex().autodiff();
    let mut model = linear(&device);
    let mut ema = HALF.init(&model).expect("the model trains");
    let weights = [8.0, -4.0, 16.0, 2.0];
    for weight in weights {
        model = model.map(&mut Set(weight));
        ema.update(&model).expect("it is the same model");
    }
    // 0 / 16 + 8 / 16 - 4 / 8 + 16 / 4 + 2 / 2
    assert_eq!(of(&ema, &model.weight), [5.0; 6]);
    assert_eq!(ema.updates(), 4);
    let averaged = ema.apply(model.clone()).expect("it is the same model");
    assert_eq!(values(&averaged.weight), [5.0; 6]);
    assert!(averaged.weight.is_require_grad());
    assert_eq!(averaged.weight.id, model.weight.id);
    assert_eq!(values(&model.weight), [2.0; 6], "the model is kept");
}

#[test]
fn an_average_of_random_weights_is_within_rounding_of_one_in_f64() {
    let device = Device::flex().autodiff();
    let mut model: Linear = LinearConfig::new(3, 2).init(&device);
    let config = EmaConfig { decay: 0.9, warmup: false };
    let mut ema = config.init(&model).expect("the model trains");
    let mut expected: Vec<f64> = values(&model.weight).iter().map(|x| f64::from(*x)).collect();
    const UPDATES: usize = 20;
    for _ in 0..UPDATES {
        let weight = Tensor::random([3, 2], Distribution::Uniform(-1.0, 1.0), &device);
        model.weight = Param::initialized(model.weight.id, weight.require_grad());
        ema.update(&model).expect("it is the same model");
        for (expected, weight) in expected.iter_mut().zip(values(&model.weight)) {
            *expected = 0.9 * *expected + 0.1 * f64::from(weight);
        }
    }
    // An update rounds the share, a difference of at most 2, its product and the sum; later updates
    // shrink what the earlier ones added, to at most 1 / (1 - decay) of one update's error.
    let unit = f64::from(f32::EPSILON) / 2.0;
    let bound = 10.0 * (3.0 * 0.2 + 1.0) * unit;
    for (average, expected) in of(&ema, &model.weight).into_iter().zip(expected) {
        let error = (f64::from(average) - expected).abs();
        assert!(error <= bound, "{average} against {expected}: {error} > {bound}");
    }
}

#[test]
fn warm_up_forgets_the_first_weights_sooner() {
    let model = linear(&Device::flex().autodiff());
    let config = EmaConfig { decay: 0.2, warmup: true };
    let mut ema = config.init(&model).expect("the model trains");
    let decays: Vec<f64> = (0..4)
        .map(|_| {
            let decay = ema.next_decay();
            ema.update(&model).expect("it is the same model");
            decay
        })
        .collect();
    assert_eq!(decays, [0.1, 2.0 / 11.0, 0.2, 0.2]);
    assert_eq!(HALF.init(&model).expect("the model trains").next_decay(), 0.5);
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let required = value.is_require_grad();
            value.cast(self.0).detach().set_require_grad(required)
        })
    }
}

#[test]
fn sixteen_bit_parameters_have_averages_that_keep_small_steps() {
    let device = Device::flex().autodiff();
    let mut model = linear(&device).map(&mut Set(1.0)).map(&mut Cast(DType::BF16));
    let config = EmaConfig { decay: 1.0 - 1.0 / 1024.0, warmup: false };
    let mut ema = config.init(&model).expect("the model trains");
    model = model.map(&mut Set(2.0));
    ema.update(&model).expect("it is the same model");
    // In bf16 this would be 1.
    assert_eq!(of(&ema, &model.weight), [1.0 + 1.0 / 1024.0; 6]);
    let averaged = ema.apply(model.clone()).expect("it is the same model");
    assert_eq!(averaged.weight.val().dtype(), DType::BF16);
    assert_eq!(values(&averaged.weight), [1.0; 6]);
    let wide = linear(&device).map(&mut Cast(DType::F64));
    let ema = HALF.init(&wide).expect("the model trains");
    let average = ema.shadows.get::<Tensor<2>>(&wide.weight.id).expect("it is averaged");
    assert_eq!(average.dtype(), DType::F64);
}

/// A layer, a buffer that is visited as a parameter, and a parameter that is no float.
#[derive(Module, Debug)]
struct Mixed {
    layer: Linear,
    norm: BatchNorm,
    steps: Param<Tensor<1, Int>>,
}

fn mixed(device: &Device) -> Mixed {
    let steps = Tensor::<1, Int>::from_ints([7], device);
    Mixed {
        layer: linear(device),
        norm: BatchNormConfig::new(2).init(device),
        steps: Param::initialized(ParamId::new(), steps),
    }
}

#[test]
fn buffers_integers_and_frozen_parameters_are_the_models_own() {
    for device in [Device::flex().autodiff(), Device::flex()] {
        let mut model = mixed(&device);
        let bias = model.layer.bias.take().expect("LinearConfig gives a bias");
        model.layer.bias = Some(bias.set_require_grad(false));
        let mut ema = HALF.init(&model).expect("the model trains");
        assert_eq!(ema.entries.len(), 3, "weight, gamma and beta: {:?}", ema.entries);
        model = model.map(&mut Set(4.0));
        ema.update(&model).expect("it is the same model");
        let averaged = ema.apply(model.clone()).expect("it is the same model");
        assert_eq!(values(&averaged.layer.weight), [2.0; 6]);
        assert_eq!(values(averaged.layer.bias.as_ref().expect("it has a bias")), [4.0; 2]);
        let running: Vec<f32> = averaged.norm.running_mean.value().into_data().iter().collect();
        assert_eq!(running, [4.0; 2]);
        let steps: Vec<i64> = averaged.steps.val().into_data().iter().collect();
        assert_eq!(steps, [7]);
    }
}

#[test]
fn a_parameter_that_is_unfrozen_joins_with_its_value() {
    let device = Device::flex().autodiff();
    let mut model = linear(&device);
    model.weight = model.weight.set_require_grad(false);
    let mut ema = HALF.init(&model).expect("the bias trains");
    model.weight = model.weight.set_require_grad(true);
    model = model.map(&mut Set(4.0));
    ema.update(&model).expect("it is the same model");
    assert_eq!(of(&ema, &model.weight), [4.0; 6]);
    model = model.map(&mut Set(0.0));
    ema.update(&model).expect("it is the same model");
    assert_eq!(of(&ema, &model.weight), [2.0; 6]);
}

#[test]
fn a_parameter_in_two_places_is_averaged_once() {
    let layer = linear(&Device::flex().autodiff());
    let mut model = (layer.clone(), layer);
    let mut ema = HALF.init(&model).expect("the model trains");
    model = model.map(&mut Set(4.0));
    ema.update(&model).expect("it is the same model");
    assert_eq!(of(&ema, &model.0.weight), [2.0; 6]);
    assert_eq!(ema.to_record(&model).expect("it is the same model").len(), 2);
}

#[derive(Module, Debug)]
struct Doubled {
    gain: Param<Tensor<1>>,
}

impl Reparameterization for Doubled {
    const NAME: &'static str = "doubled";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base.mul_scalar(2.0)
    }
}

struct Doubler;

impl Reparameterizer for Doubler {
    type Reparam = Doubled;

    fn reparameterize<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Doubled>) {
        let gain = Param::from_tensor(Tensor::zeros([1], &param.lazy_device()));
        (param, Some(Doubled { gain }))
    }
}

#[test]
fn a_reparameterized_weight_is_averaged_as_it_is_stored() {
    let device = Device::flex().autodiff();
    let mut model = linear(&device).apply_reparameterization(Doubler);
    let mut ema = HALF.init(&model).expect("the model trains");
    model = model.map(&mut Set(4.0));
    ema.update(&model).expect("it is the same model");
    let averaged = ema.apply(model).expect("it is the same model");
    assert_eq!(values(&averaged.weight), [2.0; 6]);
    let effective: Vec<f32> = averaged.weight.val().into_data().iter().collect();
    assert_eq!(effective, [4.0; 6]);
    let doubled = averaged.weight.reparameterization::<Doubled>().expect("it stays attached");
    assert_eq!(values(&doubled.gain), [2.0]);
}

#[test]
fn a_restored_average_continues_bit_for_bit() {
    let device = Device::flex().autodiff();
    let config = EmaConfig { decay: 0.9, warmup: true };
    let mut model: Linear = LinearConfig::new(3, 2).init(&device);
    let mut straight = config.init(&model).expect("the model trains");
    model = model.map(&mut Set(0.7));
    straight.update(&model).expect("it is the same model");

    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("ema.bpk");
    for _ in 0..2 {
        let record = straight.to_record(&model).expect("it is the same model");
        record.save(&file).expect("an older file is replaced");
    }
    let record = EmaRecord::load(&file).expect("the file loads");
    // A program that starts again has a new model, which takes the saved one's identities.
    let saved = model.clone().into_record();
    model = linear(&device).load_record(saved);
    let mut restored = config.restore(record, &model).expect("it is the same model");
    assert_eq!(restored.updates(), 1);
    model = model.map(&mut Set(-0.3));
    for ema in [&mut straight, &mut restored] {
        ema.update(&model).expect("it is the same model");
    }
    assert_eq!(of(&straight, &model.weight), of(&restored, &model.weight));
    let fresh = config.init(&model).expect("the model trains");
    assert_ne!(of(&straight, &model.weight), of(&fresh, &model.weight));
}

#[test]
fn another_models_average_is_refused_by_path() {
    let device = Device::flex().autodiff();
    let model = [linear(&device)];
    let other = [linear(&device)];
    let mut ema = HALF.init(&model).expect("the model trains");
    let record = ema.to_record(&model).expect("it is the same model");
    let message = |error: EmaError| error.to_string();
    for (found, operation) in [
        (ema.update(&other).map_err(message).err(), "Ema::update"),
        (ema.apply(other.clone()).map_err(message).err(), "Ema::apply"),
        (ema.to_record(&other).map_err(message).err(), "Ema::to_record"),
        (HALF.restore(record.clone(), &other).map_err(message).err(), "EmaConfig::restore"),
    ] {
        let found = found.expect("another model is refused");
        assert!(found.starts_with(operation), "{found}");
        assert!(found.contains("`0.weight`") || found.contains("`0.bias`"), "{found}");
    }
    assert_eq!(ema.updates(), 0);

    // The same identity, another shape.
    let mut wide = model.clone();
    let weight = Tensor::<2>::zeros([4, 2], &device).require_grad();
    wide[0].weight = Param::initialized(model[0].weight.id, weight);
    let found = HALF.restore(record.clone(), &wide).map_err(message).err();
    let expected =
        "EmaConfig::restore: parameter `0.weight`: expected the shape [3, 2], got [4, 2]";
    assert_eq!(found.as_deref(), Some(expected));

    // More parameters than the record has.
    let [first] = model;
    let found = HALF.restore(record, &[first, linear(&device)]).map_err(message).err();
    let found = found.expect("a larger model is refused");
    assert!(found.contains("one without the parameter `1."), "{found}");
}

#[test]
fn records_of_something_else_are_refused() {
    let model = linear(&Device::flex());
    let bytes = model.into_record().into_bytes().expect("the record serializes");
    let error = EmaRecord::from_bytes(bytes).expect_err("it has no count of updates");
    assert!(error.to_string().contains("expected a count of updates"), "{error}");
}

#[test]
fn absurd_options_are_refused() {
    let model = linear(&Device::flex().autodiff());
    for decay in [1.0, -0.1, f64::NAN] {
        let error = EmaConfig { decay, warmup: false }.init(&model).expect_err("no share");
        assert!(error.to_string().contains("option `decay`"), "{error}");
    }
    let error = HALF.init(&model.no_grad()).expect_err("nothing trains");
    assert_eq!(error, EmaError::Empty);
}
