use super::{AttentionProblem, problem::unsupported, tile::PortableBlueprint};
use crate::{DeviceProfile, KernelError, matmul::Family};
use cubecl::client::Client;

/// How attention is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBlueprint {
    /// Which instructions multiply.
    pub family: Family,
    /// Queries of a tile.
    pub tile_q: usize,
    /// Keys of a tile.
    pub tile_kv: usize,
}

impl AttentionBlueprint {
    /// The plan that is expected to be fastest.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where no tile fits the device.
    pub fn plan(problem: &AttentionProblem, client: &Client) -> Result<Self, KernelError> {
        let device = DeviceProfile::of(client);
        Self::candidates_on(problem, device).into_iter().next().ok_or_else(|| {
            unsupported(format!(
                "head_dim {} with {} bytes of shared memory",
                problem.head_dim, device.shared_bytes
            ))
        })
    }

    /// Every plan that serves the problem on the client's device, the one expected to be fastest
    /// first; all of them are tested.
    pub fn candidates(problem: &AttentionProblem, client: &Client) -> Vec<Self> {
        Self::candidates_on(problem, DeviceProfile::of(client))
    }

    /// As [`candidates`](Self::candidates), on a device that need not be there.
    pub fn candidates_on(problem: &AttentionProblem, device: DeviceProfile) -> Vec<Self> {
        // Wide tiles read less memory, and need registers, which software devices do not have.
        let (unit_tiles, most): (&[u32], _) =
            if device.compute_capability.is_some() { (&[4, 2, 1], 3) } else { (&[2, 1], 1) };
        let portable = unit_tiles.iter().map(|unit_tile| {
            let kernel =
                PortableBlueprint { unit_tile: *unit_tile, head_dim: problem.head_dim as u32 };
            let side = kernel.side() as usize;
            let plan = Self { family: Family::Portable, tile_q: side, tile_kv: side };
            (plan, kernel.shared_bytes())
        });
        portable
            .filter(|(_, shared_bytes)| *shared_bytes <= device.shared_bytes)
            .map(|(plan, _)| plan)
            .take(most)
            .collect()
    }
}
