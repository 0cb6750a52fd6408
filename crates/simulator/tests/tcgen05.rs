//! Products of `tcgen05` in small kernels, and what is said where a kernel leaves something out.

use blackburn_simulator::{
    Argument, CopyBox, Device, FaultKind, Launch, Options, Program, Schedule, SimulatorError,
    Swizzle, TensorMap,
};

/// 128 rows of A and 16 of B, 64 columns of k each, brought by the copy engine; two products of 32 bytes of k.
/// `INSTRUCTION` is the instruction descriptor; `STORE` brings the sums of a warp to global memory, at `%rd9`.
const KERNEL: &str = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry test(\
    .param .align 128 .b8 a_map[128], .param .align 128 .b8 b_map[128], .param .u64 out)\n{\n\
    .reg .pred %p<8>;\n.reg .b32 %r<48>;\n.reg .b64 %rd<16>;\n\
    .shared .align 1024 .b8 tile[18432];\n.shared .align 8 .b8 barriers[16];\n\
    .shared .align 4 .b8 place[4];\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\n\
    mov.u64 %rd2, tile;\ncvt.u32.u64 %r2, %rd2;\nadd.s32 %r3, %r2, 16384;\n\
    mov.u64 %rd3, barriers;\ncvt.u32.u64 %r4, %rd3;\nmov.u64 %rd4, place;\ncvt.u32.u64 %r7, %rd4;\n\
    mov.u32 %r5, 0;\nshr.u32 %r8, %r1, 5;\nsetp.ne.u32 %p0, %r8, 0;\n@%p0 bra READY;\n\
    elect.sync _|%p1, -1;\n@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;\n\
    @%p1 mbarrier.init.shared::cta.b64 [%r4+8], 1;\nfence.mbarrier_init.release.cluster;\n\
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 32;\n\
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\nREADY:\nbar.sync 0;\n\
    ld.shared.b32 %r9, [%r7];\n@%p0 bra WAIT;\nelect.sync _|%p1, -1;\n@!%p1 bra WAIT;\n\
    mov.b64 %rd4, a_map;\ncvta.param.u64 %rd4, %rd4;\nmov.b64 %rd5, b_map;\ncvta.param.u64 %rd5, %rd5;\n\
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 18432;\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd4, {%r5, %r5}], \
    [%r4];\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd5, {%r5, %r5}], \
    [%r4];\nFULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;\n@!%p2 bra FULL;\n\
    shr.u32 %r6, %r2, 4;\nshr.u32 %r10, %r3, 4;\ncvt.u64.u32 %rd6, %r6;\ncvt.u64.u32 %rd7, %r10;\n\
    or.b64 %rd6, %rd6, 0x4000404000010000;\nor.b64 %rd7, %rd7, 0x4000404000010000;\n\
    mov.u32 %r11, INSTRUCTION;\nsetp.ne.u32 %p3, 0, 0;\n\
    tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd6, %rd7, %r11, %p3;\nsetp.eq.u32 %p3, 0, 0;\n\
    add.s64 %rd6, %rd6, 2;\nadd.s64 %rd7, %rd7, 2;\n\
    tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd6, %rd7, %r11, {%r5, %r5, %r5, %r5}, %p3;\n\
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+8];\nWAIT:\n\
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4+8], 0;\n@!%p4 bra WAIT;\n\
    tcgen05.fence::after_thread_sync;\nshl.b32 %r12, %r8, 21;\nadd.s32 %r12, %r12, %r9;\n\
    mul.wide.u32 %rd8, %r1, 64;\nadd.s64 %rd9, %rd1, %rd8;\nSTORE\
    tcgen05.fence::before_thread_sync;\nbar.sync 0;\n@%p0 bra END;\n\
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;\nEND:\nret;\n}\n";

/// Both halves of a warp's lanes as fragments of products lie: 8 registers for 16 rows of 16 columns.
const FRAGMENTS: &str = "tcgen05.ld.sync.aligned.16x256b.x2.b32 \
    {%r16, %r17, %r18, %r19, %r20, %r21, %r22, %r23}, [%r12];\n\
    tcgen05.ld.sync.aligned.16x256b.x2.b32 \
    {%r24, %r25, %r26, %r27, %r28, %r29, %r30, %r31}, [%r12+1048576];\n\
    tcgen05.wait::ld.sync.aligned;\nst.global.v4.b32 [%rd9], {%r16, %r17, %r18, %r19};\n\
    st.global.v4.b32 [%rd9+16], {%r20, %r21, %r22, %r23};\n\
    st.global.v4.b32 [%rd9+32], {%r24, %r25, %r26, %r27};\n\
    st.global.v4.b32 [%rd9+48], {%r28, %r29, %r30, %r31};\n";

