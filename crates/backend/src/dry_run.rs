//! Work that is to come: its kernels, compiled ahead, and the memory that it would take, without the work.

/// Has Blackburn's kernels compiled several at a time again, ahead of their first launch. That ends where there were no
/// new ones for several thousand launches; call this where other work begins.
pub fn expect_kernels() {
    #[cfg(feature = "persistence")]
    crate::ahead::look_out();
}

/// Runs `work` without the kernels that it asks for, on any GPU and from any thread of the process: they are compiled,
/// and then left out. Memory that they would write to is counted by the device's pools and not taken from the device,
/// until it is written from the host or read. What is read holds anything.
///
/// Operations wait in queues. So wait for the device before this, or kernels that were asked for earlier are left out,
/// too, and at the end of `work`, or the last ones run. A CPU computes as ever.
pub fn dry_run<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(feature = "gpu")]
    let _open = cubecl::dry_run::DryRun::new();
    expect_kernels();
    let done = work();
    #[cfg(feature = "persistence")]
    crate::ahead::finish();
    done
}
