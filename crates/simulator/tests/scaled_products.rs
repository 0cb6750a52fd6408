//! Products whose blocks of k are scaled, on whole numbers and powers of two.

use blackburn_simulator::{Argument, Device, Launch, Options, Program, SimulatorError};

/// Bits of a whole number up to 8 in e4m3.
fn e4m3(value: usize) -> u32 {
    if value == 0 {
        return 0;
    }
    let exponent = value.ilog2();
    (exponent + 7) << 3 | (value as u32) << 3 >> exponent & 7
}

fn lhs(row: usize, k: usize) -> usize {
    (row * 5 + k * 3 + 1) % 9
}

fn rhs(k: usize, column: usize) -> usize {
    (k * 7 + column * 2 + 2) % 9
}

/// The exponents of the scales of a register, which differ for each lane and byte.
fn exponents(lane: usize, salt: usize) -> [u32; 4] {
    [0, 1, 2, 3].map(|byte| ((lane * 3 + byte * 5 + salt) % 11) as u32 + 122)
}

fn word(bytes: [u32; 4]) -> u32 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | byte)
}

const FP8: &str = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0";

/// Runs an instruction whose scales are selected so on ones for sums, with the words of each lane: four of the left
/// operand, two of the right one, and the scales of both. Gives the sums of each lane.
fn run(opcode: &str, selectors: &str, words: &[u32]) -> Result<Vec<f32>, SimulatorError> {
    let ptx = format!(
        ".version 8.7\n.target sm_120a\n.address_size 64\n.visible .entry test(.param .u64 out, \
         .param .u64 in)\n{{\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<8>;\n\
         ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd3, %r1, 32;\nadd.s64 %rd4, %rd2, %rd3;\n\
         ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd4];\n\
         ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd4+16];\nmov.f32 %f1, 0f3F800000;\n\
         {opcode} {{%f2, %f3, %f4, %f5}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, \
         {{%f1, %f1, %f1, %f1}}, {selectors};\nmul.wide.u32 %rd5, %r1, 16;\nadd.s64 %rd6, %rd1, %rd5;\n\
         st.global.v4.f32 [%rd6], {{%f2, %f3, %f4, %f5}};\nret;\n}}\n"
    );
    let program = Program::parse(&ptx)?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut device = Device::new();
    let (out, given) = (device.allocate(512), device.allocate(1024));
    device.write(given, &bytes).unwrap();
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::address(out), Argument::address(given)],
        reach: None,
    };
    device.launch(&program, &launch, &Options::default())?;
    let sums = device.read(out, 512).unwrap().0;
    Ok(sums.chunks_exact(4).map(|f| f32::from_le_bytes([f[0], f[1], f[2], f[3]])).collect())
}

/// The words of each lane: registers of elements by row or column and first k, of `in_word` elements each, and scales.
/// "Matrix Fragments" of `mma.m16n8k32` and of `mma.m16n8k64`: a lane's group and its place in the group.
fn words(
    in_word: usize,
    lhs: impl Fn(usize, usize) -> u32,
    rhs: impl Fn(usize, usize) -> u32,
    scales: impl Fn(usize) -> [u32; 2],
) -> Vec<u32> {
    let mut words = Vec::new();
    for lane in 0..32 {
        let (group, place) = (lane / 4, lane % 4);
        for register in 0..4 {
            let k = in_word * (place + 4 * (register / 2));
            words.push(lhs(group + 8 * (register % 2), k));
        }
        for register in 0..2 {
            words.push(rhs(in_word * (place + 4 * register), group));
        }
        words.extend(scales(lane));
    }
    words
}

fn product(selectors: &str) -> Result<Vec<f32>, SimulatorError> {
    let words = words(
        4,
        |row, k| word([0, 1, 2, 3].map(|i| e4m3(lhs(row, k + i)))),
        |k, column| word([0, 1, 2, 3].map(|i| e4m3(rhs(k + i, column)))),
        |lane| [word(exponents(lane, 1)), word(exponents(lane, 4))],
    );
    run(FP8, selectors, &words)
}

