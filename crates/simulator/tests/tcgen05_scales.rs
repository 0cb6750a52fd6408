//! Block-scaled products of `tcgen05` in a small kernel, and what is said where it does something wrong.

use blackburn_simulator::{
    Argument, CopyBox, Device, FaultKind, Launch, Options, Program, Schedule, SimulatorError,
    Swizzle, TensorMap,
};

/// 128 rows of A and 16 of B, 128 columns of k each, and a block of scales of each, brought by the copy engine; the
/// first and the third 32 columns of k are multiplied. Each thread writes a row of the sums to global memory.
const KERNEL: &str = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry test(\
    .param .align 128 .b8 a_map[128], .param .align 128 .b8 b_map[128], \
    .param .align 128 .b8 scales_map[128], .param .u64 out)\n{\n\
    .reg .pred %p<8>;\n.reg .b32 %r<48>;\n.reg .b64 %rd<16>;\n\
    .shared .align 1024 .b8 tile[19456];\n.shared .align 8 .b8 barriers[16];\n\
    .shared .align 4 .b8 place[4];\nld.param.u64 %rd1, [out];\nmov.u32 %r1, %tid.x;\n\
    mov.u64 %rd2, tile;\ncvt.u32.u64 %r2, %rd2;\nadd.s32 %r3, %r2, 16384;\nadd.s32 %r13, %r2, 18432;\n\
    mov.u64 %rd3, barriers;\ncvt.u32.u64 %r4, %rd3;\nmov.u64 %rd4, place;\ncvt.u32.u64 %r7, %rd4;\n\
    mov.u32 %r5, 0;\nshr.u32 %r8, %r1, 5;\nsetp.ne.u32 %p0, %r8, 0;\n@%p0 bra READY;\n\
    elect.sync _|%p1, -1;\n@%p1 mbarrier.init.shared::cta.b64 [%r4], 1;\n\
    @%p1 mbarrier.init.shared::cta.b64 [%r4+8], 1;\nfence.mbarrier_init.release.cluster;\n\
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 32;\n\
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\nREADY:\nbar.sync 0;\n\
    ld.shared.b32 %r9, [%r7];\n@%p0 bra WAIT;\nelect.sync _|%p1, -1;\n@!%p1 bra WAIT;\n\
    mov.b64 %rd4, a_map;\ncvta.param.u64 %rd4, %rd4;\nmov.b64 %rd5, b_map;\ncvta.param.u64 %rd5, %rd5;\n\
    mov.b64 %rd10, scales_map;\ncvta.param.u64 %rd10, %rd10;\n\
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 19456;\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd4, {%r5, %r5}], \
    [%r4];\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd5, {%r5, %r5}], \
    [%r4];\n\
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r13], [%rd10, {%r5, %r5}], \
    [%r4];\nFULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;\n@!%p2 bra FULL;\n\
    shr.u32 %r6, %r2, 4;\nshr.u32 %r10, %r3, 4;\ncvt.u64.u32 %rd6, %r6;\ncvt.u64.u32 %rd7, %r10;\n\
    or.b64 %rd6, %rd6, 0x4000404000010000;\nor.b64 %rd7, %rd7, 0x4000404000010000;\n\
    shr.u32 %r14, %r13, 4;\ncvt.u64.u32 %rd11, %r14;\nor.b64 %rd11, %rd11, 0x0000400800000000;\n\
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r9+16], %rd11;\nadd.s64 %rd11, %rd11, 32;\n\
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r9+20], %rd11;\n\
    add.s32 %r15, %r9, 16;\nadd.s32 %r16, %r9, 20;\nmov.u32 %r11, FIRST;\nsetp.ne.u32 %p3, 0, 0;\n\
    tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [%r9], %rd6, %rd7, %r11, [%r15], [%r16], %p3;\n\
    setp.eq.u32 %p3, 0, 0;\nadd.s64 %rd6, %rd6, 4;\nadd.s64 %rd7, %rd7, 4;\nmov.u32 %r11, THIRD;\n\
    tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r9], %rd6, %rd7, %r11, [%r15], [%r16], %p3;\n\
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+8];\nWAIT:\n\
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4+8], 0;\n@!%p4 bra WAIT;\n\
    tcgen05.fence::after_thread_sync;\nshl.b32 %r12, %r8, 21;\nadd.s32 %r12, %r12, %r9;\n\
    mul.wide.u32 %rd8, %r1, 64;\nadd.s64 %rd9, %rd1, %rd8;\n\
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {%r20, %r21, %r22, %r23, %r24, %r25, %r26, \
    %r27, %r28, %r29, %r30, %r31, %r32, %r33, %r34, %r35}, [%r12];\n\
    tcgen05.wait::ld.sync.aligned;\nst.global.v4.b32 [%rd9], {%r20, %r21, %r22, %r23};\n\
    st.global.v4.b32 [%rd9+16], {%r24, %r25, %r26, %r27};\n\
    st.global.v4.b32 [%rd9+32], {%r28, %r29, %r30, %r31};\n\
    st.global.v4.b32 [%rd9+48], {%r32, %r33, %r34, %r35};\n\
    tcgen05.fence::before_thread_sync;\nbar.sync 0;\n@%p0 bra END;\n\
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32;\nEND:\nret;\n}\n";

