use super::*;
use blackburn_backend::profile::{
    Arithmetic, LaunchRecord, OperationKind, OperationRecord, TensorUse,
};
use std::time::Duration;

const MATMUL: &str = "blackburn_kernels::matmul::forward::Matmul<f32>";
const BURNS_MATMUL: &str = "cubek_matmul::base::Matmul<f32>";
const FUSED: &str = "burn_cubecl_fusion::elemwise::ElemwiseFuse";

/// 1 GB/s and 1 GFLOP/s: a byte and an operation take a nanosecond.
fn peaks() -> Peaks {
    Peaks { bytes_per_second: 1e9, flops_16_bit: Some(4e9), flops_f32: 1e9 }
}

fn uses(ids: &[u64], bytes: u64, last: bool) -> Vec<TensorUse> {
    ids.iter().map(|id| TensorUse { id: *id, bytes, last }).collect()
}

/// Reads tensors of 1000 bytes for the last time and makes another.
fn add(reads: &[u64], write: u64) -> OperationRecord {
    OperationRecord {
        name: "Add".into(),
        kind: OperationKind::ElementWise,
        reads: uses(reads, 1000, true),
        writes: uses(&[write], 1000, false),
        bytes_known: true,
        arithmetic: None,
    }
}

fn matmul(flops: u64, element_bytes: u8) -> OperationRecord {
    OperationRecord {
        name: "Matmul".into(),
        kind: OperationKind::Product,
        arithmetic: Some(Arithmetic { flops, element_bytes }),
        ..add(&[91, 92], 93)
    }
}

