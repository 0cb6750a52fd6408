use super::*;
use burn::{
    module::{ModuleVisitor, Param},
    nn::{
        BatchNorm, BatchNormConfig, BiLstm, BiLstmConfig, LayerNorm, LayerNormConfig, Linear,
        LinearConfig, RotaryEncoding, RotaryEncodingConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    optim::{AdamWConfig, GradientsParams},
    tensor::{Distribution, TensorData, Tolerance},
};

/// Unit of rounding of bf16.
const U_BF16: f32 = 1.0 / 256.0;

fn device() -> Device {
    Device::flex().autodiff()
}

fn encoder(device: &Device) -> TransformerEncoder {
    TransformerEncoderConfig::new(16, 32, 2, 2).with_dropout(0.0).init(device)
}

#[derive(Module, Debug)]
struct Perceptron {
    input: Linear,
    norm: LayerNorm,
    head: Linear,
}

fn perceptron(device: &Device) -> Perceptron {
    Perceptron {
        input: LinearConfig::new(8, 16).init(device),
        norm: LayerNormConfig::new(16).init(device),
        head: LinearConfig::new(16, 4).init(device),
    }
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(FloatDType::F32).into_data().try_to_vec().expect("f32")
}

/// The types of all gradients.
struct GradientTypes<'a>(&'a GradientsParams, Vec<Option<DType>>);

impl ModuleVisitor for GradientTypes<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.push(self.0.get::<D>(param.id).map(|gradient| gradient.dtype()));
    }
}

#[test]
fn an_unmodified_encoder_computes_in_16_bits_and_its_masters_get_gradients_in_f32() {
    let x = Tensor::<3>::random([2, 5, 16], Distribution::Default, &device());
    let plain = encoder(&device());
    let expected = numbers(plain.forward(TransformerEncoderInput::new(x.clone())));
    for (precision, bound) in [(Precision::Bf16, 24.0 * U_BF16), (Precision::F16, 3.0 * U_BF16)] {
        let policy = PrecisionPolicy::new(precision);
        let model = policy.apply(plain.clone()).expect("Flex computes in all types");
        let y = model.forward(TransformerEncoderInput::new(policy.input(x.clone())));
        assert_eq!(y.dtype(), precision.dtype().into());
        let loss = full_precision(y.clone()).powi_scalar(2).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let mut types = GradientTypes(&gradients, Vec::new());
        model.visit(&mut types);
        assert!(types.1.len() > 20, "{}", types.1.len());
        assert!(types.1.iter().all(|dtype| *dtype == Some(DType::F32)), "{:?}", types.1);
        // Two layers of about six roundings each way, of values near 1.
        let actual = numbers(y);
        let worst = actual.iter().zip(&expected).map(|(a, e)| (a - e).abs()).fold(0.0, f32::max);
        assert!(worst < bound && worst > 0.0, "{precision}: off by {worst}, bound {bound}");
    }
}

#[test]
fn the_gradient_of_a_master_is_that_of_the_rounded_product() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let layer = LinearConfig::new(3, 2).with_bias(false).init(&device());
    let x = Tensor::<2>::random([4, 3], Distribution::Default, &device());
    let exact = numbers(policy.input(x.clone()).cast(FloatDType::F32));
    let model = policy.apply(layer).expect("Flex computes in bf16");
    let y = model.forward(policy.input(x));
    let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
    let gradient = numbers(gradients.get::<2>(model.weight.id).expect("it was used"));
    // dW = x^T 1: column sums of x, once for each output.
    for row in 0..3 {
        let sum: f32 = (0..4).map(|i| exact[3 * i + row]).sum();
        let size: f32 = (0..4).map(|i| exact[3 * i + row].abs()).sum();
        for column in 0..2 {
            let off = (gradient[2 * row + column] - sum).abs();
            assert!(off <= U_BF16 * size, "{off} at {row}, {column}");
        }
    }
}

#[test]
fn a_weight_that_is_used_twice_gets_the_sum_of_both_gradients() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let layer = LinearConfig::new(3, 3).with_bias(false).init(&device());
    let model = policy.apply(layer).expect("Flex computes in bf16");
    let x = policy.input(Tensor::<2>::ones([1, 3], &device()));
    let once = |passes: usize| {
        let loss = (0..passes).map(|_| model.forward(x.clone()).sum()).reduce(|a, b| a + b);
        let loss = loss.expect("at least one pass");
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        numbers(gradients.get::<2>(model.weight.id).expect("it was used"))
    };
    let doubled: Vec<f32> = once(1).iter().map(|g| 2.0 * g).collect();
    assert_eq!(once(2), doubled);
}

