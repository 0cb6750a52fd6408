//! The kernels that send numbers to another rank, and add what has come from it.

use super::exchange_plan::{WARP_VECTORS, WARPS};

/// A kernel that sends numbers, and one for each type that adds numbers from one place to those in another, as a table of
/// [`Block`](super::exchange_plan::Block)s says.
///
/// A warp goes through its vectors in runs of one for each lane.
///
/// It is PTX and not CubeCL's, whose launches take only memory of its own.
pub(super) fn kernels() -> String {
    // In bf16 a product with one, since `add` knows the type from Hopper on.
    let sums = [
        ("add_f32", "add.rn.f32 %a{}, %a{}, %b{};"),
        ("add_f16", "add.rn.f16x2 %a{}, %a{}, %b{};"),
        ("add_bf16", "fma.rn.bf16x2 %a{}, %a{}, %one, %b{};"),
    ];
    let sums = sums.map(|(name, add)| entry(name, &sum(&numbered(add, 4))));
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n{}{}",
        entry("send", &send()),
        sums.concat()
    )
}

/// What a lane of the send has on its way at once.
const SENT_AT_ONCE: usize = 4;

/// Lines with each number below `count` in turn.
fn numbered(line: &str, count: usize) -> String {
    (0..count).map(|n| line.replace("{}", &n.to_string()) + "\n    ").collect()
}

/// A kernel whose `body` is run by each warp that has vectors, with `%at` at its lane's first one and `%end` behind the
/// warp's last.
fn entry(name: &str, body: &str) -> String {
    let threads = 32 * WARPS;
    format!(
        "
.visible .entry {name}(.param .u64 blocks)
.maxntid {threads}, 1, 1
{{
    .reg .pred %over, %in, %marked, %some, %first;
    .reg .pred %p<{SENT_AT_ONCE}>;
    .reg .b32 %block, %thread, %lane, %warp, %one, %word, %come_word, %any, %bit, %zero;
    .reg .b32 %a<{registers}>;
    .reg .b32 %b<4>;
    .reg .b64 %blocks, %record, %own, %come, %sent, %vectors, %own_marks, %come_marks, %sent_marks;
    .reg .b64 %at, %end, %begin, %run, %offset, %x, %y, %of_warp;
    ld.param.u64 %blocks, [blocks];
    cvta.to.global.u64 %blocks, %blocks;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %record, %block, 56;
    add.s64 %record, %blocks, %record;
    ld.global.u64 %own, [%record];
    ld.global.u64 %come, [%record+8];
    ld.global.u64 %sent, [%record+16];
    ld.global.u64 %vectors, [%record+24];
    ld.global.u64 %own_marks, [%record+32];
    ld.global.u64 %come_marks, [%record+40];
    ld.global.u64 %sent_marks, [%record+48];
    mov.u32 %thread, %tid.x;
    and.b32 %lane, %thread, 31;
    shr.u32 %warp, %thread, 5;
    setp.eq.u32 %first, %lane, 0;
    mul.wide.u32 %of_warp, %warp, 4;
    mul.wide.u32 %begin, %warp, {WARP_VECTORS};
    setp.ge.u64 %over, %begin, %vectors;
    @%over bra END;
    add.s64 %end, %begin, {WARP_VECTORS};
    min.u64 %end, %end, %vectors;
    mov.b32 %one, 0x3F803F80;
    mov.b32 %zero, 0;
    mov.b32 %bit, 1;
    mov.b64 %run, %begin;
    cvt.u64.u32 %at, %lane;
    add.s64 %at, %begin, %at;
{body}
END:
    ret;
}}
",
        registers = 4 * SENT_AT_ONCE,
    )
}