/// A row for each thread.
const ROWS: &str = "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%r16, %r17, %r18, %r19, %r20, %r21, %r22, \
    %r23, %r24, %r25, %r26, %r27, %r28, %r29, %r30, %r31}, [%r12];\n\
    tcgen05.wait::ld.sync.aligned;\nst.global.v4.b32 [%rd9], {%r16, %r17, %r18, %r19};\n\
    st.global.v4.b32 [%rd9+16], {%r20, %r21, %r22, %r23};\n\
    st.global.v4.b32 [%rd9+32], {%r24, %r25, %r26, %r27};\n\
    st.global.v4.b32 [%rd9+48], {%r28, %r29, %r30, %r31};\n";

/// The instruction descriptor of bf16, 16 columns, sums in f32.
const fn bf16(rows: u32) -> u32 {
    1 << 4 | 1 << 7 | 1 << 10 | (16 / 8) << 17 | (rows / 16) << 24
}

/// A whole number of a matrix, small enough for bf16.
fn number(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 7 + column * 3 + salt) % 11) as f32 - 5.0
}

/// An element of the product, over the 32 k that two instructions take.
fn expected(row: usize, column: usize) -> f32 {
    (0..32).map(|k| number(row, k, 1) * number(column, k, 2)).sum()
}

/// Runs a kernel, and gives 16 numbers of each thread.
fn run(kernel: &str, schedule: Schedule) -> Result<Vec<f32>, SimulatorError> {
    let program = Program::parse(kernel)?;
    let mut device = Device::new();
    let mut matrix = |rows: usize, salt: usize| {
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
            taken: CopyBox::Tile(vec![64, rows as u32]),
            swizzle: Swizzle::Bytes128,
        })
    };
    let (a, b) = (matrix(128, 1), matrix(16, 2));
    let out = device.allocate(128 * 64);
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [128, 1, 1],
        dynamic_shared: 0,
        arguments: vec![a, b, Argument::address(out)],
        reach: None,
    };
    device.launch(&program, &launch, &Options { schedule, ..Options::default() })?;
    let (bytes, _) = device.read(out, 128 * 64).unwrap();
    let word = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    Ok(bytes.chunks_exact(4).map(word).collect())
}

fn kernel(rows: u32, store: &str) -> String {
    KERNEL.replace("INSTRUCTION", &bf16(rows).to_string()).replace("STORE", store)
}

/// The kernel with each of those texts in the place of another one.
fn changed(changes: &[[&str; 2]]) -> String {
    changes.iter().fold(kernel(128, FRAGMENTS), |text, [from, to]| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    })
}

/// What the first of some schedules says that says anything.
fn fault(kernel: &str) -> Option<(FaultKind, String)> {
    Schedule::several(6).find_map(|schedule| match run(kernel, schedule) {
        Err(SimulatorError::Fault(fault)) => Some((fault.kind, fault.reason)),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    })
}

#[test]
fn fragments_of_a_product_are_right_under_every_schedule() {
    for schedule in Schedule::several(20) {
        let sums = run(&kernel(128, FRAGMENTS), schedule)
            .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        for (at, sum) in sums.iter().enumerate() {
            let (thread, half, i) = (at / 16, at % 16 / 8, at % 8);
            let (warp, lane) = (thread / 32, thread % 32);
            let row = 32 * warp + 16 * half + lane / 4 + 8 * (i / 2 % 2);
            let column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            assert_eq!(*sum, expected(row, column), "thread {thread}, half {half}, register {i}");
        }
    }
}

#[test]
fn each_thread_reads_a_row_of_a_product() {
    for schedule in Schedule::several(8) {
        let sums = run(&kernel(128, ROWS), schedule).unwrap();
        for (at, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, expected(at / 16, at % 16), "row {}, column {}", at / 16, at % 16);
        }
    }
}

#[test]
fn sums_of_64_rows_lie_in_half_of_each_warps_lanes() {
    // The other lanes hold what nobody wrote, which the store reports.
    assert_eq!(fault(&kernel(64, ROWS)).map(|(kind, _)| kind), Some(FaultKind::Uninitialized));
    let lower = FRAGMENTS.replace("[%r12+1048576]", "[%r12]");
    let sums = run(&kernel(64, &lower), Schedule::several(1).next().unwrap()).unwrap();
    // Register 0 of lane 4 of warp 2: row 1 of the third 16.
    assert_eq!(sums[16 * (64 + 4)], expected(33, 0));
}

