//! NVIDIA's instructions that CubeCL has no name for, as inline PTX.
//!
//! | module | instructions | from |
//! |---|---|---|
//! | [`access`] | loads and stores of shared memory; `red` of four numbers at once | every one; `sm_90` |
//! | [`barrier`] | mbarriers in shared memory | `sm_90` |
//! | [`cluster`] | barriers of a cluster, and mbarriers of another cube | `sm_90` |
//! | [`convert`] | `cvt` to 8-bit floats | `sm_89` |
//! | [`copy`] | `cp.async`; tiles and columns of pixels by the tensor memory accelerator (TMA) | `sm_80`; `sm_90` |
//! | [`math`] | `sqrt.approx`, `div.approx`; `add.rm`, `max.NaN` | every one; `max.NaN` `sm_80` |
//! | [`mma`], [`fragments`] | `ldmatrix` and `mma.sync`, a warp at a time | `sm_80`, FP8 `sm_89`, scales `sm_120a` |
//! | [`tcgen05`], [`tcgen05_scales`] | `tcgen05.mma` and tensor memory | `sm_100a`, `sm_103a` |
//! | [`tcgen05_pair`] | the same, of two cubes together | `sm_100a`, `sm_103a` |
//! | [`wgmma`], [`wgmma_sums`] | `wgmma.mma_async`, four warps at a time | `sm_90a` alone |
//!
//! All families of matrix instructions find their operands in shared memory in rows of 128 bytes,
//! whose eight chunks of 16 bytes are permuted: chunk c of row r lies at c xor (r mod 8), TMA's
//! 128-byte swizzle. Eight rows of a column of chunks then lie in different banks.
//!
//! Shared memory is addressed by plain 32-bit numbers, which CubeCL's analysis does not see: a
//! kernel takes one [`Shared`](cubecl::prelude::Shared) slice and divides it up itself.

pub(crate) mod access;
pub(crate) mod barrier;
pub(crate) mod cluster;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod fragments;
pub(crate) mod math;
pub(crate) mod mma;
pub(crate) mod tcgen05;
pub(crate) mod tcgen05_pair;
pub(crate) mod tcgen05_scales;
pub(crate) mod wgmma;
pub(crate) mod wgmma_sums;

use cubecl::{
    intrinsic,
    ir::{Scope, dialect::vector::CompositeConstructOp, prelude::Value},
    prelude::*,
};
use cubecl_cpp::cuda::ptx::{InlinePtxOp, generic_to_shared};

pub(crate) use crate::device::ROW_BYTES;

/// The value of a variable. Inline PTX takes a variable that is assigned to by its address.
#[cube]
pub(crate) fn load<T: CubePrimitive>(variable: T) -> T {
    intrinsic!(|scope| { variable.read_value(scope).into() })
}

/// The vector of those elements, made at once. Of a chain of insertions each is a vector of its own to
/// CubeCL's compiler, for which it walks through the rest of the kernel: seconds, where there are hundreds.
#[cube]
pub(crate) fn vector_of<T: Scalar, N: Size>(elements: Sequence<T>) -> Vector<T, N> {
    intrinsic!(|scope| {
        let values = elements.iter_cloned().map(|element| element.read_value(scope)).collect();
        let ty = Vector::<T, N>::__expand_as_type(scope);
        let op = CompositeConstructOp::new(scope.ctx_mut(), ty, values);
        scope.register_with_result(&op).into()
    })
}

/// Where `memory`, a slice in shared memory, begins.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(memory: &[T]) -> u32 {
    // SAFETY: the address of the first element, which a slice of shared memory has.
    generic_to_shared::<T>(unsafe { memory.as_ptr_unchecked() })
}

