//! The device that cases run on, for Burn and for kernels.

use crate::find;
use cubecl::{Device, client::Client};

/// A device, as one thread sees it.
#[derive(Clone)]
pub struct Target {
    /// As kernels' cases take it.
    pub kernels: blackburn_doctor::target::Target,
    /// As Burn takes it.
    pub device: burn::tensor::Device,
}

/// A device that threads make their own [`Target`] of.
#[derive(Clone)]
pub struct Found(Device);

impl Found {
    /// The device of that name: `webgpu` or `cuda`.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub fn new(name: &str) -> Result<Self, String> {
        find(Some(name)).map(Self)
    }

    /// The device, with a stream of this thread.
    pub fn target(&self) -> Target {
        Target::new(burn::tensor::Device::new(self.0.clone()), self.0.client())
    }

    /// What the device calls itself.
    pub fn name(&self) -> String {
        self.0.client().properties().identity.name.clone()
    }
}

impl Target {
    /// A device as Burn and as kernels' launchers take it.
    pub fn new(device: burn::tensor::Device, client: Client) -> Self {
        Self { kernels: blackburn_doctor::target::Target::new(client), device }
    }
}
