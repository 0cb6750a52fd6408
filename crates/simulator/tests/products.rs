//! Matrix products from fragments and from tiles that the copy engine brings, on whole numbers.

use blackburn_simulator::{
    Argument, CopyBox, Device, FaultKind, Launch, Options, Program, Schedule, SimulatorError,
    Swizzle, TensorMap,
};

/// A whole number of a matrix, small enough for bf16.
fn number(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 7 + column * 3 + salt) % 11) as f32 - 5.0
}

fn bf16_bits(value: f32) -> u32 {
    value.to_bits() >> 16
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let word = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    bytes.chunks_exact(4).map(word).collect()
}

#[test]
fn a_warp_multiplies_fragments_that_lie_as_the_manual_says() {
    let ptx = ".version 8.7\n.target sm_80\n.address_size 64\n.visible .entry test(.param .u64 out, \
        .param .u64 in)\n{\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<8>;\n\
        ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\nmov.u32 %r1, %tid.x;\n\
        mul.wide.u32 %rd3, %r1, 32;\nadd.s64 %rd4, %rd2, %rd3;\n\
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd4];\nld.global.v2.u32 {%r6, %r7}, [%rd4+16];\n\
        mov.f32 %f1, 0f3F800000;\n\
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5}, {%r2, %r3, %r4, %r5}, \
        {%r6, %r7}, {%f1, %f1, %f1, %f1};\nmul.wide.u32 %rd5, %r1, 16;\nadd.s64 %rd6, %rd1, %rd5;\n\
        st.global.v4.f32 [%rd6], {%f2, %f3, %f4, %f5};\nret;\n}\n";
    let program = Program::parse(ptx).unwrap();
    // "Matrix Fragments for mma.m16n8k16": element i of a lane, by its group and its place in the group.
    let pair = |low: f32, high: f32| bf16_bits(low) | bf16_bits(high) << 16;
    let mut words = Vec::new();
    for lane in 0..32 {
        let (group, place) = (lane / 4, lane % 4);
        for i in [0, 2, 4, 6] {
            let row = if i < 2 || (4..6).contains(&i) { group } else { group + 8 };
            let column = place * 2 + if i < 4 { 0 } else { 8 };
            words.push(pair(number(row, column, 1), number(row, column + 1, 1)));
        }
        for i in [0, 2] {
            let row = place * 2 + if i < 2 { 0 } else { 8 };
            words.push(pair(number(row, group, 2), number(row + 1, group, 2)));
        }
        words.extend([0, 0]);
    }
    let mut device = Device::new();
    let (out, given) = (device.allocate(512), device.allocate(1024));
    device.write(given, &bytes_of(&words)).unwrap();
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::address(out), Argument::address(given)],
        reach: None,
    };
    device.launch(&program, &launch, &Options::default()).unwrap();
    let sums = floats(&device.read(out, 512).unwrap().0);
    for lane in 0..32 {
        for i in 0..4 {
            let row = lane / 4 + if i < 2 { 0 } else { 8 };
            let column = lane % 4 * 2 + i % 2;
            let term = |k| number(row, k, 1) * number(k, column, 2);
            let expected = 1.0 + (0..16).map(term).sum::<f32>();
            assert_eq!(sums[4 * lane + i], expected, "lane {lane}, register {i}");
        }
    }
}

/// 64 rows of A and 8 of B, 64 columns of k each, brought by the copy engine.
const TILES: &str = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry test(\
    .param .align 128 .b8 a_map[128], .param .align 128 .b8 b_map[128], .param .u64 out)\n{\n\
    .reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<16>;\n.reg .f32 %f<8>;\n\
    .shared .align 1024 .b8 tile[9216];\n.shared .align 8 .b8 barrier[8];\n\
    ld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\nmov.u64 %rd2, tile;\ncvt.u32.u64 %r2, %rd2;\n\
    add.s32 %r3, %r2, 8192;\nmov.u64 %rd3, barrier;\ncvt.u32.u64 %r4, %rd3;\nmov.u32 %r5, 0;\n\
    setp.ne.s32 %p1, %r1, 0;\n@%p1 bra READY;\nmbarrier.init.shared::cta.b64 [%r4], 1;\n\
    fence.mbarrier_init.release.cluster;\nREADY:\nbar.sync 0;\n@%p1 bra WAIT;\n\
    mov.b64 %rd4, a_map;\ncvta.param.u64 %rd4, %rd4;\nmov.b64 %rd5, b_map;\ncvta.param.u64 %rd5, %rd5;\n\
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 9216;\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd4, {%r5, %r5}], \
    [%r4];\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd5, {%r5, %r5}], \
    [%r4];\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;\n@!%p2 bra WAIT;\n\
    shr.u32 %r6, %r2, 4;\nshr.u32 %r7, %r3, 4;\ncvt.u64.u32 %rd6, %r6;\ncvt.u64.u32 %rd7, %r7;\n\
    or.b64 %rd6, %rd6, 4611686293305360384;\nor.b64 %rd7, %rd7, 4611686293305360384;\n\
    setp.ne.u32 %p3, 0, 0;\nwgmma.fence.sync.aligned;\n\
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd6, %rd7, %p3, 1, 1, 0, 0;\n\
    setp.eq.u32 %p3, 0, 0;\nadd.s64 %rd6, %rd6, 2;\nadd.s64 %rd7, %rd7, 2;\n\
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd6, %rd7, %p3, 1, 1, 0, 0;\n\
    wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n\
    mul.wide.u32 %rd8, %r1, 16;\nadd.s64 %rd9, %rd1, %rd8;\n\
    st.global.v4.f32 [%rd9], {%f1, %f2, %f3, %f4};\nret;\n}\n";

