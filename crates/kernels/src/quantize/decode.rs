//! Codes back to floats, for devices whose tensor cores do not take them.

use super::{Fp8Format, codes::decode_one};
use cubecl::prelude::*;

/// `values[i]` are the numbers of the four codes in word i, without their scale: exact in every
/// type, f16 and bf16 included.
#[cube(launch_unchecked)]
pub(crate) fn quantize_decode_kernel<O: Float>(
    codes: &[u32],
    values: &mut [Vector<O, Const<4>>],
    words: u32,
    #[comptime] format: Fp8Format,
    #[define(O)] _output: ElemType,
) {
    let index = ABSOLUTE_POS as u32;
    if index >= words {
        terminate!();
    }
    let word = codes[index as usize];
    let mut four = Vector::<f32, Const<4>>::empty();
    #[unroll]
    for byte in 0..4usize {
        let code = (word >> comptime!(8 * byte as u32)) & 0xff;
        four.insert(byte, decode_one(code, format));
    }
    values[index as usize] = Vector::cast_from(four);
}
