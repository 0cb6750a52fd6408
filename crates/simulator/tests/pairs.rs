//! Clusters of two blocks: products of the pair, its tensor memory, and barriers that one block arrives at for the other.

use blackburn_simulator::{
    Argument, CopyBox, Device, FaultKind, Launch, Options, Program, Schedule, SimulatorError,
    Swizzle, TensorMap,
};

/// 256 rows of A and 32 of B, 64 columns of k each, of which each block has half of the rows; two products of 32 bytes
/// of k, by the first block. Each thread stores its row of the sums.
const KERNEL: &str = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry test(\
    .param .align 128 .b8 a_map[128], .param .align 128 .b8 b_map[128], .param .u64 out)\n\
    .explicitcluster\n.reqnctapercluster 2, 1, 1\n{\n\
    .reg .pred %p<8>;\n.reg .b32 %r<64>;\n.reg .b64 %rd<16>;\n.reg .b16 %h<2>;\n\
    .shared .align 1024 .b8 tile[18432];\n.shared .align 8 .b8 barriers[16];\n\
    .shared .align 4 .b8 place[4];\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\n\
    mov.u32 %r48, %cluster_ctarank;\nsetp.ne.u32 %p5, %r48, 0;\nmov.b16 %h1, 3;\n\
    mov.u64 %rd2, tile;\ncvt.u32.u64 %r2, %rd2;\nadd.s32 %r3, %r2, 16384;\n\
    mov.u64 %rd3, barriers;\ncvt.u32.u64 %r4, %rd3;\nmov.u64 %rd4, place;\ncvt.u32.u64 %r7, %rd4;\n\
    mov.u32 %r5, 0;\nshr.u32 %r8, %r1, 5;\nsetp.ne.u32 %p0, %r8, 0;\n@%p0 bra READY;\n\
    elect.sync _|%p1, -1;\n@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;\n\
    @%p1 mbarrier.init.shared::cta.b64 [%r4+8], 1;\nfence.mbarrier_init.release.cluster;\n\
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r7], 32;\n\
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;\nREADY:\n\
    barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n\
    ld.shared.b32 %r9, [%r7];\n@%p0 bra WAIT;\nelect.sync _|%p1, -1;\n@!%p1 bra WAIT;\n\
    mov.b64 %rd4, a_map;\ncvta.param.u64 %rd4, %rd4;\nmov.b64 %rd5, b_map;\ncvta.param.u64 %rd5, %rd5;\n\
    mapa.shared::cluster.u32 %r49, %r4, 0;\nshl.b32 %r50, %r48, 7;\nshl.b32 %r51, %r48, 4;\n\
    @!%p5 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 36864;\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%r2], \
    [%rd4, {%r5, %r50}], [%r49];\n\
    cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], \
    [%rd5, {%r5, %r51}], [%r49];\n@%p5 bra WAIT;\n\
    FULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;\n@!%p2 bra FULL;\n\
    shr.u32 %r6, %r2, 4;\nshr.u32 %r10, %r3, 4;\ncvt.u64.u32 %rd6, %r6;\ncvt.u64.u32 %rd7, %r10;\n\
    or.b64 %rd6, %rd6, 0x4000404000010000;\nor.b64 %rd7, %rd7, 0x4000404000010000;\n\
    mov.u32 %r11, INSTRUCTION;\nsetp.ne.u32 %p3, 0, 0;\n\
    tcgen05.mma.cta_group::2.kind::f16 [%r9], %rd6, %rd7, %r11, %p3;\nsetp.eq.u32 %p3, 0, 0;\n\
    add.s64 %rd6, %rd6, 2;\nadd.s64 %rd7, %rd7, 2;\n\
    tcgen05.mma.cta_group::2.kind::f16 [%r9], %rd6, %rd7, %r11, \
    {%r5, %r5, %r5, %r5, %r5, %r5, %r5, %r5}, %p3;\n\
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r4+8], %h1;\n\
    WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4+8], 0;\n@!%p4 bra WAIT;\n\
    tcgen05.fence::after_thread_sync;\nshl.b32 %r12, %r8, 21;\nadd.s32 %r12, %r12, %r9;\n\
    shl.b32 %r52, %r48, 7;\nadd.s32 %r52, %r52, %r1;\n\
    mul.wide.u32 %rd8, %r52, 128;\nadd.s64 %rd9, %rd1, %rd8;\nSTORE\
    tcgen05.fence::before_thread_sync;\n\
    barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n@%p0 bra END;\n\
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r9, 32;\nEND:\nret;\n}\n";