/// The instruction descriptor of e4m3, 128 by 16, scales in ue8m0: those of byte `a` and of byte `b`.
const fn descriptor(a: u32, b: u32) -> u32 {
    (16 / 8) << 17 | 1 << 23 | (128 / 16) << 24 | b << 4 | a << 29
}

/// The code of a power of two in e4m3, and what it stands for.
fn element(row: usize, k: usize, salt: usize) -> (u8, f32) {
    let exponent = (row * 5 + k * 3 + salt) % 4;
    ((exponent as u8 + 7) << 3, 2.0_f32.powi(exponent as i32))
}

/// The exponent of the scale of a row and of 32 of k.
fn exponent(row: usize, block: usize, salt: usize) -> i32 {
    ((row * 7 + block * 3 + salt) % 5) as i32 - 2
}

/// A block of scales: those of row r and block q at byte 16 (r mod 32) + 4 (r / 32) + q.
fn scales(rows: usize, code: impl Fn(usize, usize) -> u8) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    for row in 0..rows {
        for block in 0..4 {
            bytes[row % 32 * 16 + row / 32 * 4 + block] = code(row, block);
        }
    }
    bytes
}

/// Scales of both operands in ue8m0.
fn powers() -> Vec<u8> {
    let of = |salt| move |row, block| (exponent(row, block, salt) + 127) as u8;
    [scales(128, of(3)), scales(16, of(4))].concat()
}

/// Rows of both operands, of 128 bytes, and their scales.
struct Operands {
    a: Vec<u8>,
    b: Vec<u8>,
    scales: Vec<u8>,
}

impl Operands {
    fn new(of: impl Fn(usize, usize, usize) -> u8, scales: Vec<u8>) -> Self {
        let matrix = |rows: usize, salt| -> Vec<u8> {
            (0..rows * 128).map(|at| of(at / 128, at % 128, salt)).collect()
        };
        Self { a: matrix(128, 1), b: matrix(16, 2), scales }
    }

    fn in_8_bits() -> Self {
        Self::new(|row, k, salt| element(row, k, salt).0, powers())
    }
}

/// A sum with scales of A and B of those blocks for the first and for the third 32 of k.
fn expected(row: usize, column: usize, blocks: [[usize; 2]; 2]) -> f32 {
    let part = |first: usize, [a, b]: [usize; 2]| {
        let term = |k| element(row, k, 1).1 * element(column, k, 2).1;
        let scale = exponent(row, a, 3) + exponent(column, b, 4);
        (first..first + 32).map(term).sum::<f32>() * 2.0_f32.powi(scale)
    };
    part(0, blocks[0]) + part(64, blocks[1])
}

fn run(kernel: &str, operands: &Operands, schedule: Schedule) -> Result<Vec<f32>, SimulatorError> {
    let program = Program::parse(kernel)?;
    let mut device = Device::new();
    let mut tensor = |bytes: &[u8], element_bytes, shape: [u64; 2], swizzle| {
        let address = device.allocate(bytes.len() as u64);
        device.write(address, bytes).unwrap();
        Argument::TensorMap(TensorMap {
            address,
            element_bytes,
            shape: shape.to_vec(),
            strides: vec![shape[0] * element_bytes],
            taken: CopyBox::Tile(shape.map(|size| size as u32).to_vec()),
            swizzle,
        })
    };
    let a = tensor(&operands.a, 1, [128, 128], Swizzle::Bytes128);
    let b = tensor(&operands.b, 1, [128, 16], Swizzle::Bytes128);
    let scales = tensor(&operands.scales, 4, [128, 2], Swizzle::None);
    let out = device.allocate(128 * 64);
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [128, 1, 1],
        dynamic_shared: 0,
        arguments: vec![a, b, scales, Argument::address(out)],
        reach: None,
    };
    device.launch(&program, &launch, &Options { schedule, ..Options::default() })?;
    let (bytes, _) = device.read(out, 128 * 64).unwrap();
    let word = |word: &[u8]| f32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    Ok(bytes.chunks_exact(4).map(word).collect())
}

