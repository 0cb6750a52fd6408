//! Libraries that are loaded at run time.

use libloading::Library;
use std::{
    ffi::{CStr, c_char, c_int},
    fmt,
};

/// What a function returns: 0 where it did what it was asked for.
pub(super) type Status = c_int;
/// `CUstream`.
pub(super) type Stream = *mut std::ffi::c_void;

/// Declares a struct of functions, and how it is loaded.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$meta])*
        pub(super) struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            // Unloaded last: the functions are its own.
            _library: libloading::Library,
        }

        impl $name {
            fn bind(library: libloading::Library) -> Result<Self, String> {
                $(
                    // SAFETY: the symbol has this signature in every version of the library that has it.
                    let $field = unsafe {
                        *library
                            .get::<unsafe extern "C" fn($($argument),*) -> $result>($symbol.as_bytes())
                            .map_err(|error| format!("it has no {}: {error}", $symbol))?
                    };
                )*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

pub(super) use functions;

/// A function of a library that failed.
#[derive(Debug)]
pub(super) struct CallFailed {
    pub(super) function: &'static str,
    pub(super) status: Status,
    pub(super) text: String,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} ({})", self.function, self.text, self.status)
    }
}

pub(super) fn load(names: &[String]) -> Result<Library, String> {
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: the initializers of these libraries may run at any time.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(format!("{name}: {error}")),
        }
    }
    Err(reasons.join("; "))
}

pub(super) fn text(text: *const c_char) -> String {
    if text.is_null() {
        return "no reason given".into();
    }
    // SAFETY: the libraries give texts that end with a zero and live as long as they do.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