/// Where `memory`, a buffer in global memory, begins.
#[cube]
pub(crate) fn global_address<T: CubePrimitive>(memory: &[T]) -> u64 {
    // SAFETY: the address of the first element; buffers are not empty.
    let pointer = unsafe { memory.as_ptr_unchecked() };
    intrinsic!(|scope| {
        // SAFETY: a pointer here is a handle of one in the kernel; nothing is read through it.
        address_of(scope, unsafe { *pointer }.value(scope))
    })
}

/// As [`global_address`], of a buffer that is written.
#[cube]
pub(crate) fn output_address<T: CubePrimitive>(memory: &mut [T]) -> u64 {
    // SAFETY: as in `global_address`.
    let pointer = unsafe { memory.as_mut_ptr_unchecked() };
    intrinsic!(|scope| {
        // SAFETY: as in `global_address`.
        address_of(scope, unsafe { *pointer }.value(scope))
    })
}

fn address_of(scope: &Scope, pointer: Value) -> NativeExpand<u64> {
    let ty = u64::__expand_as_type(scope);
    let op = InlinePtxOp::new(scope.ctx_mut(), Some(ty), "mov.b64 $0, $1;", vec![pointer]);
    scope.register(&op);
    op.result(scope.ctx_mut()).expect("a result was asked for").into()
}

/// Four words at a multiple of 16 bytes that nobody writes to while the kernel runs, or zeros.
#[cube]
pub(crate) fn load_words(address: u64, are_there: bool) -> Vector<u32, Const<4>> {
    let there = u32::cast_from(are_there);
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "{body}\n// {w}{a}{t}",
        body = const WORDS_OR_ZEROS,
        w = out(_) words,
        a = in(_) load::<u64>(address),
        t = in(_) load::<u32>(there),
        options(nomem)
    );
    words
}

/// The load may not be a branch: the ones after it would wait for it.
const WORDS_OR_ZEROS: &str = "{ // $0 $1 $2\n.reg .pred there;\n.reg .b32 a, b, c, d;\n\
    setp.ne.b32 there, %5, 0;\nmov.b32 a, 0;\nmov.b32 b, 0;\nmov.b32 c, 0;\nmov.b32 d, 0;\n\
    @there ld.global.nc.v4.b32 {a, b, c, d}, [%4];\n\
    mov.b32 %0, a;\nmov.b32 %1, b;\nmov.b32 %2, c;\nmov.b32 %3, d;\n}";

/// Writes a word at an even element of 16 bits.
#[cube]
pub(crate) fn store_word(base: u64, element: u32, word: u32) {
    let address = base + u64::cast_from(element) * 2;
    gpu_asm!("st.global.b32 [{}], {};", in(_) address, in(_) load::<u32>(word));
}

/// Writes two numbers at an even element of 32 bits.
#[cube]
pub(crate) fn store_numbers(base: u64, element: u32, low: f32, high: f32) {
    let address = base + u64::cast_from(element) * 4;
    gpu_asm!("st.global.v2.f32 [{}], {{{}, {}}};", in(_) address, in(_) load::<f32>(low),
        in(_) load::<f32>(high));
}

/// The word, computed before the inline PTX that follows: the compiler keeps its order.
#[cube]
pub(crate) fn computed(word: u32) -> u32 {
    let same: u32;
    gpu_asm!("mov.b32 {r}, {x};", r = out(_) same, x = in(_) load::<u32>(word));
    same
}

/// The 8 x 8 matrix of halves of words that a warp holds, two neighbors of a row in each unit, transposed.
#[cube]
pub(crate) fn transposed_halves(word: u32) -> u32 {
    let transposed: u32;
    gpu_asm!("movmatrix.sync.aligned.m8n8.trans.b16 {r}, {x};", r = out(_) transposed, x = in(_) load::<u32>(word));
    transposed
}

/// Four bytes of two words, each by its half byte of `which`: 0 to 3 are bytes of the first, 4 to 7 of the second.
#[cube]
pub(crate) fn bytes_of_two(first: u32, second: u32, which: u32) -> u32 {
    let bytes: u32;
    gpu_asm!("prmt.b32 {r}, {a}, {b}, {c};", r = out(_) bytes, a = in(_) load::<u32>(first), b = in(_) load::<u32>(second), c = in(_) load::<u32>(which), options(nomem));
    bytes
}