fn kernel(first: [u32; 2], third: [u32; 2]) -> String {
    let text = |[a, b]: [u32; 2]| descriptor(a, b).to_string();
    KERNEL.replace("FIRST", &text(first)).replace("THIRD", &text(third))
}

#[test]
fn rows_and_columns_are_scaled_by_the_bytes_that_the_descriptor_selects() {
    for (first, third) in [([0, 0], [2, 2]), ([1, 3], [0, 2])] {
        let blocks = [first, third].map(|bytes| bytes.map(|byte| byte as usize));
        for schedule in Schedule::several(8) {
            let sums = run(&kernel(first, third), &Operands::in_8_bits(), schedule)
                .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
            for (at, sum) in sums.iter().enumerate() {
                let (row, column) = (at / 16, at % 16);
                assert_eq!(*sum, expected(row, column, blocks), "row {row}, column {column}");
            }
        }
    }
}

/// What the codes of e2m1 without a sign stand for.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The code of an element in 4 bits.
fn code(row: usize, k: usize, salt: usize) -> u8 {
    ((row * 5 + k * 3 + k / 16 + salt) % 16) as u8
}

/// The code of a scale in ue4m3, from a quarter to 7.5.
fn ue4m3(row: usize, block: usize, salt: usize) -> u8 {
    ((row * 11 + block * 7 + salt) % 40 + 40) as u8
}

fn ue4m3_value(code: u8) -> f32 {
    2.0_f32.powi(i32::from(code >> 3) - 7) * (1.0 + f32::from(code & 7) / 8.0)
}

/// As [`kernel`], of elements in 4 bits with that kind and those scales.
fn fp4_kernel(first: &str, third: &str, what: [u32; 2]) -> String {
    let one = "kind::mxf8f6f4.block_scale.scale_vec::1X";
    let other = "kind::mxf8f6f4.block_scale.block32";
    assert!(KERNEL.contains(one) && KERNEL.contains(other));
    KERNEL
        .replace(one, first)
        .replace(other, third)
        .replace("FIRST", &what[0].to_string())
        .replace("THIRD", &what[1].to_string())
}

/// A sum of the first and of the third 64 elements of k, whose blocks are scaled so.
fn fp4_sum(row: usize, column: usize, blocks: [&[f32]; 2]) -> f32 {
    let value = |code: u8| match code {
        0..8 => E2M1[usize::from(code)],
        code => -E2M1[usize::from(code - 8)],
    };
    let part = |first: usize, scales: &[f32]| -> f32 {
        let depth = 64 / scales.len();
        let term = |k| value(code(row, k, 1)) * value(code(column, k, 2));
        let block = |(at, scale): (usize, &f32)| {
            let first = first + at * depth;
            (first..first + depth).map(term).sum::<f32>() * scale
        };
        scales.iter().enumerate().map(block).sum()
    };
    part(0, blocks[0]) + part(128, blocks[1])
}

/// e2m1 by e2m1, 128 by 16: types at 7 and 10, N / 8 at 17, M / 128 at 27.
const FP4: u32 = 1 << 7 | 1 << 10 | (16 / 8) << 17 | 1 << 27;

fn in_4_bits(scales: Vec<u8>) -> Operands {
    Operands::new(|row, k, salt| code(row, 2 * k, salt) | code(row, 2 * k + 1, salt) << 4, scales)
}

#[test]
fn all_bytes_of_a_word_scale_16_elements_of_4_bits_each() {
    let of = |salt| move |row, block| ue4m3(row, block, salt);
    let operands = in_4_bits([scales(128, of(3)), scales(16, of(4))].concat());
    let [first, third] =
        ["scale_vec::4X", "block16"].map(|vector| format!("kind::mxf4nvf4.block_scale.{vector}"));
    let kernel = fp4_kernel(&first, &third, [FP4; 2]);
    for schedule in Schedule::several(8) {
        let sums = run(&kernel, &operands, schedule)
            .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        for (at, sum) in sums.iter().enumerate() {
            let (row, column) = (at / 16, at % 16);
            let scales = [0, 1, 2, 3].map(|block| {
                ue4m3_value(ue4m3(row, block, 3)) * ue4m3_value(ue4m3(column, block, 4))
            });
            assert_eq!(*sum, fp4_sum(row, column, [&scales; 2]), "row {row}, column {column}");
        }
    }
    let (kind, reason) =
        fault(&fp4_kernel(&first, &third, [FP4, FP4 | 2 << 4]), &operands).unwrap();
    assert!(kind == FaultKind::Misuse && reason.contains("groups of 4"), "{reason}");
    let signed = [scales(128, of(3)), scales(16, |_, _| 0xb8)].concat();
    let (kind, reason) = fault(&kernel, &in_4_bits(signed)).unwrap();
    assert!(kind == FaultKind::Misuse && reason.contains("sign set"), "{reason}");
}

