//! What kernels tell of the largest magnitudes that they wrote, for a cast to 8 bits that follows.

use super::marked;
use blackburn_kernels::{buffer::Buffer, magnitude::Magnitudes};

/// Whether a kernel should tell them: a weight is marked whose products round tensors by one scale each.
pub(crate) fn are_wanted() -> bool {
    marked::rounds_tensors()
}

/// Keeps the magnitudes of what `written` holds until it is cast, and the memory as it is.
pub(crate) fn keep(written: &Buffer, magnitudes: Option<Magnitudes>) {
    if let Some(magnitudes) = magnitudes {
        marked::keep_magnitudes(&written.handle, (written.elements, magnitudes));
    }
}
