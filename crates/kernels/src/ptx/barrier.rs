use cubecl::prelude::*;

/// Makes the barrier at `address` expect `arrivals` a phase.
#[cube]
pub(crate) fn barrier_init(address: u32, arrivals: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(_) address, in(_) arrivals);
}

/// Shows initialized barriers to the copy engine.
#[cube]
pub(crate) fn barrier_init_fence() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// Arrives, and makes the phase wait for `bytes` of copies as well.
#[cube]
pub(crate) fn barrier_expect(address: u32, bytes: u32) {
    gpu_asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(_) address, in(_) bytes);
}

/// Arrives at the barrier at `address`, which counts one less to wait for.
#[cube]
pub(crate) fn barrier_arrive(address: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(_) address);
}

/// Among whose units a wait orders accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WaitScope {
    Cube,
    Cluster,
}

impl WaitScope {
    fn instruction(self) -> &'static str {
        match self {
            Self::Cube => "mbarrier.try_wait.parity.shared::cta.b64",
            Self::Cluster => "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64",
        }
    }
}

/// Waits until the phase of that parity is over.
#[cube]
pub(crate) fn barrier_wait(address: u32, parity: u32) {
    barrier_wait_in(address, parity, comptime!(WaitScope::Cube));
}

/// As [`barrier_wait`], for arrivals of the units of that scope.
#[cube]
pub(crate) fn barrier_wait_in(address: u32, parity: u32, #[comptime] among: WaitScope) {
    gpu_asm!(
        "{{",
        ".reg .pred done;",
        "WAIT:",
        "{wait} done, [{a}], {p};",
        "@done bra DONE;",
        "bra WAIT;",
        "DONE:",
        "}}",
        wait = const among.instruction(), a = in(_) address, p = in(_) parity
    );
}

/// Meets the other units that name the same `barrier`, 1 to 15: `units` of them, whole warps.
#[cube]
pub(crate) fn sync_group(barrier: u32, #[comptime] units: u32) {
    gpu_asm!("bar.sync {b}, {n};", b = in(_) barrier, n = const units);
}