#[test]
fn what_is_stored_is_loaded_again() {
    let store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {%r1};\n\
        tcgen05.wait::st.sync.aligned;\n";
    let loads = format!("{store}{ROWS}");
    let words = run(&kernel(128, &loads), Schedule::several(1).next().unwrap()).unwrap();
    assert_eq!(words[16 * 77].to_bits(), 77);
    let hasty = loads.replace("tcgen05.wait::st.sync.aligned;\n", "");
    assert_eq!(fault(&kernel(128, &hasty)).map(|(kind, _)| kind), Some(FaultKind::Race));
}

/// The rows of A in the registers of a warp, as pairs of bf16, and what the warp has to do before a product may read
/// them from tensor memory. Register i of a lane holds k 2 i and 2 i + 1 of its row; a product begins at `%r9` + 16.
fn rows_in_tensor_memory() -> String {
    let product = "tcgen05.mma.cta_group::1.kind::f16 [%r9], %rd6, %rd7, %r11, %p3;\nsetp.eq.u32 %p3, 0, 0;\n";
    let stored: String = (0..8)
        .map(|pair| {
            let at = 16 + pair;
            format!(
                "mad.lo.s32 %r{at}, %r1, 7, {};\nrem.u32 %r{at}, %r{at}, 11;\nsub.s32 %r{at}, %r{at}, 5;\n\
                 cvt.rn.f32.s32 %r13, %r{at};\nmad.lo.s32 %r{at}, %r1, 7, {};\nrem.u32 %r{at}, %r{at}, 11;\n\
                 sub.s32 %r{at}, %r{at}, 5;\ncvt.rn.f32.s32 %r14, %r{at};\n\
                 cvt.rn.bf16x2.f32 %r{at}, %r14, %r13;\n",
                6 * pair + 1,
                6 * pair + 4
            )
        })
        .collect();
    let store = format!(
        "bar.sync 0;\nld.shared.b32 %r9, [%r7];\nshl.b32 %r12, %r8, 21;\nadd.s32 %r12, %r12, %r9;\n{stored}\
         tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12+16], \
         {{%r16, %r17, %r18, %r19, %r20, %r21, %r22, %r23}};\n\
         tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\nbar.sync 0;\n\
         tcgen05.fence::after_thread_sync;\n"
    );
    changed(&[
        ["bar.sync 0;\nld.shared.b32 %r9, [%r7];\n", &store],
        [product, &product.replace("%rd6", "[%r9+16]")],
    ])
}

#[test]
fn rows_of_tensor_memory_are_multiplied() {
    let kernel = rows_in_tensor_memory();
    for schedule in Schedule::several(20) {
        let sums = run(&kernel, schedule).unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        // Lane 5 of warp 1, register 0 of its lower 16 rows.
        assert_eq!(sums[16 * (32 + 5)], expected(32 + 1, 2));
        assert_eq!(sums[16 * (96 + 31) + 15], expected(96 + 31, 15));
    }
}

#[test]
fn rows_of_tensor_memory_are_multiplied_after_they_are_stored() {
    let kernel = rows_in_tensor_memory();
    let told =
        "tcgen05.fence::before_thread_sync;\nbar.sync 0;\ntcgen05.fence::after_thread_sync;\n";
    for (from, to) in [
        ("tcgen05.wait::st.sync.aligned;\n", ""),
        (told, "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n"),
        (told, "tcgen05.fence::after_thread_sync;\n"),
        ("[%r9+16], %rd7", "[%r9+12], %rd7"),
    ] {
        assert!(kernel.contains(from), "{from}");
        let (kind, told) = fault(&kernel.replacen(from, to, 1)).unwrap_or_else(|| panic!("{from}"));
        let is_expected = matches!(kind, FaultKind::Race | FaultKind::Uninitialized);
        assert!(is_expected, "{from}: {kind:?}: {told}");
    }
    let (instruction, across) = (bf16(128), bf16(128) | 1 << 15);
    for (from, to, reason) in [
        ("[%r9+16], %rd7", "[%r9+28], %rd7", "those in use are"),
        ("[%r9+16], %rd7", "[%r9+65552], %rd7", "rows begin at lane 1"),
        (&*instruction.to_string(), &*across.to_string(), "its k along the columns"),
    ] {
        let (_, told) = fault(&kernel.replacen(from, to, 1)).unwrap_or_else(|| panic!("{to}"));
        assert!(told.contains(reason), "{told}");
    }
}

