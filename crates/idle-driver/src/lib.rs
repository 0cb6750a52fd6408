//! A CUDA driver and an NVRTC that say yes to everything and do nothing.
//!
//! A program that finds this library in place of `libcuda.so` and `libnvrtc.so` runs as on an H100 whose memory holds
//! zeros: kernels are planned, launched and recorded, memory is reserved, and errors of the host come out. What only
//! CUDA's runtime does is seen so without a GPU, such as rows that are padded to 512 bytes. `cargo xtask host` runs
//! tests on it.
//!
//! Addresses of device memory are numbers, and nothing is ever given back. All functions return success, those of
//! `idle.rs` without a look at their arguments.
#![allow(non_snake_case, reason = "CUDA's names")]

mod driver;
mod idle;
mod nvrtc;

use std::{
    ffi::{CStr, c_char, c_int},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Success, of the driver and of NVRTC.
const SUCCESS: c_int = 0;

/// Another number for something that programs know by a pointer.
fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Writes to where a program asks for a result.
///
/// # Safety
///
/// `place` is null, or may be written.
unsafe fn tell<T>(place: *mut T, value: T) -> c_int {
    if !place.is_null() {
        // SAFETY: the caller's.
        unsafe { place.write(value) };
    }
    SUCCESS
}

/// Writes a text with its end, as far as there is room.
///
/// # Safety
///
/// `place` has room for `room` characters.
unsafe fn tell_text(place: *mut c_char, room: usize, text: &CStr) -> c_int {
    let bytes = text.to_bytes_with_nul();
    let length = bytes.len().min(room);
    // SAFETY: the caller's; the text is as long.
    unsafe { place.copy_from_nonoverlapping(bytes.as_ptr().cast(), length) };
    SUCCESS
}