/// Sends the runs that are not all zeros, and says which they are. It asks for several runs before it looks at one.
fn send() -> String {
    let load = |n: usize| {
        let numbers = vector(n);
        let clear: String = numbers.iter().map(|a| format!("mov.b32 {a}, 0;\n    ")).collect();
        format!(
            "setp.lt.u64 %p{n}, %at, %end;
    {clear}shl.b64 %offset, %at, 4;
    add.s64 %x, %own, %offset;
    @%p{n} ld.global.v4.b32 {{{}}}, [%x];
    add.s64 %at, %at, 32;
    ",
            numbers.join(", ")
        )
    };
    let store = |n: usize| {
        let numbers = vector(n);
        let [a, b, c, d] = &numbers;
        format!(
            "or.b32 %any, {a}, {b};
    or.b32 %any, %any, {c};
    or.b32 %any, %any, {d};
    setp.ne.u32 %in, %any, 0;
    vote.sync.any.pred %some, %in, 0xffffffff;
    selp.b32 %any, %bit, %zero, %some;
    or.b32 %word, %word, %any;
    shl.b32 %bit, %bit, 1;
    and.pred %p{n}, %p{n}, %some;
    shl.b64 %offset, %at, 4;
    add.s64 %x, %sent, %offset;
    @%p{n} st.global.v4.b32 [%x], {{{}}};
    add.s64 %at, %at, 32;
    ",
            numbers.join(", ")
        )
    };
    let loads: String = (0..SENT_AT_ONCE).map(load).collect();
    let stores: String = (0..SENT_AT_ONCE).map(store).collect();
    format!(
        "    mov.b32 %word, 0;
RUNS:
    {loads}sub.s64 %at, %at, {ahead};
    {stores}add.s64 %run, %run, {ahead};
    setp.lt.u64 %in, %run, %end;
    @%in bra RUNS;
    add.s64 %x, %own_marks, %of_warp;
    add.s64 %y, %sent_marks, %of_warp;
    @%first st.global.b32 [%x], %word;
    @%first st.global.b32 [%y], %word;",
        ahead = 32 * SENT_AT_ONCE
    )
}

/// The registers of a lane's vector of the `n`th run.
fn vector(n: usize) -> [String; 4] {
    [0, 1, 2, 3].map(|i| format!("%a{}", 4 * n + i))
}

/// Adds the runs that either rank has marked. Nothing is read of a rank that has not marked the run.
fn sum(adds: &str) -> String {
    format!(
        "    mov.b32 %word, 0xffffffff;
    mov.b32 %come_word, 0xffffffff;
    setp.eq.u64 %marked, %own_marks, 0;
    @%marked bra RUNS;
    add.s64 %x, %own_marks, %of_warp;
    add.s64 %y, %come_marks, %of_warp;
    ld.global.b32 %word, [%x];
    ld.global.b32 %come_word, [%y];
RUNS:
    or.b32 %any, %word, %come_word;
    and.b32 %any, %any, %bit;
    setp.eq.u32 %over, %any, 0;
    @%over bra NEXT;
    setp.lt.u64 %in, %at, %end;
    and.b32 %any, %come_word, %bit;
    setp.ne.and.u32 %some, %any, 0, %in;
    shl.b64 %offset, %at, 4;
    add.s64 %x, %own, %offset;
    add.s64 %y, %come, %offset;
    {clear}@%in ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%x];
    @%some ld.global.v4.b32 {{%b0, %b1, %b2, %b3}}, [%y];
    {adds}@%in st.global.v4.b32 [%x], {{%a0, %a1, %a2, %a3}};
NEXT:
    shl.b32 %bit, %bit, 1;
    add.s64 %at, %at, 32;
    add.s64 %run, %run, 32;
    setp.lt.u64 %in, %run, %end;
    @%in bra RUNS;",
        clear = numbered("mov.b32 %b{}, 0;", 4) + &numbered("mov.b32 %a{}, 0;", 4),
    )
}

#[cfg(test)]
mod tests {
    use super::{
        super::exchange_plan::{Block, VECTOR_BYTES},
        *,
    };
    use blackburn_simulator::{Argument, Device, Launch, Options, Program};

    /// Two ranks on one simulated machine.
    struct Ranks {
        program: Program,
        device: Device,
    }

    impl Ranks {
        fn new() -> Self {
            let program = Program::parse(&kernels()).expect("it is PTX");
            Self { program, device: Device::new() }
        }

        fn place(&mut self, bytes: &[u8]) -> u64 {
            let place = self.device.allocate(bytes.len() as u64);
            self.device.write(place, bytes).expect("it is there");
            place
        }

        fn bytes(&mut self, place: u64, count: usize) -> Vec<u8> {
            self.device.read(place, count).expect("it is there").0.clone()
        }

