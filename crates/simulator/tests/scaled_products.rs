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

/// Runs a product whose scales are selected so, and gives the sums of each lane.
fn product(selectors: &str) -> Result<Vec<f32>, SimulatorError> {
    let ptx = format!(
        ".version 8.7\n.target sm_120a\n.address_size 64\n.visible .entry test(.param .u64 out, \
         .param .u64 in)\n{{\n.reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<8>;\n\
         ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd3, %r1, 32;\nadd.s64 %rd4, %rd2, %rd3;\n\
         ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%rd4];\n\
         ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd4+16];\nmov.f32 %f1, 0f3F800000;\n\
         mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 \
         {{%f2, %f3, %f4, %f5}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, {{%f1, %f1, %f1, %f1}}, \
         {selectors};\nmul.wide.u32 %rd5, %r1, 16;\nadd.s64 %rd6, %rd1, %rd5;\n\
         st.global.v4.f32 [%rd6], {{%f2, %f3, %f4, %f5}};\nret;\n}}\n"
    );
    let program = Program::parse(&ptx)?;
    // "Matrix Fragments for mma.m16n8k32": element i of a lane, by its group and its place in the group.
    let mut words = Vec::new();
    for lane in 0..32 {
        let (group, place) = (lane / 4, lane % 4);
        for register in 0..4 {
            let row = group + 8 * (register % 2);
            let k = 4 * place + 16 * (register / 2);
            words.push(word([0, 1, 2, 3].map(|i| e4m3(lhs(row, k + i)))));
        }
        for register in 0..2 {
            let k = 4 * place + 16 * register;
            words.push(word([0, 1, 2, 3].map(|i| e4m3(rhs(k + i, group)))));
        }
        words.extend([word(exponents(lane, 1)), word(exponents(lane, 4))]);
    }
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
