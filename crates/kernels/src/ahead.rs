//! Launches, and a look at the kernels of those to come.
//!
//! CubeCL compiles a kernel when the device's thread comes to its first launch, one kernel after another, and a model's
//! first step waits for some 80 of them. With the feature `recorder`, [`watch`] shows each new kernel to a sink as soon
//! as it is asked for. The device's thread is up to 64 tasks behind then, so the sink may compile several at a time, and
//! have the device's thread wait for the one it has come to.
//!
//! To see a kernel, a launch is made on a recording client first, which has the properties of the device's. Launchers
//! know nothing of it: they launch within `launch` and take arguments from `argument`. A look costs some
//! microseconds, so after 2048 launches without a new kernel, or when the sink has them all and calls [`rest`], nobody
//! looks any more, until [`arm`] is called.

use cubecl::{client::Client, server::Handle};

#[cfg(feature = "recorder")]
pub use watched::{KernelSink, Wait, arm, rest, watch};

/// Whether a launch that this thread makes is only looked at, and not run.
pub fn is_looking() -> bool {
    #[cfg(feature = "recorder")]
    return watched::is_looking();
    #[cfg(not(feature = "recorder"))]
    false
}

/// Launches by `launch` on `client`. `launch` may be called twice, and builds its arguments each time.
pub(crate) fn launch<R>(client: &Client, launch: impl Fn(&Client) -> R) -> R {
    #[cfg(feature = "recorder")]
    if let Some(result) = watched::look(client, &launch) {
        return result;
    }
    launch(client)
}

/// Memory as an argument of a launch, for whichever client that is on.
pub(crate) fn argument(memory: &Handle) -> Handle {
    #[cfg(feature = "recorder")]
    if let Some(stand_in) = watched::stand_in(memory) {
        return stand_in;
    }
    memory.clone()
}

