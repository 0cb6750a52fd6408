//! What a kernel's plan depends on.

use crate::{Families, Family, FamilyOp, KernelError, family};
use cubecl::{
    CubeCount,
    client::Client,
    ir::{VectorSize, features::Plane},
};

/// Bytes that the copies of tensor cores, and the widest loads, begin at multiples of.
pub(crate) const ALIGNMENT_BYTES: usize = 16;

/// Bytes of a row of an operand's tile in shared memory, and of the depth of a block of k.
pub(crate) const ROW_BYTES: usize = 128;

/// Rows or columns of a block of scales.
pub(crate) const BLOCK_ROWS: usize = 128;

/// Four scales each of 128 rows or columns in shared memory: scale q of row r, counted along k, at byte
/// `16 (r mod 32) + 4 (r / 32) + q`, where `tcgen05.cp` takes them from, too.
pub(crate) const SCALE_BLOCK_BYTES: usize = 512;

/// A device, as far as plans depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceProfile {
    /// Compute capability of an NVIDIA GPU times ten: 80, 90, 120. `None` on other devices, and
    /// where CUDA kernels were left out of the build.
    pub compute_capability: Option<u32>,
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory a cube may take, in bytes.
    pub shared_bytes: usize,
    /// The families on tensor cores that it is offered, of those that it has instructions for.
    pub families: Families,
}

/// What tests plan for.
#[cfg(test)]
impl DeviceProfile {
    pub(crate) const H200: Self = Self {
        compute_capability: Some(90),
        multiprocessors: 132,
        shared_bytes: 232_448,
        families: Families::ALL,
    };
    pub(crate) const SOFTWARE: Self = Self {
        compute_capability: None,
        multiprocessors: 8,
        shared_bytes: 32_768,
        families: Families::PORTABLE,
    };
}

impl DeviceProfile {
    /// What to count on where the runtime tells nothing.
    const MULTIPROCESSORS: u32 = 8;

    /// Registers that a unit may have where a multiprocessor is to be full of units: of 65,536 for 2048, or
    /// for 1536 on Ada and Blackwell's workstations.
    pub(crate) fn registers_when_full(&self) -> u32 {
        match self.compute_capability {
            Some(86 | 89 | 120..) => 40,
            _ => 32,
        }
    }

    /// Whether warp products of 8 bits take scales of blocks of k: on Blackwell's workstations and desktops, whose
    /// products without scales run at half the rate.
    pub(crate) fn scales_warp_products(&self) -> bool {
        matches!(self.compute_capability, Some(120 | 121))
    }

    /// Whether plans of a family may be made for an operation, if the device has its instructions.
    pub fn is_offered(&self, op: FamilyOp, family: Family) -> bool {
        self.families.has(op, family)
    }

    /// The device of `client`.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        // CUDA's runtime names what it compiles for.
        let compute_capability = properties
            .identity
            .fingerprint
            .strip_prefix("ptx_sm")
            .filter(|_| cfg!(feature = "cuda"))
            .and_then(|version| version.parse().ok());
        Self {
            compute_capability,
            families: compute_capability.map_or(Families::PORTABLE, family::offered),
            multiprocessors: hardware.num_streaming_multiprocessors.unwrap_or(Self::MULTIPROCESSORS)
                as usize,
            shared_bytes: hardware.max_shared_memory_size,
        }
    }
}

/// That many cubes along x, y and z.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the device cannot launch so many.
pub(crate) fn grid(
    op: &'static str,
    client: &Client,
    cubes: [usize; 3],
) -> Result<CubeCount, KernelError> {
    let most = client.properties().hardware.max_cube_count;
    match cubes.map(u32::try_from) {
        [Ok(x), Ok(y), Ok(z)] if x <= most.0 && y <= most.1 && z <= most.2 => {
            Ok(CubeCount::Static(x, y, z))
        }
        _ => Err(KernelError::unsupported(op, format!("{cubes:?} cubes"))),
    }
}

/// The widest vectors that the device gains from, of elements of that many bytes, among those that `fit`.
pub(crate) fn widest_vector(
    client: &Client,
    bytes: usize,
    fit: impl Fn(usize) -> bool,
) -> VectorSize {
    client.io_optimized_vector_sizes(bytes).filter(|size| fit(*size)).max().unwrap_or(1)
}

/// Units that exchange numbers without shared memory: those of a plane, or 1 where the device has no such exchange or
/// does not say how many a plane has.
pub fn plane_units(client: &Client) -> u32 {
    let properties = client.properties();
    let hardware = &properties.hardware;
    let is_one_size = hardware.plane_size_min == hardware.plane_size_max;
    let has_planes = properties.features.plane.contains(Plane::Ops) && is_one_size;
    if has_planes { hardware.plane_size_max.max(1) } else { 1 }
}
