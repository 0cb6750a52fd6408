use super::forward::milestone_kernel;
use crate::{KernelError, ahead, buffer::Buffer};
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Adds one to `counter`, in place, behind all that this stream was asked for before.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where `counter` is not one u32.
pub fn milestone(client: &Client, counter: &Buffer) -> Result<(), KernelError> {
    counter.check("milestone", "counter", 1, ElemType::UInt(UIntKind::U32))?;
    // SAFETY: it is one element long, which one unit reads and writes.
    ahead::launch(client, |client| unsafe {
        milestone_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            counter.arg(1),
        )
    });
    Ok(())
}
