//! Each group of instructions, run in small kernels and compared with values worked out by hand or by `half`.

use blackburn_simulator::{
    Approximations, Argument, Device, FaultKind, Landing, Launch, Options, Program, Schedule,
    SimulatorError,
};

/// A kernel around `body`, whose parameter is the address of its output in `%rd1` and of its input in `%rd2`;
/// `%r1` is the thread's number, `%rd3` and `%rd4` its words of both.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.7\n.target sm_90a\n.address_size 64\n\
         .visible .entry test(.param .u64 out, .param .u64 in)\n{{\n\
         .reg .pred %p<8>;\n.reg .b16 %h<16>;\n.reg .b32 %r<32>;\n.reg .f32 %f<32>;\n\
         .reg .b64 %rd<32>;\n.reg .f64 %d<8>;\n.shared .align 1024 .b8 tile[16384];\n\
         ld.param.u64 %rd1, [out];\nld.param.u64 %rd2, [in];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %rd5, %r1, 4;\nadd.s64 %rd3, %rd1, %rd5;\nadd.s64 %rd4, %rd2, %rd5;\n\
         {body}\nret;\n}}\n"
    )
}

/// Runs it in a block of `threads` on `input`, and gives `words` words of output.
fn run(
    body: &str,
    threads: u32,
    input: &[u32],
    words: usize,
    schedule: Schedule,
) -> Result<Vec<u32>, SimulatorError> {
    let program = Program::parse(&kernel(body))?;
    let mut device = Device::new();
    let out = device.allocate(4 * words.max(1) as u64);
    let given = device.allocate(4 * input.len().max(1) as u64);
    let bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    device.write(given, &bytes).unwrap();
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [threads, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::address(out), Argument::address(given)],
        reach: None,
    };
    let options = Options { schedule, ..Options::default() };
    device.launch(&program, &launch, &options)?;
    let (bytes, _) = device.read(out, 4 * words).unwrap();
    Ok(bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect())
}

fn at_once(body: &str, threads: u32, input: &[u32], words: usize) -> Vec<u32> {
    run(body, threads, input, words, Schedule { seed: 1, landing: Landing::Earliest })
        .unwrap_or_else(|error| panic!("{error}"))
}

/// The kind of fault that some schedule shows.
fn fault(body: &str, threads: u32, input: &[u32]) -> Option<FaultKind> {
    Schedule::several(4).find_map(|schedule| match run(body, threads, input, 64, schedule) {
        Err(SimulatorError::Fault(fault)) => Some(fault.kind),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    })
}

/// One word of output from one instruction on words of the input, `%r2` to `%r4`, into `%r5`.
fn one(instruction: &str, input: [u32; 3]) -> u32 {
    let body = format!(
        "ld.global.u32 %r2, [%rd2];\nld.global.u32 %r3, [%rd2+4];\nld.global.u32 %r4, [%rd2+8];\n\
         mov.b32 %f2, %r2;\nmov.b32 %f3, %r3;\nmov.b32 %f4, %r4;\n{instruction}\n\
         st.global.u32 [%rd1], %r5;"
    );
    at_once(&body, 1, &input, 1)[0]
}

fn float(instruction: &str, input: [f32; 3]) -> f32 {
    f32::from_bits(one(&format!("{instruction}\nmov.b32 %r5, %f5;"), input.map(f32::to_bits)))
}