/// What the codes of e2m1 without a sign stand for.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The code of an element in 4 bits, and what it stands for.
fn e2m1(row: usize, k: usize, salt: usize) -> (u32, f32) {
    let code = (row * 5 + k * 3 + k / 16 + salt) % 16;
    (code as u32, if code < 8 { E2M1[code] } else { -E2M1[code - 8] })
}

/// The codes of the scales of a register in ue4m3, from a quarter to 7.5, and what they stand for.
fn ue4m3(lane: usize, salt: usize) -> [(u32, f32); 4] {
    [0, 1, 2, 3].map(|byte| {
        let code = (lane * 11 + byte * 7 + salt) % 40;
        let (exponent, mantissa) = (code as i32 / 8 - 2, code % 8);
        (code as u32 + 5 * 8, 2.0_f32.powi(exponent) * (1.0 + mantissa as f32 / 8.0))
    })
}

fn fp4_words(scales: impl Fn(usize) -> [u32; 2]) -> Vec<u32> {
    let of = |row: usize, k: usize, salt| {
        (0..8).map(|i| e2m1(row, k + i, salt).0 << (4 * i)).sum::<u32>()
    };
    words(8, |row, k| of(row, k, 1), |k, column| of(column, k, 6), scales)
}

/// A sum, whose blocks of k are scaled so.
fn fp4_sum(row: usize, column: usize, scales: &[f32]) -> f32 {
    let depth = 64 / scales.len();
    let term = |k| e2m1(row, k, 1).1 * e2m1(column, k, 6).1;
    let block = |(at, scale): (usize, &f32)| {
        (depth * at..depth * at + depth).map(term).sum::<f32>() * scale
    };
    1.0 + scales.iter().enumerate().map(block).sum::<f32>()
}

fn places() -> impl Iterator<Item = [usize; 4]> {
    (0..32).flat_map(|lane| {
        (0..4).map(move |i| [lane, i, lane / 4 + if i < 2 { 0 } else { 8 }, lane % 4 * 2 + i % 2])
    })
}

#[test]
fn all_bytes_scale_16_elements_of_4_bits_each() {
    let opcode = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3";
    let codes = |lane, salt| word(ue4m3(lane, salt).map(|scale| scale.0));
    for [thread_a, thread_b] in [[0, 0], [1, 3], [0, 2]] {
        let selectors = format!("%r8, {{0, {thread_a}}}, {{%r9}}, {{0, {thread_b}}}");
        let words = fp4_words(|lane| [codes(lane, 1), codes(lane, 20)]);
        let sums = run(opcode, &selectors, &words).unwrap();
        for [lane, i, row, column] in places() {
            let of_row = ue4m3(row % 8 * 4 + 2 * thread_a + row / 8, 1);
            let of_column = ue4m3(4 * column + thread_b, 20);
            let scales = [0, 1, 2, 3].map(|block| of_row[block].1 * of_column[block].1);
            let expected = fp4_sum(row, column, &scales);
            assert_eq!(sums[4 * lane + i], expected, "{selectors}: lane {lane}, register {i}");
        }
    }
    let reason =
        |selectors: &str, words: &[u32]| run(opcode, selectors, words).unwrap_err().to_string();
    let words = fp4_words(|lane| [codes(lane, 1), codes(lane, 20)]);
    assert!(reason("%r8, {1, 0}, %r9, {0, 0}", &words).contains("a byte up to 0"));
    let signed = fp4_words(|lane| [codes(lane, 1), 0x3838_b838]);
    assert!(reason("%r8, {0, 0}, %r9, {0, 0}", &signed).contains("has its sign set"));
}