/// Runs it, changed, and gives the accumulators of 128 threads.
fn tiles(change: [&str; 2], schedule: Schedule) -> Result<Vec<f32>, SimulatorError> {
    assert!(TILES.contains(change[0]), "{}", change[0]);
    let program = Program::parse(&TILES.replacen(change[0], change[1], 1))?;
    let mut device = Device::new();
    let mut matrix = |rows: usize, salt: usize| {
        let words: Vec<u32> = (0..rows * 32)
            .map(|at| {
                let (row, column) = (at / 32, at % 32 * 2);
                bf16_bits(number(row, column, salt))
                    | bf16_bits(number(row, column + 1, salt)) << 16
            })
            .collect();
        let address = device.allocate(128 * rows as u64);
        device.write(address, &bytes_of(&words)).unwrap();
        Argument::TensorMap(TensorMap {
            address,
            element_bytes: 2,
            shape: vec![64, rows as u64],
            strides: vec![128],
            taken: CopyBox::Tile(vec![64, rows as u32]),
            swizzle: Swizzle::Bytes128,
        })
    };
    let (a, b) = (matrix(64, 1), matrix(8, 2));
    let out = device.allocate(128 * 16);
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [128, 1, 1],
        dynamic_shared: 0,
        arguments: vec![a, b, Argument::address(out)],
        reach: None,
    };
    device.launch(&program, &launch, &Options { schedule, ..Options::default() })?;
    Ok(floats(&device.read(out, 128 * 16).unwrap().0))
}

/// The kind of fault that the first schedules show, if they agree.
fn fault(change: [&str; 2]) -> Option<FaultKind> {
    let kinds: Vec<_> = Schedule::several(6)
        .filter_map(|schedule| match tiles(change, schedule) {
            Err(SimulatorError::Fault(fault)) => Some(fault.kind),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        })
        .collect();
    kinds.first().copied()
}

#[test]
fn a_warpgroup_multiplies_tiles_under_every_schedule() {
    for schedule in Schedule::several(20) {
        let sums =
            tiles(["", ""], schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        for thread in 0..128 {
            for i in 0..4 {
                let row = 16 * (thread / 32) + thread % 32 / 4 + if i < 2 { 0 } else { 8 };
                let column = thread % 4 * 2 + i % 2;
                let term = |k| number(row, k, 1) * number(column, k, 2);
                let expected = (0..32).map(term).sum::<f32>();
                assert_eq!(sums[4 * thread + i], expected, "thread {thread}, register {i}");
            }
        }
    }
}

#[test]
fn what_a_pipeline_may_not_leave_out_is_noticed() {
    use FaultKind::{Deadlock, Misuse, ProxyFence, Race};
    for (change, kind) in [
        (["fence.mbarrier_init.release.cluster;", ""], ProxyFence),
        (["bar.sync 0;", ""], Race),
        (["%p2, [%r4], 0;", "%p2, [%r4], 1;"], Race),
        (["9216;\n", "9200;\n"], Deadlock),
        (["9216;\n", "9232;\n"], Deadlock),
        (["[%r4], 1;", "[%r4], 2;"], Deadlock),
        (["wgmma.fence.sync.aligned;", ""], Race),
        (["wgmma.wait_group.sync.aligned 0;", ""], Race),
        (["wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"], Race),
        (["wgmma.commit_group.sync.aligned;", ""], Race),
        (["4611686293305360384", "4611756662049538048"], Misuse),
    ] {
        // A barrier that is not there yet is as good a sign of a missing wait.
        let found = fault(change);
        let early = kind == Race && found == Some(Misuse);
        assert!(found == Some(kind) || early, "{change:?}: {found:?}");
    }
}

#[test]
fn stores_in_front_of_a_product_need_a_proxy_fence() {
    let store = |fence: &str| {
        [
            "wgmma.fence.sync.aligned;".to_owned(),
            format!(
                "bar.sync 0;\nmov.u32 %r8, 0;\n\
          setp.eq.s32 %p1, %r1, 0;\n@%p1 st.shared.u32 [%r2], %r8;\n{fence}\nbar.sync 0;\n\
          wgmma.fence.sync.aligned;"
            ),
        ]
    };
    let kind = |change: &[String; 2]| fault([&change[0], &change[1]]);
    assert_eq!(kind(&store("")), Some(FaultKind::ProxyFence));
    assert_eq!(kind(&store("fence.proxy.async;")), None);
}

#[test]
fn workstations_copy_tiles_to_a_blocks_own_shared_memory_alone() {
    let workstation = TILES.replace("sm_90a", "sm_120a");
    let error = Program::parse(&workstation).unwrap_err().to_string();
    assert!(error.contains("a call of the driver"), "{error}");
    let own = workstation.replace("2d.shared::cluster", "2d.shared::cta");
    Program::parse(&own).unwrap();
}