#[cfg(feature = "recorder")]
mod watched {
    use crate::recorder::Twin;
    use cubecl::{client::Client, dry_run::dry_run, launched::LaunchedKernels, server::Handle};
    use cubecl_common::{
        device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId},
        device_handle::DeviceHandle,
        hash::StableHash,
    };
    use cubecl_server::kernel::CubeKernel;
    use std::{
        cell::RefCell,
        collections::{HashMap, HashSet},
        sync::{
            Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError,
            atomic::{AtomicUsize, Ordering},
        },
    };

    /// Launches of known kernels after which nobody looks any more: several steps of a large model.
    const QUIET_LAUNCHES: usize = 2048;

    /// What the device's thread does before it comes to the launch of a kernel.
    pub type Wait = Box<dyn FnOnce() + Send>;

    /// Is given each kernel once, on the thread that launches it.
    pub type KernelSink = Box<dyn Fn(Box<dyn CubeKernel>) -> Wait + Send + Sync>;

    /// Makes the sink of a device, if its kernels are of interest.
    type Opener = fn(&Client) -> Option<KernelSink>;

    static OPENER: OnceLock<Opener> = OnceLock::new();

    /// Looks that are left until the next new kernel.
    static LOOKS: AtomicUsize = AtomicUsize::new(0);

    /// Devices that were launched on, and who looks there.
    static WATCHES: LazyLock<Mutex<HashMap<ServiceId, Option<Arc<Watch>>>>> =
        LazyLock::new(Mutex::default);

    thread_local! {
        /// What stands in for the memory of arguments while this thread looks at a launch.
        static STAND_IN: RefCell<Option<Handle>> = const { RefCell::new(None) };
    }

    /// Has kernels shown to the sink that `opener` makes of a device when something is launched there for the first
    /// time. The first call counts.
    pub fn watch(opener: Opener) {
        if OPENER.set(opener).is_ok() {
            arm();
        }
    }

    /// Has launches looked at again, if anybody watches.
    pub fn arm() {
        if OPENER.get().is_some() {
            LOOKS.store(QUIET_LAUNCHES, Ordering::Relaxed);
        }
    }

    /// Has launches no longer looked at.
    pub fn rest() {
        LOOKS.store(0, Ordering::Relaxed);
    }

    pub(super) fn is_looking() -> bool {
        STAND_IN.with_borrow(Option::is_some)
    }

    /// What stands in for `memory` while this thread looks.
    pub(super) fn stand_in(memory: &Handle) -> Option<Handle> {
        let Handle { memory: place, service, stream, .. } = STAND_IN.with_borrow(Clone::clone)?;
        // As large, so that kernels count its elements in as many bits, and a part of it begins within.
        let mut stand_in = Handle::from_memory(place, service, stream, memory.size());
        (stand_in.offset_start, stand_in.offset_end) = (memory.offset_start, memory.offset_end);
        Some(stand_in)
    }

    /// Looks at what `launch` would launch on `client`. The result is there if that was all that is to be done: in a dry
    /// run.
    pub(super) fn look<R>(client: &Client, launch: &impl Fn(&Client) -> R) -> Option<R> {
        // Most launches of a program find none left, and write nothing.
        if LOOKS.load(Ordering::Relaxed) == 0 || is_looking() {
            return None;
        }
        // Launches on devices that nobody watches leave the looks of the others.
        let watch = watch_of(client)?;
        let take = |left: usize| left.checked_sub(1);
        LOOKS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        let (result, is_new) = watch.look(launch);
        if is_new {
            LOOKS.store(QUIET_LAUNCHES, Ordering::Relaxed);
        }
        dry_run().then_some(result)
    }

    fn watch_of(client: &Client) -> Option<Arc<Watch>> {
        let service = client.service_id();
        if let Some(known) = lock(&WATCHES).get(&service) {
            return known.clone();
        }
        let watch =
            OPENER.get().and_then(|open| Some(Arc::new(Watch::new(client, open(client)?)?)));
        lock(&WATCHES).entry(service).or_insert(watch).clone()
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the launches on a device.
    struct Watch {
        twin: Twin,
        /// Memory of the twin.
        stand_in: Handle,
        sink: KernelSink,
        /// Kernels that the sink has.
        known: Mutex<HashSet<StableHash>>,
        device: DeviceHandle<Turn>,
    }

    impl Watch {
        fn new(client: &Client, sink: KernelSink) -> Option<Self> {
            let twin = Twin::of(client)?;
            let stand_in = twin.client().empty(1);
            let device = DeviceHandle::new(client.service_id().device);
            Some(Self { twin, stand_in, sink, known: Mutex::default(), device })
        }

        /// What `launch` gives on the twin, and whether a new kernel was among what it launched.
        fn look<R>(&self, launch: &impl Fn(&Client) -> R) -> (R, bool) {
            let launched = LaunchedKernels::new();
            let result = {
                let _looking = Looking::with(self.stand_in.clone());
                launch(self.twin.client())
            };
            let launched = launched.finish();
            let mut known = lock(&self.known);
            if launched.iter().all(|kernel| known.contains(kernel)) {
                return (result, false);
            }
            // Not all that was launched is known now: other threads launched on other devices meanwhile.
            let new = self.twin.take();
            let is_new = !new.is_empty();
            // Other threads wait here until the device knows that it has to wait for these kernels, too.
            for kernel in new {
                known.insert(kernel.id().stable_hash());
                let wait = (self.sink)(kernel);
                if !dry_run() {
                    self.device.submit(|_| wait());
                }
            }
            (result, is_new)
        }
    }

    /// This thread looks as long as it lives.
    struct Looking;

    impl Looking {
        fn with(stand_in: Handle) -> Self {
            STAND_IN.set(Some(stand_in));
            Self
        }
    }

    impl Drop for Looking {
        fn drop(&mut self) {
            STAND_IN.set(None);
        }
    }

    /// A service of a device that does nothing: what it is asked for comes in its turn with what the device is asked for.
    struct Turn;

    impl DeviceService for Turn {
        fn init(_: DeviceId) -> Self {
            Self
        }

        fn utilities(&self) -> ServerUtilitiesHandle {
            Arc::new(())
        }
    }
}