/// Each half of the word filled with the highest bit of a byte of it, the upper one or the lower one.
#[cube]
pub(crate) fn sign_masks(word: u32, #[comptime] upper: bool) -> u32 {
    bytes_of_two(word, word, comptime!(if upper { 0xbb99u32 } else { 0xaa88u32 }))
}

/// Gives all but `count` registers of this warpgroup's units back, a multiple of 8.
#[cube]
pub(crate) fn release_registers(#[comptime] count: u32) {
    gpu_asm!("{text}", text = const format!("setmaxnreg.dec.sync.aligned.u32 {count};"));
}

/// Waits until this warpgroup's units may have `count` registers each, a multiple of 8.
#[cube]
pub(crate) fn acquire_registers(#[comptime] count: u32) {
    gpu_asm!("{text}", text = const format!("setmaxnreg.inc.sync.aligned.u32 {count};"));
}

/// `2^x`, to two roundings of f32; results below its normal numbers become zero.
#[cube]
pub(crate) fn exp2_fast(x: f32) -> f32 {
    let y: f32;
    gpu_asm!("ex2.approx.ftz.f32 {r}, {x};", r = out(_) y, x = in(_) load::<f32>(x), options(nomem));
    y
}

/// Two numbers rounded to nearest and packed, `low` in the low half.
#[cube]
pub(crate) fn pack_bf16(low: f32, high: f32) -> u32 {
    let packed: u32;
    gpu_asm!("cvt.rn.bf16x2.f32 {r}, {h}, {l};", r = out(_) packed, h = in(_) load::<f32>(high), l = in(_) load::<f32>(low), options(nomem));
    packed
}

/// As [`pack_bf16`], to f16.
#[cube]
pub(crate) fn pack_f16(low: f32, high: f32) -> u32 {
    let packed: u32;
    gpu_asm!("cvt.rn.f16x2.f32 {r}, {h}, {l};", r = out(_) packed, h = in(_) load::<f32>(high), l = in(_) load::<f32>(low), options(nomem));
    packed
}

/// The two numbers of a word, that of the low half first.
#[cube]
fn unpack_bf16(word: u32) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("{body}\n// {d}{w}", body = const BF16_PAIR, d = out(_) pair, w = in(_) load::<u32>(word), options(nomem));
    pair
}

/// bf16 is the upper half of f32.
const BF16_PAIR: &str = "{ // $0 $1\n.reg .b32 low, high;\nshl.b32 low, %2, 16;\n\
    and.b32 high, %2, 0xffff0000;\nmov.b32 %0, low;\nmov.b32 %1, high;\n}";

/// As [`unpack_bf16`], of f16.
#[cube]
fn unpack_f16(word: u32) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("{body}\n// {d}{w}", body = const F16_PAIR, d = out(_) pair, w = in(_) load::<u32>(word), options(nomem));
    pair
}

const F16_PAIR: &str = "{ // $0 $1\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n\
    cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}";

/// The 16-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum HalfKind {
    Bf16,
    F16,
}

/// Two numbers rounded to nearest and packed, `low` in the low half.
#[cube]
pub(crate) fn pack(low: f32, high: f32, #[comptime] kind: HalfKind) -> u32 {
    match comptime!(kind) {
        HalfKind::Bf16 => pack_bf16(low, high),
        HalfKind::F16 => pack_f16(low, high),
    }
}

/// The two numbers of a word, that of the low half first.
#[cube]
pub(crate) fn unpack(word: u32, #[comptime] kind: HalfKind) -> Vector<f32, Const<2>> {
    match comptime!(kind) {
        HalfKind::Bf16 => unpack_bf16(word),
        HalfKind::F16 => unpack_f16(word),
    }
}