/// The instruction descriptor of bf16, 256 rows, 32 columns, sums in f32.
const INSTRUCTION: u32 = 1 << 4 | 1 << 7 | 1 << 10 | (32 / 8) << 17 | (256 / 16) << 24;

/// Both halves of a thread's row.
fn store() -> String {
    let halves = [0, 16].map(|column| {
        let registers: Vec<_> = (16..32).map(|at| format!("%r{at}")).collect();
        let stored = registers.chunks_exact(4).enumerate().map(|(at, four)| {
            format!("st.global.v4.b32 [%rd9+{}], {{{}}};\n", 4 * column + 16 * at, four.join(", "))
        });
        format!(
            "tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{}}}, [%r12+{column}];\n\
             tcgen05.wait::ld.sync.aligned;\n{}",
            registers.join(", "),
            stored.collect::<String>()
        )
    });
    halves.concat()
}

/// A whole number of a matrix, small enough for bf16.
fn number(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 7 + column * 3 + salt) % 11) as f32 - 5.0
}

/// An element of the product, over the 32 k that two instructions take.
fn expected(row: usize, column: usize) -> f32 {
    (0..32).map(|k| number(row, k, 1) * number(column, k, 2)).sum()
}

/// Runs a kernel on two blocks of 128 threads, and gives 32 numbers of each thread.
fn run(kernel: &str, schedule: Schedule) -> Result<Vec<f32>, SimulatorError> {
    let program = Program::parse(kernel)?;
    let mut device = Device::new();
    let mut matrix = |rows: usize, of_block: u32, salt: usize| {
        let bytes: Vec<u8> = (0..rows * 64)
            .flat_map(|at| {
                let bits = number(at / 64, at % 64, salt).to_bits() >> 16;
                (bits as u16).to_le_bytes()
            })
            .collect();
        let address = device.allocate(128 * rows as u64);
        device.write(address, &bytes).unwrap();
        Argument::TensorMap(TensorMap {
            address,
            element_bytes: 2,
            shape: vec![64, rows as u64],
            strides: vec![128],
            taken: CopyBox::Tile(vec![64, of_block]),
            swizzle: Swizzle::Bytes128,
        })
    };
    let (a, b) = (matrix(256, 128, 1), matrix(32, 16, 2));
    let out = device.allocate(256 * 128);
    let launch = Launch {
        kernel: "test".into(),
        grid: [2, 1, 1],
        block: [128, 1, 1],
        dynamic_shared: 0,
        arguments: vec![a, b, Argument::address(out)],
        reach: None,
    };
    device.launch(&program, &launch, &Options { schedule, ..Options::default() })?;
    let (bytes, _) = device.read(out, 256 * 128).unwrap();
    let word = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    Ok(bytes.chunks_exact(4).map(word).collect())
}

/// The kernel with each of those texts in the place of another one.
fn changed(changes: &[[&str; 2]]) -> String {
    let kernel = KERNEL.replace("INSTRUCTION", &INSTRUCTION.to_string()).replace("STORE", &store());
    changes.iter().fold(kernel, |text, [from, to]| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    })
}

/// What the first of some schedules says that says anything.
fn fault(kernel: &str) -> Option<(FaultKind, String)> {
    Schedule::several(8).find_map(|schedule| match run(kernel, schedule) {
        Err(SimulatorError::Fault(fault)) => Some((fault.kind, fault.reason)),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    })
}

#[test]
fn a_pair_multiplies_its_rows_by_the_columns_of_both_under_every_schedule() {
    for schedule in Schedule::several(40) {
        let sums =
            run(&changed(&[]), schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        for (at, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, expected(at / 32, at % 32), "row {}, column {}", at / 32, at % 32);
        }
    }
}

#[test]
fn lanes_of_a_pair_may_be_counted_through() {
    let through = [
        "shl.b32 %r12, %r8, 21;",
        "shl.b32 %r12, %r8, 21;\nshl.b32 %r53, %r48, 23;\nadd.s32 %r12, %r12, %r53;",
    ];
    let sums = run(&changed(&[through]), Schedule::several(1).next().unwrap()).unwrap();
    assert_eq!(sums[32 * 200 + 31], expected(200, 31));
}

#[test]
fn a_barrier_of_the_other_block_may_be_found_by_clearing_a_bit() {
    let mask = ["mapa.shared::cluster.u32 %r49, %r4, 0;", "and.b32 %r49, %r4, 0xFEFFFFFF;"];
    let sums = run(&changed(&[mask]), Schedule::several(1).next().unwrap()).unwrap();
    assert_eq!(sums[32 * 200 + 31], expected(200, 31));
}