#[cfg(all(test, feature = "recorder"))]
mod tests {
    use super::*;
    use crate::{
        recorder::{Gpu, Recorder},
        variants::variants,
    };
    use cubecl::dry_run::DryRun;
    use cubecl_common::device::ServiceId;
    use cubecl_server::id::KernelId;
    use std::{
        collections::HashSet,
        sync::{
            Mutex,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    /// The devices of the test, and what is shown of each: others launch on theirs at the same time.
    static SHOWN: Mutex<Vec<(ServiceId, Vec<KernelId>)>> = Mutex::new(Vec::new());
    static WAITED: AtomicUsize = AtomicUsize::new(0);

    fn open(client: &Client) -> Option<KernelSink> {
        let device = client.service_id();
        let place = SHOWN.lock().unwrap().iter().position(|(watched, _)| *watched == device)?;
        Some(Box::new(move |kernel| {
            SHOWN.lock().unwrap()[place].1.push(kernel.id());
            Box::new(|| _ = WAITED.fetch_add(1, Ordering::Relaxed))
        }))
    }

    #[test]
    fn what_stands_in_for_part_of_memory_is_as_large() {
        let recorder = Recorder::new(Gpu::SM_90A);
        let client = recorder.client();
        SHOWN.lock().unwrap().push((client.service_id(), Vec::new()));
        watch(open);
        arm();
        let part = client.empty(4096).offset_start(1024);
        let sizes = Mutex::new(Vec::new());
        launch(client, |_| sizes.lock().unwrap().push(argument(&part).size_in_used()));
        assert_eq!(sizes.into_inner().unwrap(), [3072; 2]);
    }

    #[test]
    fn what_others_launch_meanwhile_is_still_shown() {
        let [watched, other] = [(); 2].map(|()| Recorder::new(Gpu::SM_90A));
        let device = watched.client().service_id();
        SHOWN.lock().unwrap().push((device, Vec::new()));
        watch(open);
        arm();
        let launch_first = |client: &Client| variants(client)[0].launch(client).unwrap();
        launch(watched.client(), |_| {
            thread::scope(|scope| scope.spawn(|| launch_first(other.client())).join().unwrap());
        });
        launch_first(watched.client());
        let shown = SHOWN.lock().unwrap();
        let (_, kernels) = shown.iter().find(|(watched, _)| *watched == device).unwrap();
        assert!(!kernels.is_empty());
    }

    #[test]
    fn every_kernel_is_shown_once_and_waited_for() {
        let recorders = [(); 2].map(|()| Recorder::new(Gpu::SM_90A));
        let watched = recorders.each_ref().map(|of| (of.client().service_id(), Vec::new()));
        SHOWN.lock().unwrap().extend(watched);
        watch(open);
        let launch_all = |on: &Recorder| {
            arm();
            for variant in variants(on.client()) {
                variant.launch(on.client()).unwrap();
            }
            let launched = on.take().unwrap();
            launched.iter().map(|launched| launched.kernel.id()).collect::<Vec<_>>()
        };
        let shown = |place: usize| {
            let device = recorders[place].client().service_id();
            let all = SHOWN.lock().unwrap();
            all.iter().find(|(watched, _)| *watched == device).unwrap().1.clone()
        };
        let set = |ids: &[KernelId]| ids.iter().cloned().collect::<HashSet<_>>();
        // Whole names of kernels fill pages.
        let missing = |from: &[KernelId], of: &[KernelId]| -> Vec<&str> {
            set(from).difference(&set(of)).map(KernelId::type_name).collect()
        };

        let launched = launch_all(&recorders[0]);
        let first = shown(0);
        assert!(first.len() > 200, "{}", first.len());
        assert_eq!(first.len(), set(&first).len());
        assert_eq!(missing(&launched, &first), [""; 0]);
        assert_eq!(missing(&first, &launched), [""; 0]);
        assert_eq!(WAITED.load(Ordering::Relaxed), first.len());
        assert!(!is_looking());

        // Known ones are not shown again.
        launch_all(&recorders[0]);
        assert_eq!(shown(0).len(), first.len());

        // In a dry run nothing is launched, and nobody waits.
        let launched = {
            let _dry = DryRun::new();
            launch_all(&recorders[1])
        };
        assert!(launched.is_empty(), "{}", launched.len());
        assert_eq!(missing(&first, &shown(1)), [""; 0]);
        assert_eq!(WAITED.load(Ordering::Relaxed), first.len());
    }
}