        fn run(&mut self, kernel: &str, blocks: &[Block]) {
            let number = |block: &Block| {
                let Block { own, come, sent, vectors, .. } = *block;
                let Block { own_marks, come_marks, sent_marks, .. } = *block;
                [own, come, sent, vectors, own_marks, come_marks, sent_marks]
            };
            let table: Vec<u8> =
                blocks.iter().flat_map(number).flat_map(u64::to_le_bytes).collect();
            let launch = Launch {
                kernel: kernel.into(),
                grid: [blocks.len() as u32, 1, 1],
                block: [32 * WARPS as u32, 1, 1],
                dynamic_shared: 0,
                arguments: vec![Argument::address(self.place(&table))],
                reach: None,
            };
            self.device.launch(&self.program, &launch, &Options::default()).expect("it runs");
        }
    }

    /// The sums of what copy engines have moved, with a vector behind them that is nobody's.
    fn added(kernel: &str, [own, come]: [&[u8]; 2]) -> Vec<u8> {
        let mut ranks = Ranks::new();
        let [to, from] = [own, come].map(|bytes| ranks.place(bytes));
        // Two blocks, of which the first has more vectors than threads, and more than a warp.
        let all = (own.len() / VECTOR_BYTES) as u64 - 1;
        let half = WARP_VECTORS + 100;
        let block = |begin: u64, vectors| {
            let offset = begin * VECTOR_BYTES as u64;
            Block { own: to + offset, come: from + offset, vectors, ..Block::default() }
        };
        ranks.run(kernel, &[block(0, half), block(half, all - half)]);
        ranks.bytes(to, own.len())
    }

    #[test]
    fn kernels_round_each_sum_once_and_stop_in_time() {
        let count = 8 * 1500;
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

    /// What is not there yet, which nothing may read.
    const STALE: u8 = 0xee;

    #[test]
    fn what_is_sent_leaves_zeros_out_and_is_added() {
        // Runs of 32 vectors that one rank has, or the other, or both, or none; the last one is not whole. Others hold but
        // one number, or negative zeros, of which a sum with zeros is a zero.
        let run = 32 * VECTOR_BYTES / 4;
        let vectors = WARP_VECTORS + 32 * 5 + 3;
        let count = vectors as usize * VECTOR_BYTES / 4;
        let numbers = |rank: usize| {
            let number = |at: usize| match (at / run + rank) % 4 {
                0 | 1 if at / run % 8 == 7 => -0.0,
                0 => (at * 37 % 1013) as f32 - 500.0,
                1 if at % run == 77 => 3.5,
                _ => 0.0,
            };
            (0..count).map(number).collect::<Vec<f32>>()
        };
        let (mine, others) = (numbers(0), numbers(1));
        let bytes =
            |numbers: &[f32]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let mut ranks = Ranks::new();
        let [own, other] = [&mine, &others].map(|numbers| ranks.place(&bytes(numbers)));
        let stale = vec![STALE; count * 4];
        let [box_of_own, box_of_other] = [0; 2].map(|_| ranks.place(&stale));
        let marks = [0; 4].map(|_| ranks.place(&[STALE; 4 * WARPS as usize]));
        let block = Block {
            own,
            come: box_of_own,
            sent: box_of_other,
            vectors,
            own_marks: marks[0],
            come_marks: marks[1],
            sent_marks: marks[3],
        };
        let turned = Block {
            own: other,
            come: box_of_other,
            sent: box_of_own,
            own_marks: marks[2],
            come_marks: marks[3],
            sent_marks: marks[1],
            ..block
        };
        ranks.run("send", &[block, turned]);
        let sent = ranks.bytes(box_of_other, count * 4);
        for (at, number) in mine.chunks(run).enumerate() {
            let place = 4 * run * at..4 * run * at + 4 * number.len();
            let is_there = number.iter().any(|x| x.to_bits() != 0);
            let expected = if is_there { bytes(number) } else { stale[place.clone()].to_vec() };
            assert!(sent[place] == expected, "run {at}");
        }
        ranks.run("add_f32", &[block, turned]);
        let expected: Vec<f32> = mine.iter().zip(&others).map(|(x, y)| x + y).collect();
        assert!(ranks.bytes(own, count * 4) == bytes(&expected));
        assert!(ranks.bytes(other, count * 4) == bytes(&expected));
    }
}