#[test]
fn waits_and_barriers_that_are_left_out_are_noticed() {
    use FaultKind::{Deadlock, Misuse, OutOfBounds, Race, Uninitialized};
    let ready =
        "READY:\nbarrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n";
    let wait =
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4+8], 0;\n@!%p4 bra WAIT;\n";
    for (change, kinds, reason) in [
        ([wait, "WAIT:\n"], &[Race, Uninitialized, Misuse][..], ""),
        // The blocks do not meet before one uses what the other one has made.
        ([ready, "READY:\nbar.sync 0;\n"], &[Race, Misuse, OutOfBounds], ""),
        // Barriers are known then by their fence, and where tensor memory lies is not.
        (
            [
                ready,
                "READY:\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n",
            ],
            &[Race],
            "",
        ),
        (["barrier.cluster.arrive.aligned;\n", ""], &[Misuse], "at which it has not arrived"),
        (
            ["tcgen05.fence::after_thread_sync;\n", ""],
            &[Race],
            "no tcgen05.fence::after_thread_sync lies in between",
        ),
        // One block is told of the products, and not the other one.
        (["mov.b16 %h1, 3;", "mov.b16 %h1, 1;"], &[Deadlock], "block 1"),
        (["mov.b16 %h1, 3;", "mov.b16 %h1, 7;"], &[Misuse], "0b111 of a cluster of 2"),
        (["_, [%r4], 36864;", "_, [%r4], 18432;"], &[Race, Misuse, Deadlock, Uninitialized], ""),
        (["u32 %r49, %r4, 0;", "u32 %r49, %r4, 1;"], &[Deadlock, Misuse], ""),
        (["u32 %r49, %r4, 0;", "u32 %r49, %r4, 2;"], &[Misuse], "block 2 of a cluster of 2"),
        (["bytes.cta_group::2 [%r2]", "bytes [%r2]"], &[Misuse], "is counted in block 0"),
    ] {
        let (kind, told) = fault(&changed(&[change])).unwrap_or_else(|| panic!("{change:?}"));
        assert!(kinds.contains(&kind), "{change:?}: {kind:?}: {told}");
        assert!(told.contains(reason), "{change:?}: {told}");
    }
}

#[test]
fn both_blocks_of_a_pair_take_tensor_memory_and_give_it_back() {
    use FaultKind::{Deadlock, Misuse};
    let alloc = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r7], 32;\n";
    let dealloc = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r9, 32;\n";
    let by_one = |instruction: &str| format!("@!%p5 {instruction}");
    for (change, kinds, reason) in [
        ([alloc, &by_one(alloc)], &[Deadlock][..], "tensor memory of the other block of its pair"),
        ([dealloc, &by_one(dealloc)], &[Misuse], "in use"),
        (
            [
                alloc,
                &format!(
                    "add.s32 %r54, %r48, 1;\nshl.b32 %r54, %r54, 5;\n{}",
                    alloc.replace("32;\n", "%r54;\n")
                ),
            ],
            &[Misuse],
            "the other block of the pair has asked for",
        ),
        (
            [&INSTRUCTION.to_string(), &(INSTRUCTION ^ 24 << 24).to_string()],
            &[FaultKind::Unsupported],
            "128 rows of a pair",
        ),
        (
            [&INSTRUCTION.to_string(), &(INSTRUCTION ^ 20 << 24).to_string()],
            &[Misuse],
            "64 rows of a pair",
        ),
        (
            [&INSTRUCTION.to_string(), &(INSTRUCTION + (2 << 17)).to_string()],
            &[Misuse],
            "48 columns of 256 rows",
        ),
    ] {
        let (kind, told) = fault(&changed(&[change])).unwrap_or_else(|| panic!("{change:?}"));
        assert!(kinds.contains(&kind) && told.contains(reason), "{change:?}: {kind:?}: {told}");
    }
}

#[test]
fn a_kernel_has_instructions_of_one_block_or_of_pairs() {
    let mixed = changed(&[[
        "relinquish_alloc_permit.cta_group::2",
        "relinquish_alloc_permit.cta_group::1",
    ]]);
    let error = Program::parse(&mixed).unwrap_err();
    assert!(error.reason.contains("of the other `cta_group`"), "{error}");
    let alone = changed(&[[".reqnctapercluster 2, 1, 1", ""]]);
    let (kind, told) = fault(&alone).unwrap();
    assert!(
        kind == FaultKind::Misuse && told.contains("block 0 of a cluster of 1 has no other one"),
        "{told}"
    );
}

