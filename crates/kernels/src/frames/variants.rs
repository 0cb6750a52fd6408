//! Calls that cover the plans: see [`variants`](crate::variants).

use super::{FrameProblem, FrameWalk, stack_frames};
use crate::{
    DeviceProfile, Promise,
    buffer::Buffer,
    variants::{FLOATS, Variant},
};
use cubecl::client::Client;

/// Three frames of a medical network's volumes, in every type.
pub(crate) fn variants(client: &Client) -> Vec<Variant> {
    let by_memory = Promise::registers(DeviceProfile::of(client).registers_when_full());
    FLOATS
        .map(|(dtype, name)| {
            Variant::new(name.into(), [("stack_frames", by_memory)], move |client| {
                let problem = FrameProblem {
                    volumes: 2,
                    frames: 64,
                    out_frames: 64,
                    pixels: 64 * 64,
                    groups: 1,
                    channels: 32,
                    walk: FrameWalk::of_output(3, 1, 1, 1),
                    dtype,
                };
                let x = Buffer::empty(client, problem.elements(), dtype);
                stack_frames(client, &problem, &x).map(drop)
            })
        })
        .into()
}
