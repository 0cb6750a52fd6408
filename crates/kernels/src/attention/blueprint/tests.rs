//! Which plans are offered where.

use super::{super::mma_plan::mma_backward_tiles, *};
use crate::{
    Families,
    attention::{Pairs, Window},
};

const H200: DeviceProfile = DeviceProfile::H200;
const SOFTWARE: DeviceProfile = DeviceProfile::SOFTWARE;

fn problem(head_dim: usize, kind: FloatKind) -> AttentionProblem {
    AttentionProblem::dense([2, 4, 100, head_dim], 100, ElemType::Float(kind))
}

fn families(problem: &AttentionProblem, pass: Pass) -> Vec<Family> {
    let plans = AttentionBlueprint::candidates_on(problem, pass, H200);
    let mut families: Vec<_> = plans.into_iter().map(|plan| plan.family).collect();
    families.dedup();
    families
}

#[test]
fn every_head_has_a_tile_that_fits_a_software_device() {
    for head_dim in 1..=256 {
        let problem = problem(head_dim, FloatKind::F32);
        for pass in [Pass::Forward, Pass::Backward] {
            let plans = AttentionBlueprint::candidates_on(&problem, pass, SOFTWARE);
            assert_eq!(plans.len(), 1, "heads of {head_dim}");
        }
    }
}

#[test]
fn hopper_is_offered_what_its_tensor_cores_take() {
    let offered =
        |problem: &AttentionProblem| families(problem, Pass::Forward).contains(&Family::Wgmma);
    assert!(offered(&problem(64, FloatKind::BF16)));
    assert!(!offered(&problem(64, FloatKind::F32)));
    assert!(!offered(&problem(40, FloatKind::BF16)));
    let shared = HeadStrides { head: 0, ..problem(64, FloatKind::F16).k };
    assert!(!offered(&AttentionProblem { k: shared, ..problem(64, FloatKind::F16) }));
    let backward = |head_dim| families(&problem(head_dim, FloatKind::BF16), Pass::Backward);
    assert_eq!(backward(128), [Family::Wgmma, Family::Mma, Family::Portable]);
    assert_eq!(backward(256), [Family::Wgmma, Family::Mma, Family::Portable]);
}

#[test]
fn blackwell_is_offered_its_own_passes() {
    let first = |capability, problem: &AttentionProblem, pass| {
        let device = DeviceProfile { compute_capability: Some(capability), ..H200 };
        AttentionBlueprint::candidates_on(problem, pass, device)[0].family
    };
    let of_64 = problem(64, FloatKind::F16);
    for capability in [100, 103] {
        assert_eq!(first(capability, &of_64, Pass::Forward), Family::Tcgen05);
        assert_eq!(first(capability, &of_64, Pass::Backward), Family::Tcgen05);
        let repeated = AttentionProblem { deterministic: true, ..of_64 };
        assert_eq!(first(capability, &repeated, Pass::Backward), Family::Mma);
        assert_eq!(first(capability, &problem(144, FloatKind::F16), Pass::Forward), Family::Mma);
        assert_eq!(
            first(capability, &problem(64, FloatKind::F32), Pass::Forward),
            Family::Portable
        );
    }
    assert_eq!(first(120, &of_64, Pass::Forward), Family::Mma);
    let device = DeviceProfile { compute_capability: Some(100), ..H200 };
    let gated = DeviceProfile {
        families: Families::PORTABLE.with(FamilyOp::Attention, Family::Mma),
        ..device
    };
    let plans = AttentionBlueprint::candidates_on(&of_64, Pass::Forward, gated);
    assert_eq!(plans[0].family, Family::Mma);
}

#[test]
fn products_are_computed_once_unless_bits_have_to_repeat() {
    let backward = |problem: &AttentionProblem| {
        AttentionBlueprint::candidates_on(problem, Pass::Backward, H200)
    };
    let long = AttentionProblem::dense([2, 4, 2048, 64], 2048, ElemType::Float(FloatKind::BF16));
    let [first, second, third, ..] = backward(&long)[..] else { panic!("too few plans") };
    assert!(first.atomic && second.atomic && first.is_deterministic() == third.atomic);
    assert_eq!([first.tile_kv, second.tile_kv], [192, 128]);
    let repeated = AttentionProblem { deterministic: true, ..long };
    assert!(backward(&repeated).iter().all(AttentionBlueprint::is_deterministic));
    assert_eq!(backward(&repeated)[0], third);
    // Keys that fill a tile of 192 badly, short sequences, and wide heads with bounded scores.
    let of_640 = AttentionProblem::dense([2, 4, 640, 64], 640, long.dtype);
    assert_eq!(backward(&of_640)[0].tile_kv, 128);
    assert!(!backward(&problem(64, FloatKind::BF16))[0].atomic);
    let wide = AttentionProblem::dense([2, 4, 2048, 128], 2048, long.dtype);
    assert!(backward(&wide)[0].atomic);
    let bounded = AttentionProblem { softcap: Some(30.0), ..wide };
    assert!(!backward(&bounded).iter().any(|plan| plan.atomic));
    // Warpgroups share the keys of heads above 128, and no other plan of theirs has the registers.
    let widest = AttentionProblem::dense([2, 4, 2048, 256], 2048, long.dtype);
    assert_eq!((backward(&widest)[0].atomic, backward(&widest)[0].tile_kv), (true, 64));
    let repeated = AttentionProblem { deterministic: true, ..widest };
    assert_eq!(backward(&repeated)[0].family, Family::Mma);
}