/// The second block writes to the memory of the first and arrives at its barrier; the first waits and reads. Numbers of
/// the blocks stand behind it.
const REMOTE: &str = ".version 8.7\n.target sm_90\n.address_size 64\n.visible .entry test(\
    .param .align 128 .b8 a[128], .param .align 128 .b8 b[128], .param .u64 out)\n\
    .explicitcluster\n.reqnctapercluster 2, 1, 1\n{\n\
    .reg .pred %p<4>;\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.shared .align 8 .b8 barrier[8];\n\
    .shared .align 4 .b8 word[4];\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\n\
    mov.u32 %r2, %cluster_ctarank;\nsetp.ne.u32 %p0, %r1, 0;\nsetp.ne.u32 %p1, %r2, 0;\n\
    mov.u64 %rd2, barrier;\ncvt.u32.u64 %r3, %rd2;\nmov.u64 %rd3, word;\ncvt.u32.u64 %r4, %rd3;\n\
    @%p0 bra READY;\nmbarrier.init.shared::cta.b64 [%r3], 1;\nfence.mbarrier_init.release.cluster;\nREADY:\n\
    barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n\
    @%p0 bra END;\n@!%p1 bra WAIT;\nmapa.shared::cluster.u32 %r5, %r3, 0;\n\
    mapa.shared::cluster.u32 %r6, %r4, 0;\nst.shared::cluster.u32 [%r6], 77;\n\
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];\nbra END;\nWAIT:\n\
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3], 0;\n@!%p2 bra WAIT;\n\
    ld.shared.u32 %r7, [%r4];\nst.global.u32 [%rd1], %r7;\nmov.u32 %r8, %clusterid.x;\n\
    st.global.u32 [%rd1+4], %r8;\nmov.u32 %r8, %cluster_nctarank;\nst.global.u32 [%rd1+8], %r8;\nEND:\n\
    barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\nret;\n}\n";

#[test]
fn a_block_tells_another_one_of_what_it_wrote() {
    for schedule in Schedule::several(20) {
        let words = run(REMOTE, schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        assert_eq!([0, 1, 2].map(|at| words[at].to_bits()), [77, 0, 2]);
    }
    use FaultKind::{Deadlock, Misuse, OutOfBounds, Race};
    for (change, kinds, reason) in [
        // Neither order reaches beyond the block unless it says so.
        (["arrive.release.cluster", "arrive.release.cta"], &[Race][..], "nothing orders the two"),
        (["parity.acquire.cluster", "parity.acquire.cta"], &[Race], "nothing orders the two"),
        (
            ["st.shared::cluster.u32 [%r6]", "st.shared.u32 [%r6]"],
            &[OutOfBounds],
            "is not of block 1",
        ),
        (
            ["release.cluster.shared::cluster", "release.cluster.shared::cta"],
            &[Misuse],
            "is not of block 1",
        ),
        (
            ["mapa.shared::cluster.u32 %r5, %r3, 0;", "mov.u32 %r5, %r3;"],
            &[Deadlock],
            "1 threads of warp 0 of block 0",
        ),
    ] {
        assert!(REMOTE.contains(change[0]), "{}", change[0]);
        let (kind, told) = fault(&REMOTE.replacen(change[0], change[1], 1))
            .unwrap_or_else(|| panic!("{change:?}"));
        assert!(kinds.contains(&kind), "{change:?}: {kind:?}: {told}");
        assert!(told.contains(reason), "{change:?}: {told}");
    }
    // The first block does not wait, and is gone when the second one arrives.
    let last = "END:\nbarrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n";
    let hasty = REMOTE.replace("@!%p1 bra WAIT;\n", "@!%p1 ret;\n").replace(last, "END:\n");
    let (kind, told) = fault(&hasty).unwrap();
    assert!(kind == Misuse && told.contains("block 0 of the cluster, which has ended"), "{told}");
}

#[test]
fn a_grid_is_whole_clusters() {
    let program = Program::parse(REMOTE).unwrap();
    let launch = Launch {
        kernel: "test".into(),
        grid: [3, 1, 1],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments: vec![
            Argument::Bytes(vec![0; 128]),
            Argument::Bytes(vec![0; 128]),
            Argument::address(0),
        ],
        reach: None,
    };
    let error = Device::new().launch(&program, &launch, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("in clusters of [2, 1, 1]"), "{error}");
}
