//! Accesses to memory by plain addresses, which kernels need that divide up shared memory themselves.

use super::load;
use cubecl::prelude::*;

/// Two numbers at a multiple of 8 bytes in shared memory.
#[cube]
pub(crate) fn load_shared_pair(address: u32) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!("ld.shared.v2.f32 {{%0, %1}}, [%2]; // {d}{a}",
        d = out(_) pair, a = in(_) load::<u32>(address));
    pair
}

/// Four numbers at a multiple of 16 bytes in shared memory.
#[cube]
pub(crate) fn load_shared_four(address: u32) -> Vector<f32, Const<4>> {
    let four: Vector<f32, Const<4>>;
    gpu_asm!("ld.shared.v4.f32 {{%0, %1, %2, %3}}, [%4]; // {d}{a}",
        d = out(_) four, a = in(_) load::<u32>(address));
    four
}

/// Writes four numbers to a multiple of 16 bytes in shared memory.
#[cube]
pub(crate) fn store_shared_four(address: u32, a: f32, b: f32, c: f32, d: f32) {
    gpu_asm!(
        "st.shared.v4.f32 [{}], {{{}, {}, {}, {}}};",
        in(_) load::<u32>(address), in(_) load::<f32>(a), in(_) load::<f32>(b),
        in(_) load::<f32>(c), in(_) load::<f32>(d)
    );
}

/// A word of shared memory.
#[cube]
pub(crate) fn load_shared_word(address: u32) -> u32 {
    let word: u32;
    gpu_asm!("ld.shared.b32 {w}, [{a}];", w = out(_) word, a = in(_) load::<u32>(address));
    word
}

/// Writes a word of shared memory.
#[cube]
pub(crate) fn store_shared_word(address: u32, word: u32) {
    gpu_asm!("st.shared.b32 [{}], {};", in(_) load::<u32>(address), in(_) load::<u32>(word));
}

/// Writes a number to shared memory.
#[cube]
pub(crate) fn store_shared_number(address: u32, number: f32) {
    gpu_asm!("st.shared.f32 [{}], {};", in(_) load::<u32>(address), in(_) load::<f32>(number));
}

/// Adds four numbers to those at a multiple of 16 bytes in global memory (`sm_90`), each at once, in no order
/// among all who add there. Nobody waits for it.
#[cube]
pub(crate) fn add_to_numbers(address: u64, a: f32, b: f32, c: f32, d: f32) {
    gpu_asm!(
        "red.relaxed.gpu.global.add.v4.f32 [{}], {{{}, {}, {}, {}}};",
        in(_) load::<u64>(address), in(_) load::<f32>(a), in(_) load::<f32>(b),
        in(_) load::<f32>(c), in(_) load::<f32>(d)
    );
}

/// Shows what this unit wrote to shared memory to the tensor cores and the copy engine, once a barrier has
/// ordered their accesses behind it.
#[cube]
pub(crate) fn show_to_async() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}
