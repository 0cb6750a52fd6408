//! Profiles of training steps, against what is known of the steps.

use blackburn::train::{
    graph::GradientGraph,
    precision::PrecisionPolicy,
    profile::{
        Advice, Clock, ObserveError, PeakSource, Peaks, ProfileError, ProfileOptions, Profiler,
        ServedBy, StepProfile, Verdict,
    },
};
use blackburn_backend::profile::{OperationKind, observe};
use blackburn_tests::{on_burn_device, run_alone};
use burn::{
    nn::{Gelu, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use libtest_mimic::{Failed, Trial};
use std::{env, thread, time::Duration};

/// Set in a process that runs one test alone: launches of all threads are observed.
const ALONE: &str = "BLACKBURN_TEST_PROFILE_HERE";

type Test = fn(&Device) -> Result<(), Failed>;

const TESTS: [(&str, Test); 7] = [
    ("a_perceptrons_profile_has_its_kernels", perceptron),
    ("a_step_that_waits_for_the_host_is_told_so", launch_bound),
    ("what_the_device_does_at_best_is_measured", measured_peaks),
    ("two_observations_at_a_time_are_refused", busy),
    ("recorded_steps_are_timed_beside_eager_ones", recorded),
    ("a_replay_is_not_taken_for_a_step_without_kernels", replayed),
    ("steps_without_kernels_have_no_profile", no_kernels),
];

pub(crate) fn trials() -> Vec<Trial> {
    let trial = |(name, test): (&str, Test)| {
        let name = format!("profile::{name}");
        Trial::ignorable_test(name.clone(), move || {
            on_burn_device(|device| match env::var_os(ALONE) {
                Some(_) => test(&device),
                None => run_alone(&name, &[(ALONE, "1")]).map(drop),
            })
        })
    };
    TESTS.into_iter().map(trial).collect()
}

const ROWS: usize = 96;
const WIDTH: usize = 128;
/// Forward, and backward to the weights in both layers and to the input in the second.
const PRODUCTS: f64 = 5.0;

#[derive(Module, Debug)]
struct Perceptron {
    first: Linear,
    gelu: Gelu,
    second: Linear,
}

impl Perceptron {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            gelu: Gelu::new(),
            second: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.second.forward(self.gelu.forward(self.first.forward(x))).powi_scalar(2).mean()
    }
}

fn options() -> ProfileOptions {
    let peaks = Peaks { bytes_per_second: 1e10, flops_16_bit: None, flops_f32: 1e10 };
    ProfileOptions {
        warm_up: 4,
        rounds: 3,
        steps_per_round: 2,
        observed: 3,
        peaks: PeakSource::Given(peaks),
        ..ProfileOptions::default()
    }
}

fn profile_of(
    device: &Device,
    options: ProfileOptions,
    mut step: impl FnMut(),
) -> Result<StepProfile, ProfileError> {
    let mut profiler = Profiler::with_options(device, options)?;
    while !profiler.is_done() {
        profiler.step(&mut step)?;
    }
    profiler.finish()
}

fn perceptron(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let mut model = Perceptron::new(&device);
    let mut optimizer = SgdConfig::new().init();
    let profile = profile_of(&device, options(), || {
        let loss = model.loss(Tensor::ones([ROWS, WIDTH], &device));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model.clone(), gradients);
    })
    .map_err(|error| error.to_string())?;
    println!("{profile}");

    let products: Vec<_> =
        profile.blocks.iter().filter(|row| row.operations.contains("Matmul")).collect();
    let count: f64 = products.iter().map(|row| row.count).sum();
    assert_eq!(count, PRODUCTS, "{profile}");
    let served = products.iter().filter(|row| row.served_by == ServedBy::Blackburn);
    let served: f64 = served.map(|row| row.count).sum();
    assert!(served >= 3.0, "{profile}");
    // Those left to Burn are named, and only those.
    let advice = profile.recommendation(Advice::Unserved);
    assert_eq!(advice.is_some(), served < PRODUCTS, "{profile}");
    // Each of the five multiplies the same numbers of rows, inputs and outputs.
    let flops: Option<f64> = products.iter().map(|row| row.flops).sum();
    assert_eq!(flops, Some(PRODUCTS * 2.0 * (ROWS * WIDTH * 2 * WIDTH) as f64));
    assert!(products.iter().all(|row| row.element_bytes == Some(4)));

    // Every launch is a kernel's, and steps are alike.
    let launches: f64 = profile.kernels.iter().map(|row| row.launches).sum();
    assert_eq!(Some(launches), profile.launches);
    assert!(profile.kernels.iter().all(|row| row.launches.fract() == 0.0), "{profile}");
    let by_block: f64 = profile.blocks.iter().map(|row| row.count * row.kernels.len() as f64).sum();
    assert_eq!(by_block, launches);

    // All were timed, and times are of the parts of a whole.
    assert_eq!(profile.untimed_launches, 0.0);
    for shares in [
        profile.kernels.iter().filter_map(|row| row.share).sum::<f64>(),
        profile.blocks.iter().filter_map(|row| row.share).sum(),
    ] {
        assert!((shares - 1.0).abs() < 1e-9, "shares sum to {shares}");
    }
    let (total, gap) = (profile.device_us.ok_or("a time")?, profile.gap_us.ok_or("a gap")?);
    assert!(total > 0.0 && profile.wall_us > 0.0);
    assert_eq!(gap, (profile.wall_us - total).max(0.0));

    let json = serde_json::to_string(&profile)?;
    let back: StepProfile = serde_json::from_str(&json)?;
    // serde_json rounds a number's last digit its own way.
    assert_eq!(back.to_string(), profile.to_string());
    Ok(())
}