#[test]
fn two_bytes_of_a_word_scale_32_elements_of_4_bits_each() {
    let operands = in_4_bits(powers());
    let first = "kind::mxf4.block_scale";
    let third = "kind::mxf4nvf4.block_scale.scale_vec::2X";
    // The third part takes the second half of A's words, and the first of B's.
    let what = [FP4 | 1 << 23, FP4 | 1 << 23 | 2 << 29];
    let kernel = fp4_kernel(first, third, what);
    for schedule in Schedule::several(8) {
        let sums = run(&kernel, &operands, schedule)
            .unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
        for (at, sum) in sums.iter().enumerate() {
            let (row, column) = (at / 16, at % 16);
            let scales = |byte: usize| {
                [0, 1].map(|block| {
                    let scale = exponent(row, byte + block, 3) + exponent(column, block, 4);
                    2.0_f32.powi(scale)
                })
            };
            let expected = fp4_sum(row, column, [&scales(0), &scales(2)]);
            assert_eq!(*sum, expected, "row {row}, column {column}");
        }
    }
    let (kind, reason) = fault(&fp4_kernel(first, third, [FP4; 2]), &operands).unwrap();
    assert!(kind == FaultKind::Misuse && reason.contains("ue8m0"), "{reason}");
}

/// What the first of some schedules says that says anything.
fn fault(kernel: &str, operands: &Operands) -> Option<(FaultKind, String)> {
    Schedule::several(6).find_map(|schedule| match run(kernel, operands, schedule) {
        Err(SimulatorError::Fault(fault)) => Some((fault.kind, fault.reason)),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    })
}

#[test]
fn scales_that_are_not_there_and_copies_that_are_wrong_are_noticed() {
    use FaultKind::{Misuse, OutOfBounds, Race, Uninitialized, Unsupported};
    let copy = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r9+20], %rd11;\n";
    let wait = "FULL:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 0;\n@!%p2 bra FULL;\n";
    let whole = kernel([0, 0], [2, 2]);
    let first = descriptor(0, 0).to_string();
    let other = (descriptor(0, 0) ^ 1 << 23).to_string();
    for (from, to, kind, reason) in [
        (copy, "", Uninitialized, ""),
        (copy, "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r9+30], %rd11;\n", OutOfBounds, "30..34"),
        (
            copy,
            "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r9+65556], %rd11;\n",
            Misuse,
            "scales begin",
        ),
        ("add.s32 %r16, %r9, 20;", "add.s32 %r16, %r9, 32;", OutOfBounds, "32..33"),
        ("0x0000400800000000", "0x4000400800000000", Unsupported, "permuted"),
        ("0x0000400800000000", "0x0000000800000000", Misuse, "no version 1"),
        (first.as_str(), other.as_str(), Misuse, "ue8m0"),
        (wait, "FULL:\n", Race, ""),
    ] {
        assert!(whole.contains(from), "{from}");
        let (found, told) = fault(&whole.replacen(from, to, 1), &Operands::in_8_bits())
            .unwrap_or_else(|| panic!("{from}"));
        assert!(found == kind && told.contains(reason), "{from}: {found:?}: {told}");
    }
}

#[test]
fn scales_that_a_warp_wrote_to_its_lanes_alone_are_noticed() {
    // The first warp writes over its quarter of A's scales, and has another product made of them.
    let again = "@%p0 bra END;\ntcgen05.fence::after_thread_sync;\n\
        tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12+16], {%r1};\ntcgen05.wait::st.sync.aligned;\n\
        elect.sync _|%p1, -1;\n@!%p1 bra AGAIN;\n\
        tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r9], %rd6, %rd7, %r11, [%r15], [%r16], %p3;\n\
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];\nAGAIN:\n\
        mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r4], 1;\n@!%p4 bra AGAIN;\n";
    let kernel = kernel([0, 0], [2, 2]).replace("@%p0 bra END;\n", again);
    let (kind, reason) = fault(&kernel, &Operands::in_8_bits()).unwrap();
    assert_eq!(kind, FaultKind::Misuse, "{reason}");
    assert!(reason.contains("differ between the quarters of its lanes"), "{reason}");
}