#[test]
fn integers_wrap_shift_and_divide() {
    for (instruction, input, expected) in [
        ("add.s32 %r5, %r2, %r3;", [u32::MAX, 2, 0], 1),
        ("sub.u32 %r5, %r2, 3;", [1, 0, 0], -2_i32 as u32),
        ("mad.lo.s32 %r5, %r2, %r3, %r4;", [0x1_0001, 0x1_0001, 5], 0x2_0006),
        ("mul.hi.u32 %r5, %r2, %r3;", [u32::MAX, u32::MAX, 0], 0xffff_fffe),
        ("mul.hi.s32 %r5, %r2, %r3;", [u32::MAX, 2, 0], u32::MAX),
        ("div.s32 %r5, %r2, %r3;", [-7_i32 as u32, 2, 0], -3_i32 as u32),
        ("rem.s32 %r5, %r2, %r3;", [-7_i32 as u32, 2, 0], -1_i32 as u32),
        ("min.s32 %r5, %r2, %r3;", [-7_i32 as u32, 2, 0], -7_i32 as u32),
        ("max.u32 %r5, %r2, %r3;", [-7_i32 as u32, 2, 0], -7_i32 as u32),
        ("shl.b32 %r5, %r2, %r3;", [1, 32, 0], 0),
        ("shr.u32 %r5, %r2, 28;", [0x8000_0000, 0, 0], 8),
        ("shr.s32 %r5, %r2, 40;", [0x8000_0000, 0, 0], u32::MAX),
        ("xor.b32 %r5, %r2, -1;", [5, 0, 0], !5),
        ("bfi.b32 %r5, %r2, %r3, 3, 29;", [0x1234, 7, 0], 0x91a7),
        ("bfe.u32 %r5, %r2, 4, 8;", [0xabcd, 0, 0], 0xbc),
        ("prmt.b32 %r5, %r2, %r3, 0x5410;", [0xaaaa_1111, 0xbbbb_2222, 0], 0x2222_1111),
        ("popc.b32 %r5, %r2;", [0xf0f0, 0, 0], 8),
        ("clz.b32 %r5, %r2;", [1, 0, 0], 31),
        ("setp.lt.s32 %p1, %r2, %r3; selp.u32 %r5, 1, 2, %p1;", [u32::MAX, 0, 0], 1),
        ("setp.lt.u32 %p1, %r2, %r3; selp.u32 %r5, 1, 2, %p1;", [u32::MAX, 0, 0], 2),
        ("mul.wide.s32 %rd9, %r2, %r3; cvt.u32.u64 %r5, %rd9;", [u32::MAX, 3, 0], -3_i32 as u32),
    ] {
        assert_eq!(one(instruction, input), expected, "{instruction}");
    }
}

#[test]
fn floats_are_rounded_as_the_instruction_says() {
    let third = 1.0_f32 / 3.0;
    assert_eq!(float("div.rn.f32 %f5, %f2, %f3;", [1.0, 3.0, 0.0]), third);
    let product = f64::from(third) * 3.0;
    let [down, up] = ["fma.rm.f32", "fma.rp.f32"]
        .map(|name| float(&format!("{name} %f5, %f2, %f3, %f4;"), [third, 3.0, 0.0]));
    assert!(f64::from(down) <= product && product <= f64::from(up) && down < up);
    // A fused product is rounded once.
    let x = 1.0 + f32::EPSILON;
    assert_eq!(float("fma.rn.f32 %f5, %f2, %f2, %f3;", [x, -1.0, 0.0]), x.mul_add(x, -1.0));
    assert_eq!(float("fma.rn.sat.f32 %f5, %f2, %f3, %f4;", [2.0, 3.0, 0.0]), 1.0);
    assert_eq!(float("mul.ftz.f32 %f5, %f2, %f3;", [1e-30, 1e-10, 0.0]), 0.0);
    assert_eq!(float("mul.f32 %f5, %f2, %f3;", [1e-30, 1e-10, 0.0]), 1e-30 * 1e-10);
    assert_eq!(float("min.f32 %f5, %f2, %f3;", [f32::NAN, 2.0, 0.0]), 2.0);
    assert!(float("min.NaN.f32 %f5, %f2, %f3;", [f32::NAN, 2.0, 0.0]).is_nan());
    assert_eq!(float("max.f32 %f5, %f2, %f3;", [-0.0, 0.0, 0.0]).to_bits(), 0);
    assert_eq!(float("copysign.f32 %f5, %f2, %f3;", [-1.0, 3.0, 0.0]), -3.0);
    assert_eq!(float("set.le.f32.f32 %f5, %f2, %f3;", [1.0, 1.0, 0.0]), 1.0);
}

#[test]
fn approximations_are_exact_where_the_result_is_a_float() {
    assert_eq!(float("ex2.approx.ftz.f32 %f5, %f2;", [-7.0, 0.0, 0.0]), 2.0_f32.powi(-7));
    assert_eq!(float("ex2.approx.ftz.f32 %f5, %f2;", [-127.0, 0.0, 0.0]), 0.0);
    assert_eq!(float("rsqrt.approx.f32 %f5, %f2;", [16.0, 0.0, 0.0]), 0.25);
    assert_eq!(float("rcp.approx.ftz.f32 %f5, %f2;", [8.0, 0.0, 0.0]), 0.125);
    assert_eq!(float("sqrt.approx.f32 %f5, %f2;", [49.0, 0.0, 0.0]), 7.0);
    assert_eq!(float("lg2.approx.f32 %f5, %f2;", [1024.0, 0.0, 0.0]), 10.0);
    assert_eq!(float("div.approx.f32 %f5, %f2, %f3;", [1.0, 2.0_f32.powi(127), 0.0]), 0.0);
    // PTX allows 2^-10.987 of relative error.
    let tanh = float("tanh.approx.f32 %f5, %f2;", [0.5, 0.0, 0.0]);
    assert!((tanh / 0.5_f32.tanh() - 1.0).abs() < 2.0_f32.powf(-10.987));
}

