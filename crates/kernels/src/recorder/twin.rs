//! A client like another one, that keeps what is launched on it.

use super::server::{Launches, RecordingServer};
use cubecl::client::Client;
use cubecl_common::device::DeviceId;
use cubecl_server::kernel::CubeKernel;
use std::{
    mem,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
};

/// A client with the properties of another, so that the same kernels are launched on it, by the same names. It runs
/// nothing.
pub(crate) struct Twin {
    client: Client,
    launches: Launches,
}

impl Twin {
    /// `None` where a process has as many devices as their numbers allow.
    pub(crate) fn of(client: &Client) -> Option<Self> {
        /// Devices of a kind of their own: those of a kind share a thread with each other's numbers.
        const KIND: u16 = u16::MAX;
        static NEXT: AtomicU16 = AtomicU16::new(0);

        let device = DeviceId { type_id: KIND, index_id: NEXT.fetch_add(1, Ordering::Relaxed) };
        let launches = Launches::default();
        let properties = (client.properties().clone(), client.target_properties().clone());
        let server =
            RecordingServer::new(device, properties, None, Arc::clone(&launches), Arc::default());
        let client = Client::try_init(device, server).ok()?;
        Some(Self { client, launches })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The kernels that were launched since the last call for the first time, in order.
    pub(crate) fn take(&self) -> Vec<Box<dyn CubeKernel>> {
        // Launches are queued for the device's thread; this waits for them. A server that runs nothing has no errors.
        let _ = self.client.flush();
        let launches =
            mem::take(&mut *self.launches.lock().unwrap_or_else(PoisonError::into_inner));
        launches.into_iter().map(|launched| launched.kernel).collect()
    }
}