#[test]
fn two_bytes_scale_32_elements_of_4_bits_each() {
    for kind in
        ["mxf4.block_scale", "mxf4.block_scale.scale_vec::2X", "mxf4nvf4.block_scale.scale_vec::2X"]
    {
        let opcode =
            format!("mma.sync.aligned.m16n8k64.row.col.kind::{kind}.f32.e2m1.e2m1.f32.ue8m0");
        for [byte_a, thread_a, byte_b, thread_b] in [[0, 0, 0, 0], [2, 1, 0, 3], [0, 0, 2, 1]] {
            let selectors = format!("%r8, {{{byte_a}, {thread_a}}}, %r9, {{{byte_b}, {thread_b}}}");
            let words = fp4_words(|lane| [word(exponents(lane, 1)), word(exponents(lane, 4))]);
            let sums = run(&opcode, &selectors, &words).unwrap();
            for [lane, i, row, column] in places() {
                let of_row = exponents(row % 8 * 4 + 2 * thread_a + row / 8, 1);
                let of_column = exponents(4 * column + thread_b, 4);
                let scales = [0, 1].map(|block| {
                    let exponent = of_row[byte_a + block] + of_column[byte_b + block];
                    2.0_f32.powi(exponent as i32 - 254)
                });
                let expected = fp4_sum(row, column, &scales);
                assert_eq!(sums[4 * lane + i], expected, "{selectors}: lane {lane}, register {i}");
            }
        }
    }
}

#[test]
fn products_that_no_kind_has_are_refused() {
    let words = fp4_words(|_| [0x3838_3838; 2]);
    for opcode in [
        // Scales of blocks of 32 are powers of two, and elements of 8 bits have one scale.
        "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3",
        "m16n8k64.row.col.kind::mxf4nvf4.block_scale.f32.e2m1.e2m1.f32.ue4m3",
        "m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::2X.f32.e4m3.e4m3.f32.ue8m0",
        "m16n8k32.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e4m3.e4m3.f32.ue4m3",
        "m16n8k64.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e2m1.f32.ue8m0",
        "m16n8k64.row.col.f32.e2m1.e2m1.f32",
    ] {
        let refused =
            run(&format!("mma.sync.aligned.{opcode}"), "%r8, {0, 0}, %r9, {0, 0}", &words);
        assert!(matches!(refused, Err(SimulatorError::Parse(_))), "{opcode}: {refused:?}");
    }
}

#[test]
fn a_warp_scales_rows_and_columns_by_what_the_selected_lanes_hold() {
    for [byte_a, thread_a, byte_b, thread_b] in
        [[0, 0, 0, 0], [1, 0, 3, 2], [2, 1, 1, 3], [3, 1, 2, 1]]
    {
        let selectors = format!("%r8, {{{byte_a}, {thread_a}}}, {{%r9}}, {{{byte_b}, {thread_b}}}");
        let sums = product(&selectors).unwrap();
        for lane in 0..32 {
            for i in 0..4 {
                let row = lane / 4 + if i < 2 { 0 } else { 8 };
                let column = lane % 4 * 2 + i % 2;
                let dot: usize = (0..32).map(|k| lhs(row, k) * rhs(k, column)).sum();
                // "Block Scaling for mma.sync": rows are scaled by a pair of four lanes, columns by one of them.
                let of_row = exponents(row % 8 * 4 + 2 * thread_a + row / 8, 1)[byte_a];
                let of_column = exponents(4 * column + thread_b, 4)[byte_b];
                let scale = 2.0_f32.powi(of_row as i32 + of_column as i32 - 254);
                let expected = 1.0 + dot as f32 * scale;
                assert_eq!(sums[4 * lane + i], expected, "{selectors}: lane {lane}, register {i}");
            }
        }
    }
}

#[test]
fn a_scale_that_nothing_selects_and_operands_that_are_not_scaled_are_refused() {
    let reason = |selectors: &str| product(selectors).unwrap_err().to_string();
    for selectors in ["%r8, {4, 0}, %r9, {0, 0}", "%r8, {0, 2}, %r9, {0, 0}"] {
        assert!(reason(selectors).contains("a thread up to 1"), "{}", reason(selectors));
    }
    assert!(reason("%r8, {0, 0}, %r9, {0, 4}").contains("a thread up to 3"));
    assert!(reason("%r8, {%r1, 0}, %r9, {0, 0}").contains("written as numbers"));
    assert!(reason("{%r8, %r9}, {0, 0}, %r9, {0, 0}").contains("one register of scales"));
    assert!(reason("%r8, {0, 0}").contains("operand"));
}