fn block(operations: Vec<OperationRecord>, launches: &[(&'static str, u64)]) -> BlockRecord {
    let launch = |(kernel, us): &(&'static str, u64)| LaunchRecord {
        kernel,
        time: Some(Duration::from_micros(*us)),
        by_device: true,
    };
    BlockRecord { operations, launches: launches.iter().map(launch).collect() }
}

/// Two equal steps of a fused chain and two products, concluded with the given time of a step.
fn profile(wall_us: f64) -> StepProfile {
    let step = vec![
        block(vec![add(&[1], 2), add(&[2], 3)], &[(FUSED, 8)]),
        block(vec![add(&[3], 4)], &[(FUSED, 6)]),
        block(vec![matmul(40_000, 4)], &[(MATMUL, 102)]),
        block(vec![matmul(40_000, 4)], &[(BURNS_MATMUL, 202)]),
        block(vec![add(&[93], 94)], &[]),
    ];
    let mut profile = collect::summarize(&[step.clone(), step], Some(2.0), Some(&peaks()));
    profile.declined = vec!["BlackburnMatmul: too small".into(), "BlackburnColumnSum: f64".into()];
    profile.conclude(wall_us, None);
    profile
}

#[test]
fn times_are_of_one_step_and_without_what_measuring_costs() {
    let profile = profile(1000.0);
    let rows: Vec<_> = profile
        .kernels
        .iter()
        .map(|row| (row.name.as_str(), row.of, row.launches, row.total_us, row.mean_us))
        .collect();
    assert_eq!(
        rows,
        [
            ("Matmul", ServedBy::Burn, 1.0, Some(200.0), Some(200.0)),
            ("Matmul", ServedBy::Blackburn, 1.0, Some(100.0), Some(100.0)),
            ("ElemwiseFuse", ServedBy::BurnFused, 2.0, Some(10.0), Some(5.0)),
        ]
    );
    assert_eq!((profile.device_us, profile.gap_us), (Some(310.0), Some(690.0)));
    assert_eq!((profile.launches, profile.untimed_launches), (Some(4.0), 0.0));
    let shares: f64 = profile.kernels.iter().filter_map(|row| row.share).sum();
    assert!((shares - 1.0).abs() < 1e-12, "{shares}");
    let shares: f64 = profile.blocks.iter().filter_map(|row| row.share).sum();
    assert!((shares - 1.0).abs() < 1e-12, "{shares}");
}

#[test]
fn the_roofline_is_the_longer_of_bytes_and_arithmetic() {
    let profile = profile(1000.0);
    let of = |operations: &str, served_by| {
        let is_it = |row: &&BlockRow| row.operations == operations && row.served_by == served_by;
        profile.blocks.iter().find(is_it).expect("a row")
    };
    // 40,000 operations at 1 GFLOP/s take 40 us, 3000 bytes only 3.
    let product = of("Matmul", ServedBy::Blackburn);
    assert_eq!((product.bytes, product.flops), (Some(3000.0), Some(40_000.0)));
    assert_eq!((product.roofline_us, product.roofline), (Some(40.0), Some(0.4)));
    // The tensor in the middle is not moved.
    let chain = of("Add x 2", ServedBy::BurnFused);
    assert_eq!((chain.bytes, chain.flops), (Some(2000.0), Some(0.0)));
    assert_eq!((chain.device_us, chain.roofline_us), (Some(6.0), Some(2.0)));
}

#[test]
fn what_is_not_known_is_absent() {
    let attention =
        OperationRecord { name: "attention_forward".into(), arithmetic: None, ..matmul(1, 2) };
    let indexing = OperationRecord { bytes_known: false, ..add(&[1], 2) };
    let mut untimed = block(vec![add(&[5], 6)], &[(FUSED, 4)]);
    untimed.launches[0].time = None;
    let step = vec![
        block(vec![attention], &[(MATMUL, 10)]),
        block(vec![indexing], &[(BURNS_MATMUL, 10)]),
        untimed,
        block(vec![], &[("elsewhere::Sort", 5)]),
    ];
    let profile = collect::summarize(&[step], None, Some(&peaks()));
    assert!(profile.kernels.iter().all(|row| row.roofline.is_none()));
    let fused = profile.kernels.iter().find(|row| row.of == ServedBy::BurnFused).expect("a row");
    assert_eq!((fused.total_us, fused.mean_us, fused.share), (None, None, None));
    assert_eq!((fused.launches, profile.untimed_launches), (1.0, 1.0));
    let elsewhere = profile.kernels.iter().find(|row| row.name == "Sort").expect("a row");
    assert_eq!((elsewhere.bytes, elsewhere.flops), (None, None));
    assert_eq!(profile.device_us, Some(25.0));
}

#[test]
fn a_step_that_waits_for_the_host_is_told_to_record_its_passes() {
    let profile = profile(1000.0);
    assert_eq!(profile.verdict, Verdict::HostBound);
    let first = &profile.recommendations[0];
    assert_eq!((first.kind, first.gain_us), (Advice::LaunchBound, Some(690.0)));
    assert!(first.text.contains("GradientGraph"), "{}", first.text);

    // A device that is busy has no such advice, and gaps are never negative.
    let busy = self::profile(300.0);
    assert_eq!((busy.verdict, busy.gap_us), (Verdict::DeviceBound, Some(0.0)));
    assert_eq!(busy.recommendation(Advice::LaunchBound), None);

    // Recorded passes need another advice.
    let mut recorded = profile.clone();
    recorded.conclude(1000.0, Some(2000.0));
    let text = &recorded.recommendation(Advice::LaunchBound).expect("advice").text;
    assert!(!text.contains("GradientGraph") && text.contains("recorded already"), "{text}");
}

#[test]
fn the_hosts_clock_gives_no_verdict() {
    let mut step = vec![block(vec![add(&[1], 2)], &[(FUSED, 4)])];
    step[0].launches[0].by_device = false;
    let mut profile = collect::summarize(&[step], None, None);
    profile.conclude(1000.0, None);
    assert_eq!((profile.clock, profile.verdict), (Some(Clock::Host), Verdict::Unknown));
    assert!(profile.to_string().contains("by the host's clock"), "{profile}");
}

#[test]
fn recommendations_are_ranked_by_what_they_gain() {
    let profile = profile(1000.0);
    let gains: Vec<_> = profile.recommendations.iter().map(|one| one.gain_us).collect();
    assert!(gains.is_sorted_by(|a, b| a >= b), "{gains:?}");
    let kinds: Vec<_> = profile.recommendations.iter().map(|one| one.kind).collect();
    use Advice::{FarFromRoofline, LaunchBound, Precision, Unfused, Unserved};
    assert_eq!(kinds, [LaunchBound, Precision, Unserved, FarFromRoofline, Unfused]);

    // 300 us of f32 products at a quarter of the 16-bit peak.
    assert_eq!(profile.recommendation(Precision).expect("advice").gain_us, Some(225.0));
    let unserved = profile.recommendation(Unserved).expect("advice");
    assert_eq!(unserved.gain_us, Some(160.0));
    assert!(unserved.text.contains("too small") && !unserved.text.contains("f64"));
    // Tensor 3 is written and read again.
    assert_eq!(profile.chains.saved_bytes, 2000.0);
    assert_eq!(profile.recommendation(Unfused).expect("advice").gain_us, Some(2.0));

    // Without peaks what they decide is unknown, and comes last.
    let step = vec![block(vec![matmul(1, 4)], &[(BURNS_MATMUL, 10)])];
    let mut blind = collect::summarize(&[step], None, None);
    blind.conclude(100.0, None);
    let last = blind.recommendations.last().expect("advice");
    assert_eq!((last.kind, last.gain_us), (Unserved, None));
}

#[test]
fn an_extension_operation_on_burns_kernels_is_told_where_it_was_declined() {
    let norm = OperationRecord { name: "layer_norm_forward".into(), ..add(&[1], 2) };
    let step = vec![block(vec![norm], &[("burn_cubecl::Reduce", 12)])];
    let mut profile = collect::summarize(&[step], None, Some(&peaks()));
    profile.conclude(20.0, None);
    assert_eq!(profile.recommendation(Advice::Unserved), None);
    profile.declined = vec!["layer_norm: rows too long".into(), "BlackburnGelu: layer_norm".into()];
    profile.conclude(20.0, None);
    let advice = profile.recommendation(Advice::Unserved).expect("advice");
    assert_eq!(advice.gain_us, Some(10.0));
    assert_eq!(
        advice.text,
        "layer_norm_forward on Burn's kernels: 1 (0.01 ms); layer_norm: rows too long"
    );
}

#[test]
fn a_profile_is_read_back_from_json() {
    let profile = profile(1000.0);
    let text = serde_json::to_string(&profile).expect("JSON");
    let back: StepProfile = serde_json::from_str(&text).expect("a profile");
    // serde_json rounds a number's last digit its own way.
    assert_eq!(back.to_string(), profile.to_string());
    assert_eq!((back.verdict, back.recommendations), (profile.verdict, profile.recommendations));
    assert!(text.contains("\"host_bound\"") && text.contains("\"burn_fused\""), "{text}");
}

#[test]
fn the_table_has_a_line_for_each_kernel_and_block() {
    let text = profile(1000.0).to_string();
    let line = |start: &str| {
        let found = text.lines().find(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no line {start:?} in\n{text}")).to_owned()
    };
    assert!(line("step").ends_with("1.000 ms"));
    assert!(line("kernels").contains("0.310 ms in 4 launches (31 %)"), "{text}");
    assert!(line("gaps").contains("0.690 ms (69 %)"), "{text}");
    assert!(line("ElemwiseFuse").contains("Burn, fused"), "{text}");
    assert!(line("Add x 2").contains("33.3 %"), "{text}");
    assert!(line(" 1.    0.690 ms").contains("GradientGraph"), "{text}");
    let widths: Vec<_> = text
        .lines()
        .skip_while(|line| !line.starts_with("kernel "))
        .take_while(|line| !line.is_empty())
        .map(str::len)
        .collect();
    assert!(widths.len() == 4 && widths.iter().all(|width| *width == widths[0]), "{text}");
}

#[test]
fn many_rows_and_long_names_are_cut() {
    let mut profile = profile(1000.0);
    let row = KernelRow { name: "K".repeat(100), ..profile.kernels[0].clone() };
    profile.kernels = vec![row; 25];
    let text = profile.to_string();
    assert!(text.contains(&format!("{}... ", "K".repeat(41))), "{text}");
    assert!(text.contains("and 5 more") && text.contains("1000.0"), "{text}");
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let device = Device::flex();
    let with = |change: fn(&mut ProfileOptions)| {
        let mut options = ProfileOptions::default();
        change(&mut options);
        Profiler::with_options(&device, options).expect_err("refused").to_string()
    };
    assert!(with(|options| options.rounds = 0).contains("`rounds`"));
    assert!(with(|options| options.steps_per_round = 0).contains("`steps_per_round`"));
    assert!(with(|options| options.observed = 0).contains("`observed`"));
    let error = with(|options| {
        options.peaks = PeakSource::Given(Peaks { bytes_per_second: f64::NAN, ..peaks() });
    });
    assert!(error.contains("`bytes_per_second`") && error.contains("NaN"), "{error}");
}

#[test]
fn on_a_cpu_a_profile_is_a_steps_time() {
    let options =
        ProfileOptions { warm_up: 1, rounds: 2, steps_per_round: 2, ..ProfileOptions::default() };
    let device = Device::flex().autodiff();
    let mut profiler = Profiler::with_options(&device, options).expect("valid options");
    let mut phases = Vec::new();
    while !profiler.is_done() {
        phases.push(profiler.phase());
        profiler.step(|| std::thread::sleep(Duration::from_millis(2))).expect("a step");
    }
    assert_eq!(phases, [Phase::WarmUp, Phase::Wall, Phase::Wall, Phase::Wall, Phase::Wall]);
    let profile = profiler.finish().expect("a profile");
    assert!(profile.wall_us >= 2000.0, "{}", profile.wall_us);
    assert_eq!((profile.device_us, profile.verdict), (None, Verdict::Unknown));
    assert!(profile.to_string().contains("need a GPU"), "{profile}");
}

#[test]
fn a_profile_needs_all_of_its_steps() {
    let mut profiler = Profiler::new(&Device::flex()).expect("a profiler");
    profiler.step(|| ()).expect("a step");
    let error = profiler.finish().expect_err("too few").to_string();
    assert!(error.contains("expected 18 steps, got 1"), "{error}");
}

#[test]
fn the_median_is_in_the_middle() {
    assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    assert_eq!(median(Vec::new()), 0.0);
}