#[test]
fn waits_and_fences_that_are_left_out_are_noticed() {
    use FaultKind::{Deadlock, Misuse, OutOfBounds, Race, Uninitialized};
    let wait =
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4+8], 0;\n@!%p4 bra WAIT;\n";
    for (change, kinds, reason) in [
        ([wait, "WAIT:\n"], &[Race, Uninitialized][..], ""),
        (
            ["tcgen05.fence::after_thread_sync;\n", ""],
            &[Race],
            "no tcgen05.fence::after_thread_sync lies in between",
        ),
        (["tcgen05.wait::ld.sync.aligned;\n", ""], &[Race], ""),
        (["0;\n@!%p2 bra FULL;\n", "1;\n@!%p2 bra FULL;\n"], &[Race, Deadlock], ""),
        (["[%r4], 18432;\n", "[%r4], 18416;\n"], &[Deadlock, Race], ""),
        (["b64 [%r4+8];\nWAIT", "b64 [%r4];\nWAIT"], &[Deadlock, Misuse], ""),
        (["before_thread_sync;\nbar.sync 0;\n", "before_thread_sync;\n"], &[Race, OutOfBounds], ""),
    ] {
        let (kind, told) = fault(&changed(&[change])).unwrap_or_else(|| panic!("{change:?}"));
        assert!(kinds.contains(&kind), "{change:?}: {kind:?}: {told}");
        assert!(told.contains(reason), "{change:?}: {told}");
    }
}

#[test]
fn descriptors_and_threads_that_are_wrong_are_noticed() {
    use FaultKind::Misuse;
    let instruction = bf16(128).to_string();
    let wider = (bf16(128) + (1 << 17)).to_string();
    let other = (bf16(128) ^ 1 << 10).to_string();
    for (change, reason) in [
        (["0x4000404000010000", "0x4000004000010000"], "no version 1"),
        (["0x4000404000010000", "0x4000404000018000"], "have to be zero"),
        ([&instruction, &wider], "24 columns of 128 rows"),
        ([&instruction, &other], "two types"),
        (["shl.b32 %r12, %r8, 21;", "shl.b32 %r12, %r8, 20;"], "its lanes are"),
        (
            ["mma.cta_group::1.kind::f16 [%r9]", "mma.cta_group::1.kind::f16 [%r9+65536]"],
            "begin at lane 1",
        ),
    ] {
        let (kind, told) = fault(&changed(&[change])).unwrap_or_else(|| panic!("{change:?}"));
        assert!(kind == Misuse && told.contains(reason), "{change:?}: {kind:?}: {told}");
    }
}

#[test]
fn a_product_is_issued_by_one_thread() {
    let copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile";
    let by_all = changed(&[
        ["@!%p1 bra WAIT;\n", ""],
        ["mbarrier.arrive.expect_tx", "@%p1 mbarrier.arrive.expect_tx"],
        [
            &format!("{copy}.mbarrier::complete_tx::bytes [%r2]"),
            &format!("@%p1 {copy}.mbarrier::complete_tx::bytes [%r2]"),
        ],
        [
            &format!("{copy}.mbarrier::complete_tx::bytes [%r3]"),
            &format!("@%p1 {copy}.mbarrier::complete_tx::bytes [%r3]"),
        ],
    ]);
    let (kind, told) = fault(&by_all).unwrap();
    assert!(kind == FaultKind::Misuse && told.contains("32 threads of a warp issue it"), "{told}");
}

#[test]
fn tensor_memory_is_taken_and_given_back_by_its_rules() {
    use FaultKind::{Deadlock, Misuse, OutOfBounds};
    let dealloc = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;\n";
    let alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 32;\n";
    let twice = format!("{alloc}{}", alloc.replace("32;", "512;"));
    let late = format!("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n{alloc}");
    for (change, kind, reason) in [
        ([dealloc, ""], Misuse, "the block ends with columns"),
        ([dealloc, &dealloc.replace("32;", "64;")], Misuse, "are given back"),
        ([alloc, &alloc.replace("32;", "48;")], Misuse, "powers of two"),
        ([alloc, &alloc.replace("32;", "16;")], Misuse, "powers of two"),
        ([alloc, &twice], Deadlock, "waits for 512 columns"),
        ([alloc, &late], Misuse, "after the right to them was given up"),
        (["kind::f16 [%r9]", "kind::f16 [%r9+24]"], OutOfBounds, "those in use are"),
    ] {
        let (found, told) = fault(&changed(&[change])).unwrap_or_else(|| panic!("{change:?}"));
        assert!(found == kind && told.contains(reason), "{change:?}: {found:?}: {told}");
    }
}