/// Trains a weight of 1 by steps of 1e-4, far below what bf16 resolves there.
fn after_small_steps(masters: Masters) -> f32 {
    let policy = PrecisionPolicy::new(Precision::Bf16).with_masters(masters);
    let mut layer = LinearConfig::new(1, 1).with_bias(false).init(&device());
    layer.weight = layer.weight.map(|w| w.ones_like().detach().require_grad());
    let mut model = policy.apply(layer).expect("Flex computes in bf16");
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.0).init();
    for _ in 0..20 {
        let loss = model.forward(policy.input(Tensor::<2>::ones([1, 1], &device()))).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-4, model, gradients);
    }
    numbers(model.weight.base())[0]
}

#[test]
fn masters_keep_updates_that_16_bits_would_lose() {
    let trained = after_small_steps(Masters::F32);
    assert!((trained - 0.998).abs() < 1e-5, "{trained}");
    assert_eq!(after_small_steps(Masters::None), 1.0, "the control kept them as well");
}

#[test]
fn records_are_those_of_the_model_without_a_policy() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let plain = perceptron(&device());
    let cast = policy.apply(perceptron(&device())).expect("Flex computes in bf16");
    let different = cast.head.weight.base().add_scalar(1.0);
    let mut changed = cast.clone();
    changed.head.weight = Param::initialized(changed.head.weight.id, different.clone());
    let restored = cast.load_record(changed.into_record());
    assert_eq!(numbers(restored.head.weight.base()), numbers(different.clone()));
    assert_eq!(restored.head.weight.val().dtype(), DType::BF16);
    let into_plain = plain.load_record(restored.into_record());
    assert_eq!(numbers(into_plain.head.weight.val()), numbers(different));
    assert_eq!(into_plain.head.weight.val().dtype(), DType::F32);
}

#[test]
fn what_is_kept_stays_in_f32() {
    let policy = PrecisionPolicy::new(Precision::Bf16).keep_type("LayerNorm").keep_path("head");
    let model = policy.apply(perceptron(&device())).expect("both are there");
    assert_eq!(model.input.weight.val().dtype(), DType::BF16);
    assert_eq!(model.norm.gamma.val().dtype(), DType::F32);
    assert_eq!(model.head.weight.val().dtype(), DType::F32);
    let x = policy.input(Tensor::<2>::ones([2, 8], &device()));
    let x = full_precision(model.input.forward(x));
    assert_eq!(model.head.forward(model.norm.forward(x)).dtype(), DType::F32);
}

#[test]
fn burns_norms_take_f32_parameters_beside_f16_inputs() {
    let policy = PrecisionPolicy::new(Precision::F16).keep_type("LayerNorm");
    let model = policy.apply(encoder(&device())).expect("an encoder has norms");
    let x = policy.input(Tensor::<3>::ones([1, 3, 16], &device()));
    assert_eq!(model.forward(TransformerEncoderInput::new(x)).dtype(), DType::F16);
}

#[test]
fn batch_norm_trains_in_16_bits() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let norm: BatchNorm = BatchNormConfig::new(3).init(&device());
    let model = policy.apply(norm).expect("Flex computes in bf16");
    let x = Tensor::<2>::random([8, 3], Distribution::Normal(5.0, 2.0), &device());
    let y = model.forward(policy.input(x));
    assert_eq!(y.dtype(), DType::BF16);
    let mean = numbers(y.mean_dim(0));
    TensorData::from(mean.as_slice())
        .assert_approx_eq::<f32>(&TensorData::from([0.0f32; 3]), Tolerance::absolute(0.05));
    let statistics = numbers(model.running_mean.value_sync());
    assert!(statistics.iter().all(|mean| (0.2..0.8).contains(mean)), "{statistics:?}");
}

/// A model whose running statistics have moved.
fn normalized(device: &Device) -> (BatchNorm, Vec<f32>) {
    let norm: BatchNorm = BatchNormConfig::new(3).init(device);
    for _ in 0..3 {
        norm.forward(Tensor::<2>::random([8, 3], Distribution::Normal(5.0, 2.0), device));
    }
    let statistics = numbers(norm.running_mean.value_sync());
    (norm, statistics)
}

#[test]
fn statistics_stay_in_f32_where_a_policy_says_so() {
    for masters in [Masters::F32, Masters::None] {
        let policy =
            PrecisionPolicy::new(Precision::Bf16).with_masters(masters).with_f32_statistics();
        let (norm, statistics) = normalized(&device());
        let model = policy.apply(norm).expect("Flex computes in bf16");
        assert_eq!(model.gamma.val().dtype(), DType::BF16);
        assert_eq!(model.running_mean.value().dtype(), DType::F32);
        assert_eq!(numbers(model.running_mean.value_sync()), statistics);
    }
}

