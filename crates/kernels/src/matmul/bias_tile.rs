//! The bias of a tile's columns, fetched into shared memory while the tile is multiplied. Read from
//! global memory by the epilogue it took a sixth of a GPT-2 layer's time on an H200: the reads wait
//! for the writes before them, which might be to the same place as far as the compiler knows.

use super::store::HalfKind;
use crate::ptx::{copy::copy_4_bytes, global_address};
use cubecl::prelude::*;

/// Starts copies of the bias of columns `first..` to shared memory; beyond `columns` it is zero.
/// `unit` counts those that call this.
#[cube]
pub(crate) fn fetch_bias<O: Float>(
    bias: &[O],
    destination: u32,
    first: u32,
    columns: u32,
    unit: u32,
    #[comptime] units: u32,
    #[comptime] tile_n: u32,
    #[comptime] half: Option<HalfKind>,
) {
    // A copy moves four bytes at the least.
    let bytes = comptime!(element_bytes(half));
    let word_columns = comptime!(4 / element_bytes(half));
    let source = global_address::<O>(bias);
    #[unroll]
    for round in 0..comptime!((tile_n * element_bytes(half) / 4).div_ceil(units)) {
        let word = round * units + unit;
        if word < comptime!(tile_n * element_bytes(half) / 4) {
            let column = first + word * word_columns;
            let mut from = source;
            let mut size = 0u32;
            if column < columns {
                from += u64::cast_from(column * bytes);
                size = min(columns - column, word_columns) * bytes;
            }
            copy_4_bytes(
                destination + 4 * word,
                crate::ptx::load::<u64>(from),
                crate::ptx::load::<u32>(size),
            );
        }
    }
}

/// The bias of two neighboring columns at `address` in shared memory.
#[cube]
pub(super) fn bias_pair(address: u32, #[comptime] half: Option<HalfKind>) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("{body}\n// {d}{a}", body = const pair_text(half), d = out(_) pair, a = in(_) address);
    pair
}

pub(crate) fn element_bytes(half: Option<HalfKind>) -> u32 {
    if half.is_some() { 2 } else { 4 }
}

fn pair_text(half: Option<HalfKind>) -> &'static str {
    match half {
        None => "ld.shared.v2.f32 {%0, %1}, [%2]; // $0 $1",
        // bf16 is the upper half of f32.
        Some(HalfKind::Bf16) => {
            "{ // $0 $1\n.reg .b32 word, part;\nld.shared.b32 word, [%2];\nshl.b32 part, word, 16;\n\
             mov.b32 %0, part;\nand.b32 part, word, 0xffff0000;\nmov.b32 %1, part;\n}"
        }
        Some(HalfKind::F16) => {
            "{ // $0 $1\n.reg .b16 low, high;\nld.shared.v2.b16 {low, high}, [%2];\n\
             cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        }
    }
}