#[test]
fn a_gpu_on_which_no_family_was_proven_has_ordinary_arithmetic() {
    let ada = DeviceProfile { compute_capability: Some(89), ..H200 };
    let first = |families| {
        let device = DeviceProfile { families, ..ada };
        let problem = problem(64, FloatKind::BF16);
        AttentionBlueprint::candidates_on(&problem, Pass::Forward, device)[0].family
    };
    assert_eq!(first(Families::PORTABLE), Family::Portable);
    assert_eq!(first(Families::PORTABLE.with(FamilyOp::Attention, Family::Mma)), Family::Mma);
}

#[test]
fn masks_that_all_heads_share_are_mapped_first_where_there_is_work_enough() {
    let of = |seq: usize, head: usize| AttentionProblem {
        mask: Some(Pairs { batch: 0, head, row: seq, column: 1 }),
        ..AttentionProblem::dense([8, 12, seq, 128], seq, ElemType::Float(FloatKind::BF16))
    };
    for pass in [Pass::Forward, Pass::Backward] {
        let plans = |problem| AttentionBlueprint::candidates_on(&problem, pass, H200);
        let maps = |problem| plans(problem).iter().map(|plan| plan.maps_mask).collect::<Vec<_>>();
        let (large, small, apart) = (maps(of(1024, 0)), maps(of(64, 0)), maps(of(1024, 1024)));
        assert!(large[0] && large.contains(&false));
        assert!(!small[0] && small.contains(&true));
        assert!(!apart.contains(&true));
    }
    // Tiles are those without a mask.
    let forward = AttentionBlueprint::candidates_on(&of(1024, 0), Pass::Forward, H200);
    assert_eq!((forward[0].family, forward[0].tile_kv), (Family::Wgmma, 128));
}

#[test]
fn tiles_of_three_warpgroups_come_first_where_no_window_hides_them() {
    let first = |problem: AttentionProblem| {
        AttentionBlueprint::candidates_on(&problem, Pass::Forward, H200)[0].tile_q
    };
    let of = |batch: usize, seq: usize, head_dim: usize| {
        AttentionProblem::dense([batch, 16, seq, head_dim], seq, ElemType::Float(FloatKind::BF16))
    };
    assert_eq!([1024, 2048, 8192].map(|seq| first(of(4, seq, 64))), [192; 3]);
    assert_eq!(first(of(4, 4096, 128)), 128);
    // Two tiles of 128 rows are less than two of 192.
    assert_eq!(first(of(1, 256, 64)), 128);
    let causal = Window { left: None, right: Some(0) };
    assert_eq!(first(AttentionProblem { window: causal, ..of(4, 4096, 64) }), 128);
    let mask = Some(Pairs { batch: 0, head: 0, row: 4096, column: 1 });
    assert_eq!(first(AttentionProblem { mask, ..of(4, 4096, 64) }), 128);
}

#[test]
fn wide_heads_fit_gpus_of_little_shared_memory() {
    // A100, H200, and those for desktops.
    let of = |shared_bytes| mma_backward_tiles(512, shared_bytes);
    assert_eq!([166_912, 232_448, 101_376].map(of), [Some((64, 1)), Some((64, 2)), Some((32, 1))]);
    assert_eq!(mma_backward_tiles(256, 101_376), Some((64, 2)));
    assert_eq!(of(1 << 15), None);
    let device = DeviceProfile { compute_capability: Some(120), shared_bytes: 101_376, ..H200 };
    let plans =
        AttentionBlueprint::candidates_on(&problem(256, FloatKind::BF16), Pass::Backward, device);
    assert_eq!((plans[0].family, plans[0].tile_q), (Family::Mma, 32));
}

#[test]
fn f32_goes_to_tensor_cores_where_it_may_be_rounded() {
    let exact = problem(64, FloatKind::F32);
    let rounded = AttentionProblem { full_f32: false, ..exact };
    for pass in [Pass::Forward, Pass::Backward] {
        assert_eq!(families(&exact, pass), [Family::Portable]);
        assert_eq!(families(&rounded, pass), [Family::Mma, Family::Portable]);
    }
    let long = |seq, window| {
        let long = AttentionProblem::dense([4, 16, seq, 64], seq, exact.dtype);
        let long = AttentionProblem { full_f32: false, window, ..long };
        AttentionBlueprint::candidates_on(&long, Pass::Forward, H200)[0].tile_q
    };
    let causal = Window { left: None, right: Some(0) };
    assert_eq!([long(1024, Window::default()), long(1024, causal)], [128, 64]);
    // Rows of 40 and of 1,024 bytes, of which the latter fit a small tile alone.
    let odd = AttentionProblem { full_f32: false, ..problem(10, FloatKind::F32) };
    assert_eq!(families(&odd, Pass::Forward), [Family::Portable]);
    let widest = AttentionProblem { full_f32: false, ..problem(256, FloatKind::F32) };
    let plans = AttentionBlueprint::candidates_on(&widest, Pass::Backward, H200);
    assert_eq!((plans[0].family, plans[0].tile_q), (Family::Mma, 32));
}
