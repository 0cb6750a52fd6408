//! What the benches share: the device, and waiting for it.

use cubecl::{Device, client::Client};

/// The GPU to measure on: CUDA's first. Without one a bench says "skipped" and measures nothing.
pub fn device() -> Option<Device> {
    match Device::cuda(0) {
        Ok(device) => Some(device),
        Err(reason) => {
            eprintln!("skipped: {reason}. Benches need a GPU and --features cuda");
            None
        }
    }
}

/// Waits until the device has done all that was asked of it.
///
/// # Panics
///
/// When the device reports a fault: a time measured then would mean nothing.
pub fn sync(client: &Client) {
    cubecl::future::block_on(client.sync()).expect("the device failed during a bench");
}