#[test]
fn a_policy_on_a_clone_leaves_the_originals_statistics_alone() {
    for masters in [Masters::F32, Masters::None] {
        let policy = PrecisionPolicy::new(Precision::Bf16).with_masters(masters);
        let (original, statistics) = normalized(&device());
        let clone = policy.apply(original.clone()).expect("Flex computes in bf16");
        assert_eq!(clone.running_mean.value().dtype(), DType::BF16);
        let x = Tensor::<2>::random([8, 3], Distribution::Normal(-9.0, 1.0), &device());
        clone.forward(policy.input(x.clone()));
        assert_ne!(numbers(clone.running_mean.value_sync()), statistics);
        let running = original.running_mean.value_sync();
        assert_eq!((running.dtype(), numbers(running)), (DType::F32, statistics.clone()));
        // The original still trains, and gets a policy again.
        original.forward(x);
        policy.apply(original).expect("it was left as it was");
    }
}

/// Burn keeps the newest statistics apart until the next step, where a mapper does not see them.
#[test]
fn statistics_of_a_model_that_has_trained_go_on_in_16_bits() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let norm: BatchNorm = BatchNormConfig::new(3).init(&device());
    let x = || Tensor::<2>::random([8, 3], Distribution::Normal(5.0, 2.0), &device());
    norm.forward(x());
    let norm = policy.apply(norm).expect("Flex computes in bf16");
    norm.forward(policy.input(x()));
    let statistics = numbers(norm.running_mean.value_sync());
    // Two steps of a tenth towards 5.
    assert!(statistics.iter().all(|mean| (0.6..1.3).contains(mean)), "{statistics:?}");
}

#[test]
fn what_is_frozen_or_not_differentiated_stays_so_beside_running_statistics() {
    #[derive(Module, Debug)]
    struct Normalized {
        layer: Linear,
        norm: BatchNorm,
    }
    let model = |device: &Device| Normalized {
        layer: LinearConfig::new(3, 3).init(device),
        norm: BatchNormConfig::new(3).init(device),
    };
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let frozen = Normalized { layer: model(&device()).layer.freeze(), ..model(&device()) };
    let applied = policy.apply(frozen).expect("Flex computes in bf16");
    assert!(!applied.layer.weight.base().is_require_grad());
    assert!(applied.norm.gamma.base().is_require_grad() && applied.norm.training.is_enabled());

    let plain = policy.apply(model(&Device::flex())).expect("Flex computes in bf16");
    assert!(!plain.layer.weight.base().is_autodiff() && plain.norm.training.is_enabled());
    // It can still be trained.
    assert!(plain.train().layer.weight.base().is_require_grad());

    let recomputing = device().gradient_checkpointing();
    let checkpointed = policy.apply(model(&recomputing)).expect("Flex computes in bf16");
    let strategy = checkpointed.layer.weight.base().gradient_checkpointing_strategy();
    assert_eq!(strategy, recomputing.gradient_checkpointing_strategy());
}

#[derive(Module, Debug)]
struct Positioned {
    layer: Linear,
    rope: Option<RotaryEncoding>,
    recurrent: Vec<BiLstm>,
}

fn positioned(device: &Device) -> Positioned {
    Positioned {
        layer: LinearConfig::new(4, 4).init(device),
        rope: Some(RotaryEncodingConfig::new(8, 4).init(device)),
        recurrent: vec![BiLstmConfig::new(4, 4, true).init(device)],
    }
}

