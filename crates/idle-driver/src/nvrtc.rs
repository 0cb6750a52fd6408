//! A compiler that makes one letter of any program.

use crate::{SUCCESS, handle, tell, tell_text};
use std::ffi::{c_char, c_int, c_void};

/// Architectures that are compiled for.
const ARCHITECTURES: [c_int; 9] = [75, 80, 86, 89, 90, 100, 103, 120, 121];

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: the program's own results.
    unsafe { tell(major, 13) + tell(minor, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(program: *mut usize) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(program, handle()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(count, ARCHITECTURES.len() as c_int) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetSupportedArchs(all: *mut c_int) -> c_int {
    // SAFETY: programs ask for the count, and have room for as many.
    unsafe { all.copy_from_nonoverlapping(ARCHITECTURES.as_ptr(), ARCHITECTURES.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(_error: c_int) -> *const c_char {
    c"none".as_ptr()
}

/// Functions that tell how long a text is, and give it.
macro_rules! texts {
    ($($size:ident $give:ident $text:literal)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $size(_program: *const c_void, size: *mut usize) -> c_int {
            // SAFETY: the program's own result.
            unsafe { tell(size, $text.count_bytes() + 1) }
        }

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $give(_program: *const c_void, text: *mut c_char) -> c_int {
            // SAFETY: programs ask for the size, and have as much room.
            unsafe { tell_text(text, $text.count_bytes() + 1, $text) }
        }
    )*};
}

texts! {
    nvrtcGetPTXSize nvrtcGetPTX c"x"
    nvrtcGetCUBINSize nvrtcGetCUBIN c"x"
    nvrtcGetProgramLogSize nvrtcGetProgramLog c""
}
