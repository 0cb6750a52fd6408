//! The kernels that add what another rank has copied.

/// A kernel for each type that adds numbers from one place to those in another, as a table of [`Block`](super::exchange_plan::Block)s says.
///
/// It is PTX and not CubeCL's, whose launches take only memory of its own.
pub(super) fn kernels() -> String {
    // In bf16 a product with one, since `add` knows the type from Hopper on.
    let [f32, f16, bf16] = [
        ["add.rn.f32 %a{}, %a{}, %b{};"; 4],
        ["add.rn.f16x2 %a{}, %a{}, %b{};"; 4],
        ["fma.rn.bf16x2 %a{}, %a{}, %one, %b{};"; 4],
    ]
    .map(|adds| {
        let numbered = adds.iter().enumerate().map(|(n, add)| add.replace("{}", &n.to_string()));
        numbered.collect::<Vec<String>>().join("\n    ")
    });
    let entry = |name: &str, adds: &str| {
        format!(
            "
.visible .entry {name}(.param .u64 blocks)
{{
    .reg .pred %done;
    .reg .b32 %block, %threads, %thread, %one;
    .reg .b32 %a<4>;
    .reg .b32 %b<4>;
    .reg .b64 %blocks, %own, %to, %from, %vectors, %at, %step, %offset, %x, %y;
    ld.param.u64 %blocks, [blocks];
    cvta.to.global.u64 %blocks, %blocks;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %own, %block, 24;
    add.s64 %own, %blocks, %own;
    ld.global.u64 %to, [%own];
    ld.global.u64 %from, [%own+8];
    ld.global.u64 %vectors, [%own+16];
    cvta.to.global.u64 %to, %to;
    cvta.to.global.u64 %from, %from;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.b32 %one, 0x3F803F80;
    cvt.u64.u32 %at, %thread;
    cvt.u64.u32 %step, %threads;
NEXT:
    setp.ge.u64 %done, %at, %vectors;
    @%done bra END;
    shl.b64 %offset, %at, 4;
    add.s64 %x, %to, %offset;
    add.s64 %y, %from, %offset;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%x];
    ld.global.v4.b32 {{%b0, %b1, %b2, %b3}}, [%y];
    {adds}
    st.global.v4.b32 [%x], {{%a0, %a1, %a2, %a3}};
    add.s64 %at, %at, %step;
    bra NEXT;
END:
    ret;
}}
"
        )
    };
    let entries = [entry("add_f32", &f32), entry("add_f16", &f16), entry("add_bf16", &bf16)];
    format!(".version 7.0\n.target sm_80\n.address_size 64\n{}", entries.concat())
}

#[cfg(test)]
mod tests {
    use super::{super::exchange_plan::VECTOR_BYTES, *};
    use blackburn_simulator::{Argument, Device, Launch, Options, Program};

    /// Adds on the simulated machine, with more vectors than threads, and a vector behind them that is nobody's.
    fn added(kernel: &str, [to, from]: [&[u8]; 2]) -> Vec<u8> {
        let program = Program::parse(&kernels()).expect("it is PTX");
        let mut device = Device::new();
        let places = [to, from].map(|bytes| {
            let place = device.allocate(bytes.len() as u64);
            device.write(place, bytes).expect("it is there");
            place
        });
        // Two blocks, of which the first has more vectors than threads.
        let half = (to.len() / VECTOR_BYTES / 2) as u64;
        let rest = (to.len() / VECTOR_BYTES) as u64 - half - 1;
        let second = half * VECTOR_BYTES as u64;
        let numbers = [places[0], places[1], half, places[0] + second, places[1] + second, rest];
        let table: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let blocks = device.allocate(table.len() as u64);
        device.write(blocks, &table).expect("it is there");
        let launch = Launch {
            kernel: kernel.into(),
            grid: [2, 1, 1],
            block: [32, 1, 1],
            dynamic_shared: 0,
            arguments: vec![Argument::address(blocks)],
            reach: None,
        };
        device.launch(&program, &launch, &Options::default()).expect("it runs");
        device.read(places[0], to.len()).expect("it is there").0.clone()
    }

    #[test]
    fn kernels_round_each_sum_once_and_stop_in_time() {
        let count = 8 * 100;
        let [x, y]: [Vec<f32>; 2] = [3, 7].map(|by: u32| {
            let number = |i: u32| (i.wrapping_mul(by * 15_485_863) >> 8) as f32 / 65_536.0 - 100.0;
            (0..count).map(number).collect()
        });
        let bytes = |numbers: &[f32], bits: &dyn Fn(f32) -> Vec<u8>| {
            numbers.iter().flat_map(|x| bits(*x)).collect::<Vec<u8>>()
        };
        macro_rules! check {
            ($kernel:literal, $float:ty, $from:expr, $to:expr) => {
                let of = |x: f32| -> Vec<u8> { <$float>::to_le_bytes($from(x)).to_vec() };
                let found = added($kernel, [&bytes(&x, &of), &bytes(&y, &of)]);
                let last = count as usize - VECTOR_BYTES / size_of::<$float>();
                let sum = |i: usize| $to($from(x[i])) + $to($from(y[i]));
                let expected = (0..count as usize)
                    .flat_map(|i| of(if i < last { sum(i) } else { x[i] }))
                    .collect::<Vec<u8>>();
                assert!(found == expected, $kernel);
            };
        }
        check!("add_f32", f32, |x: f32| x, |x: f32| x);
        check!("add_f16", half::f16, half::f16::from_f32, half::f16::to_f32);
        check!("add_bf16", half::bf16, half::bf16::from_f32, half::bf16::to_f32);
    }
}