#[test]
fn modules_with_constants_in_f32_are_refused_with_what_takes_their_place() {
    let policy = |precision| PrecisionPolicy::new(precision);
    for precision in [Precision::Bf16, Precision::F16] {
        let text = message(policy(precision).apply(positioned(&device())));
        for part in
            ["`rope`", "RotaryEncoding", "blackburn::nn::positions::rotary", "with_drop_ins"]
        {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        let kept = policy(precision).keep_type("RotaryEncoding");
        let text = message(kept.apply(positioned(&device())));
        // The outermost: what is in it is called by it.
        assert!(text.contains("`recurrent.0` is Burn's BiLstm"), "{text}");
        let kept = policy(precision).keep_path("rope").keep_type("BiLstm");
        let model = kept.apply(positioned(&device())).expect("both are kept in f32");
        assert!(
            model.recurrent[0].forward.cell_gate.input_transform.weight.val().dtype() == DType::F32
        );
        let handled = policy(precision).with_drop_ins().apply(positioned(&device()));
        assert_eq!(
            handled.expect("it is said to be").layer.weight.val().dtype(),
            precision.dtype().into()
        );
    }
    policy(Precision::F32).apply(positioned(&device())).expect("in f32 nothing is wrong");
}

#[test]
fn validation_reads_the_same_types() {
    let policy = PrecisionPolicy::new(Precision::F16);
    let model = policy.apply(perceptron(&device())).expect("Flex computes in f16").valid();
    assert_eq!(model.head.weight.val().dtype(), DType::F16);
    assert_eq!(model.head.weight.base().dtype(), DType::F32);
}

#[test]
fn f32_changes_nothing() {
    for precision in [Precision::F32, Precision::Tf32] {
        let policy = PrecisionPolicy::new(precision);
        let model = policy.apply(perceptron(&device())).expect("every device computes in f32");
        assert!(model.head.weight.reparameterization::<Cast>().is_none());
        assert_eq!(policy.report(&model).cast_bytes, 0);
    }
}

fn message<T>(result: Result<T, PrecisionError>) -> String {
    result.err().map_or_else(|| "no error".to_string(), |error| error.to_string())
}

#[test]
fn overrides_that_name_nothing_are_refused_with_what_there_is() {
    let policy = PrecisionPolicy::new(Precision::Bf16).keep_path("hea");
    let text = message(policy.apply(perceptron(&device())));
    assert!(text.contains("path `hea`") && text.contains("head.weight"), "{text}");
    let policy = PrecisionPolicy::new(Precision::Bf16).keep_type("BatchNorm");
    let text = message(policy.apply(perceptron(&device())));
    assert!(text.contains("type `BatchNorm`") && text.contains("Linear"), "{text}");
}

#[test]
fn a_policy_is_applied_once() {
    let policy = PrecisionPolicy::new(Precision::Bf16);
    let model = policy.apply(perceptron(&device())).expect("Flex computes in bf16");
    let text = message(policy.apply(model));
    assert!(text.contains("`cast` already") && text.contains("input.weight"), "{text}");
}

#[test]
fn masters_in_another_type_are_refused() {
    let mut model = perceptron(&device());
    model.head.weight = model.head.weight.map(|w| w.cast(FloatDType::F16));
    let text = message(PrecisionPolicy::new(Precision::Bf16).apply(model));
    assert!(text.contains("`head.weight`") && text.contains("F16"), "{text}");
}

#[test]
fn names_are_read_and_written_alike() {
    for precision in Precision::ALL {
        assert_eq!(precision.to_string().parse::<Precision>().ok(), Some(precision));
    }
    let text = message("fp4".parse::<Precision>());
    assert!(text.contains("`fp4`") && text.contains("bf16"), "{text}");
}

#[test]
fn the_report_tells_types_and_bytes() {
    let policy = PrecisionPolicy::new(Precision::Bf16).keep_path("head");
    let before = policy.report(&perceptron(&device()));
    let model = policy.apply(perceptron(&device())).expect("there is a head");
    let report = policy.report(&model);
    assert_eq!(report, before);
    let parameters = [8 * 16 + 16, 2 * 16, 16 * 4 + 4];
    assert_eq!(report.stored_bytes, 4 * parameters.iter().sum::<usize>());
    assert_eq!(report.cast_bytes, 2 * (parameters[0] + parameters[1]));
    let rows: Vec<_> = report.layers.iter().map(|row| (&*row.path, &*row.computed)).collect();
    assert_eq!(rows, [("input", "bf16"), ("norm", "bf16"), ("head", "f32")]);
    assert!(report.to_string().contains("rounded in between"), "{report}");
}

#[test]
fn a_device_without_marks_has_no_8_bits_and_says_what_it_has() {
    let policy = PrecisionPolicy::new(Precision::Fp8(Recipe::hybrid()));
    let text = message(policy.apply(perceptron(&device())));
    assert!(text.contains("fp8 is not among") && text.contains("bf16"), "{text}");
    assert!(!text.contains("fp8-e4m3"), "{text}");
}

#[test]
fn the_report_tells_which_layers_multiply_in_8_bits() {
    let policy = PrecisionPolicy::new(Precision::Fp8(Recipe::hybrid())).without_fp8("head");
    let report = policy.report(&perceptron(&device()));
    let rows: Vec<_> = report.layers.iter().map(|row| (&*row.path, &*row.computed)).collect();
    let expected = [("input", "fp8"), ("input", "bf16"), ("norm", "bf16"), ("head", "bf16")];
    assert_eq!(rows, expected);
    // Of the weights of both layers, that of the first.
    assert_eq!(report.fp8_share(), Some(128.0 / 192.0));
    let text = report.to_string();
    assert!(text.ends_with("66.7 % of linear layers' arithmetic in 8 bits"), "{text}");
    assert!(text.contains("products in bf16: left out by the policy"), "{text}");
    assert_eq!(PrecisionPolicy::default().report(&perceptron(&device())).fp8_share(), Some(0.0));
    let policy = policy.without_fp8("tail");
    assert!(message(policy.apply(perceptron(&device()))).contains("path `tail`"));
}
