//! Clusters: cubes that run at once on neighboring multiprocessors and reach each other's shared memory (PTX ISA, "mapa",
//! "barrier.cluster", "mbarrier.arrive").
//!
//! An arrival at a barrier of another cube, and the wait for it, order what both cubes do only if they say so.

use super::{
    barrier::{WaitScope, barrier_wait_in},
    load,
};
use cubecl::prelude::*;

/// Which of the cluster's cubes this one is, of `cubes` that follow each other along x.
#[cube]
pub(crate) fn cube_rank(#[comptime] cubes: u32) -> u32 {
    CUBE_POS_X % cubes
}

/// The place in the shared memory of the cluster's first cube that `address` is in this one's.
#[cube]
pub(crate) fn in_first_cube(address: u32) -> u32 {
    let there: u32;
    gpu_asm!("mapa.shared::cluster.u32 {t}, {a}, 0;", t = out(_) there, a = in(_) load::<u32>(address));
    load::<u32>(there)
}

/// Arrives at a barrier of any cube of the cluster, and tells the cube that waits for it what this unit did.
#[cube]
pub(crate) fn barrier_arrive_in_cluster(address: u32) {
    gpu_asm!("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{}];", in(_) address);
}

/// Waits until the phase of that parity is over of a barrier of this cube, at which others arrive, too.
#[cube]
pub(crate) fn barrier_wait_for_cluster(address: u32, parity: u32) {
    barrier_wait_in(address, parity, comptime!(WaitScope::Cluster));
}

/// Meets all units of the cluster.
#[cube]
pub(crate) fn sync_cluster() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;");
}

/// Writes a number to a place in the shared memory of any cube of the cluster.
#[cube]
pub(crate) fn store_in_cluster(address: u32, number: f32) {
    gpu_asm!("st.shared::cluster.f32 [{}], {};", in(_) load::<u32>(address), in(_) load::<f32>(number));
}