#[test]
fn approximations_that_a_device_gave_are_taken_and_others_asked_for() {
    let body = kernel(
        "ld.global.f32 %f1, [%rd4];\nex2.approx.ftz.f32 %f2, %f1;\nst.global.f32 [%rd3], %f2;",
    );
    let program = Program::parse(&body).unwrap();
    let mut device = Device::new();
    let [out, given] = [8, 8].map(|bytes| device.allocate(bytes));
    let arguments = [0.5_f32, 0.25];
    device.write(given, &arguments.map(f32::to_le_bytes).concat()).unwrap();
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [2, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::address(out), Argument::address(given)],
        reach: None,
    };
    let mut known = Approximations::default();
    known.insert("ex2.approx.ftz.f32", 0.5_f32.to_bits(), 7.0_f32.to_bits());
    device.arithmetic.approximations = Some(known);
    device.launch(&program, &launch, &Options::default()).unwrap();
    let expected = [7.0, 0.25_f32.exp2()].map(f32::to_le_bytes).concat();
    assert_eq!(device.read(out, 8).unwrap().0, expected);
    let missing = device.arithmetic.approximations.unwrap().take_missing();
    let asked: Vec<_> = missing.into_iter().collect();
    assert_eq!(asked, [("ex2.approx.ftz.f32".into(), [0.25_f32.to_bits()].into())]);
}

#[test]
fn predicates_join_and_guard() {
    let body = "setp.gt.u32 %p1, %r1, 3;\nsetp.lt.and.u32 %p2|%p3, %r1, 6, %p1;\n\
                mov.u32 %r5, 0;\n@%p1 add.s32 %r5, %r5, 1;\n@%p2 add.s32 %r5, %r5, 2;\n\
                @!%p3 add.s32 %r5, %r5, 4;\nst.global.u32 [%rd3], %r5;";
    assert_eq!(at_once(body, 8, &[], 8), [4, 4, 4, 4, 7, 7, 1, 1]);
}

#[test]
fn threads_part_at_branches_and_meet_again() {
    let body = "mov.u32 %r5, 0;\nmov.u32 %r6, 0;\nLOOP:\nadd.s32 %r5, %r5, %r6;\nadd.s32 %r6, %r6, 1;\n\
                setp.le.u32 %p1, %r6, %r1;\n@%p1 bra LOOP;\nactivemask.b32 %r7;\n\
                shfl.sync.bfly.b32 %r8, %r5, 1, 31, -1;\nst.global.u32 [%rd3], %r8;\n\
                setp.ne.u32 %p2, %r1, 0;\n@%p2 bra END;\nst.global.u32 [%rd1+128], %r7;\nEND:";
    let words = at_once(body, 32, &[], 33);
    let expected: Vec<u32> = (0..32_u32).map(|lane| (lane ^ 1) * ((lane ^ 1) + 1) / 2).collect();
    assert_eq!(words[..32], expected);
    assert_eq!(words[32], u32::MAX);
}

#[test]
fn shuffles_stay_in_their_segment() {
    let shuffle = |instruction: &str| {
        at_once(&format!("{instruction}\nst.global.u32 [%rd3], %r5;"), 32, &[], 32)
    };
    // Segments of eight: the mask's bits 8 to 12 keep a lane's upper bits.
    let segments = 0x181f;
    let down = shuffle(&format!("shfl.sync.down.b32 %r5, %r1, 3, {segments}, -1;"));
    let expected: Vec<u32> = (0..32).map(|i| if i % 8 < 5 { i + 3 } else { i }).collect();
    assert_eq!(down, expected);
    let up = shuffle("shfl.sync.up.b32 %r5, %r1, 4, 0, -1;");
    assert_eq!(up, (0..32_u32).map(|i| if i >= 4 { i - 4 } else { i }).collect::<Vec<_>>());
    assert_eq!(shuffle("shfl.sync.idx.b32 %r5, %r1, 9, 31, -1;"), [9; 32]);
}