type Passes = GradientGraph<Perceptron, Tensor<2>, Tensor<1>>;

/// Takes a training step whose passes may be replayed.
fn recorded_step(
    passes: &mut Passes,
    model: &Perceptron,
    device: &Device,
) -> Result<GradientsParams, String> {
    let pass = |model: &Perceptron, x: Tensor<2>| {
        let loss = model.loss(x);
        (loss.clone().inner(), GradientsParams::from_grads(loss.backward(), model))
    };
    let run = passes.run(model, Tensor::ones([ROWS, WIDTH], device), pass);
    run.map(|(_, gradients)| gradients).map_err(|error| error.to_string())
}

fn recorded(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let model = Perceptron::new(&device);
    let (mut replaying, mut eager) =
        (Passes::new(PrecisionPolicy::default()), Passes::disabled(PrecisionPolicy::default()));
    let options = ProfileOptions { warm_up: 6, recorded: true, ..options() };
    let mut profiler =
        Profiler::with_options(&device, options).map_err(|error| error.to_string())?;
    while !profiler.is_done() {
        let passes = if profiler.phase().is_eager() { &mut eager } else { &mut replaying };
        // Without an update: gradients of a replay are the recording's own.
        let step = profiler.step(|| recorded_step(passes, &model, &device).map(drop));
        step.map_err(|error| error.to_string())??;
    }
    assert!(replaying.is_recorded());
    let profile = profiler.finish().map_err(|error| error.to_string())?;
    assert!(profile.eager_wall_us.is_some_and(|wall| wall > 0.0), "{profile}");
    let products = profile.blocks.iter().filter(|row| row.operations.contains("Matmul"));
    assert_eq!(products.map(|row| row.count).sum::<f64>(), PRODUCTS, "{profile}");
    Ok(())
}

fn replayed(device: &Device) -> Result<(), Failed> {
    let device = device.clone().autodiff();
    let model = Perceptron::new(&device);
    let mut passes = Passes::new(PrecisionPolicy::default());
    let options = ProfileOptions { warm_up: 6, ..options() };
    let mut profiler =
        Profiler::with_options(&device, options).map_err(|error| error.to_string())?;
    loop {
        match profiler.step(|| recorded_step(&mut passes, &model, &device).map(drop)) {
            Ok(step) => step?,
            Err(error) => {
                assert!(matches!(error, ProfileError::Replayed), "{error}");
                return Ok(());
            }
        }
        assert!(!profiler.is_done(), "a replay was taken for a step");
    }
}

/// The host does nothing for 30 ms between small kernels.
fn launch_bound(device: &Device) -> Result<(), Failed> {
    let mut x = Tensor::<1>::ones([1000], device);
    let mut failed = None;
    let profile = profile_of(device, options(), || {
        for _ in 0..3 {
            x = x.clone() * 0.5 + 1.0;
            // Not put off to where kernels could be fused.
            failed = failed.take().or(device.sync().err());
            thread::sleep(Duration::from_millis(10));
        }
    })
    .map_err(|error| error.to_string())?;
    if let Some(error) = failed {
        return Err(error.to_string().into());
    }
    assert_eq!(profile.launches, Some(3.0), "{profile}");
    assert!(profile.wall_us >= 30e3, "{profile}");
    match profile.clock {
        // Nothing is said of times that hold what the host does.
        Some(Clock::Host) | None => assert_eq!(profile.verdict, Verdict::Unknown, "{profile}"),
        Some(Clock::Device) => {
            assert_eq!(profile.verdict, Verdict::HostBound, "{profile}");
            assert_eq!(profile.recommendations[0].kind, Advice::LaunchBound, "{profile}");
            assert_eq!(profile.recommendations[0].gain_us, profile.gap_us);
        }
    }
    Ok(())
}

fn measured_peaks(device: &Device) -> Result<(), Failed> {
    let peaks = Peaks::measure(device).map_err(|error| error.to_string())?;
    println!("{peaks:?}");
    // Between what no device is as slow as and what none reaches.
    assert!((1e8..2e13).contains(&peaks.bytes_per_second), "{peaks:?}");
    for flops in [Some(peaks.flops_f32), peaks.flops_16_bit].into_iter().flatten() {
        assert!((1e7..1e17).contains(&flops), "{peaks:?}");
    }
    Ok(())
}

fn busy(device: &Device) -> Result<(), Failed> {
    let ((), blocks) = observe(device, || {
        assert_eq!(observe(device, || ()).expect_err("one is enough"), ObserveError::Busy);
        let _kept = Tensor::<1>::ones([8], device) + 1.0;
        device.sync().expect("a device");
    })
    .map_err(|error| error.to_string())?;
    // The outer one goes on.
    let is_sum = |kind| kind == OperationKind::ElementWise;
    assert!(blocks.iter().flat_map(|block| &block.operations).any(|one| is_sum(one.kind)));
    assert!(blocks.iter().any(|block| !block.launches.is_empty()));
    Ok(())
}

fn no_kernels(device: &Device) -> Result<(), Failed> {
    let error = profile_of(device, options(), || ()).expect_err("nothing to profile");
    assert!(matches!(error, ProfileError::NoKernels { steps: 3 }), "{error}");
    Ok(())
}