#[test]
fn matrices_of_halves_are_transposed() {
    // Element (row, column) is 8 * row + column; a lane holds two of a row.
    let body = "mul.lo.u32 %r5, %r1, 131074;\nadd.u32 %r5, %r5, 65536;\n\
                movmatrix.sync.aligned.m8n8.trans.b16 %r6, %r5;\nst.global.u32 [%rd3], %r6;";
    let expected = |lane: u32| {
        let element = |column| 8 * column + lane / 4;
        element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16
    };
    assert_eq!(at_once(body, 32, &[], 32), (0..32).map(expected).collect::<Vec<_>>());
}

#[test]
fn a_warp_votes() {
    let vote = |how: &str, most: u32| {
        let body = format!(
            "setp.lt.u32 %p1, %r1, {most};\nvote.sync.{how}.pred %p1, %p1, -1;\nselp.u32 %r5, 1, 0, %p1;\n\
             st.global.u32 [%rd3], %r5;"
        );
        at_once(&body, 32, &[], 32)
    };
    assert_eq!([vote("any", 1), vote("any", 0)], [[1; 32], [0; 32]]);
    assert_eq!([vote("all", 32), vote("all", 31)], [[1; 32], [0; 32]]);
}

#[test]
fn words_go_through_shared_memory_behind_a_barrier() {
    let body = "mov.u64 %rd9, tile;\ncvt.u32.u64 %r9, %rd9;\nshl.b32 %r10, %r1, 2;\nadd.s32 %r10, %r9, %r10;\n\
                st.shared.u32 [%r10], %r1;\nBARRIER\nxor.b32 %r11, %r10, 252;\nld.shared.u32 %r5, [%r11];\n\
                st.global.u32 [%rd3], %r5;";
    let expected: Vec<u32> = (0..64).map(|i| i ^ 63).collect();
    assert_eq!(at_once(&body.replace("BARRIER", "bar.sync 0;"), 64, &[], 64), expected);
    let kind = fault(&body.replace("BARRIER", ""), 64, &[]);
    assert!(matches!(kind, Some(FaultKind::Race | FaultKind::Uninitialized)), "{kind:?}");
}

#[test]
fn copies_land_before_who_waited_reads_them() {
    let body = "mov.u64 %rd9, tile;\ncvt.u32.u64 %r9, %rd9;\nshl.b32 %r10, %r1, 2;\nadd.s32 %r10, %r9, %r10;\n\
                cp.async.ca.shared.global [%r10], [%rd4], 4, 4;\ncp.async.commit_group;\nWAIT\n\
                ld.shared.u32 %r5, [%r10];\nst.global.u32 [%rd3], %r5;";
    let input: Vec<u32> = (100..132).collect();
    let waited = body.replace("WAIT", "cp.async.wait_group 0;");
    for schedule in Schedule::several(8) {
        assert_eq!(run(&waited, 32, &input, 32, schedule).unwrap(), input, "{schedule:?}");
    }
    assert_eq!(fault(&body.replace("WAIT", ""), 32, &input), Some(FaultKind::Race));
    assert_eq!(
        fault(&body.replace("WAIT", "cp.async.wait_group 1;"), 32, &input),
        Some(FaultKind::Race)
    );
}

#[test]
fn numbers_are_added_to_memory_by_every_thread() {
    // All threads add to the same four numbers, which are zero at first.
    let add = |instruction: &str| {
        let body = format!(
            "mov.f32 %f2, 0f00000000;\nst.global.v4.f32 [%rd1], {{%f2, %f2, %f2, %f2}};\nbar.sync 0;\n\
             cvt.rn.f32.u32 %f3, %r1;\nmov.f32 %f4, 0f3f800000;\n{instruction}"
        );
        at_once(&body, 64, &[], 4)
    };
    let sums = |values: [f32; 4]| values.map(f32::to_bits);
    let four = add("red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f3, %f4, %f3, %f4};");
    assert_eq!(four, sums([2016.0, 64.0, 2016.0, 64.0]));
    let one = add("red.global.add.f32 [%rd1+4], %f4;");
    assert_eq!(one, sums([0.0, 64.0, 0.0, 0.0]));
    // Nobody has written there.
    let body = "mov.f32 %f2, 0f3f800000;\nred.global.add.f32 [%rd1], %f2;";
    assert_eq!(fault(body, 1, &[]), Some(FaultKind::Uninitialized));
    let body = "mov.f32 %f2, 0f3f800000;\nst.global.f32 [%rd1+4], %f2;\n\
                red.relaxed.gpu.global.add.v2.f32 [%rd1+4], {%f2, %f2};";
    assert_eq!(fault(body, 1, &[]), Some(FaultKind::Misaligned));
}

#[test]
fn addresses_are_checked() {
    for (body, kind) in [
        ("ld.global.u32 %r5, [%rd2+64];", FaultKind::OutOfBounds),
        ("ld.global.u32 %r5, [%rd2+2];", FaultKind::Misaligned),
        ("mov.u32 %r2, 0; ld.shared.u32 %r5, [%r2];", FaultKind::OutOfBounds),
        ("ld.shared.u32 %r5, [tile]; st.global.u32 [%rd1], %r5;", FaultKind::Uninitialized),
        (
            "ld.shared.u32 %r5, [tile]; setp.eq.u32 %p1, %r5, 0; @%p1 trap;",
            FaultKind::Uninitialized,
        ),
        ("trap;", FaultKind::Trap),
        ("LOOP: bra LOOP;", FaultKind::Runaway),
    ] {
        let program = Program::parse(&kernel(body)).unwrap();
        let mut device = Device::new();
        let (out, given) = (device.allocate(64), device.allocate(64));
        device.write(given, &[0; 64]).unwrap();
        let launch = Launch {
            kernel: "test".into(),
            grid: [1; 3],
            block: [1; 3],
            dynamic_shared: 0,
            arguments: vec![Argument::address(out), Argument::address(given)],
            reach: None,
        };
        let options = Options { most_instructions: 1000, ..Options::default() };
        match device.launch(&program, &launch, &options) {
            Err(SimulatorError::Fault(fault)) => assert_eq!(fault.kind, kind, "{body}: {fault}"),
            other => panic!("{body}: {other:?}"),
        }
    }
}

#[test]
fn a_fault_is_told_with_its_place() {
    let body = "setp.ne.u32 %p1, %r1, 37;\n@%p1 bra END;\nld.global.u32 %r5, [%rd2+4096];\nEND:";
    let error = run(body, 64, &[1], 1, Schedule { seed: 1, landing: Landing::Latest }).unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with(
            "OutOfBounds in kernel `test`, PTX line 21 (`ld.global.u32`), block (0, 0, 0), thread 37: reads 4 \
             bytes at global "
        ),
        "{message}"
    );
}

#[test]
fn an_unknown_instruction_is_named() {
    let error = Program::parse(&kernel("tcgen05.commit.b64 [%rd1];")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "PTX line 19: `tcgen05.commit.b64`: the simulator does not know this instruction"
    );
}

#[test]
fn a_barrier_that_nobody_reaches_is_a_deadlock() {
    let body =
        "setp.gt.u32 %p1, %r1, 31;\n@%p1 bra OTHER;\nbar.sync 1, 64;\nOTHER:\nbar.sync 2, 64;";
    assert_eq!(fault(body, 64, &[]), Some(FaultKind::Deadlock));
}

#[test]
fn launches_that_contradict_the_kernel_are_refused() {
    let program = Program::parse(&kernel("")).unwrap();
    let mut device = Device::new();
    let launch = Launch {
        kernel: "test".into(),
        grid: [1; 3],
        block: [32, 1, 1],
        dynamic_shared: 0,
        arguments: vec![Argument::address(0)],
        reach: None,
    };
    let message = |device: &mut Device, launch: &Launch| {
        device.launch(&program, launch, &Options::default()).unwrap_err().to_string()
    };
    assert_eq!(message(&mut device, &launch), "launch of `test`: 2 parameters expected, 1 given");
    let other = Launch { kernel: "other".into(), ..launch.clone() };
    assert_eq!(
        message(&mut device, &other),
        "launch of `other`: the module has no such kernel, only test"
    );
    let wide = Launch { block: [1025, 1, 1], ..launch };
    assert_eq!(
        message(&mut device, &wide),
        "launch of `test`: 1025 threads a block; 1 to 1024 are possible"
    );
}
