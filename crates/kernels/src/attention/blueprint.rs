use super::{
    AttentionProblem,
    mma_plan::{MMA_TILE_Q, MOST_OWN_COLUMNS, MOVING, rows_bytes},
    problem::{HeadStrides, OP, unsupported},
    tile::PortableBlueprint,
};
use crate::{
    DeviceProfile, Family, FamilyOp, KernelError, Pass, device::ALIGNMENT_BYTES, plan::tell_plan,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use std::fmt;

/// How attention is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionBlueprint {
    /// Which instructions multiply.
    pub family: Family,
    /// Queries of a tile.
    pub tile_q: usize,
    /// Keys of a tile.
    pub tile_kv: usize,
    /// Whether the backward pass computes each pair's products once, five instead of seven, and tiles of keys
    /// add to the gradient of q in global memory. Its additions are in no order: other bits each time, by
    /// roundings of f32 before the one to the type of q.
    pub atomic: bool,
    /// Whether the forward pass divides the keys of a head among cubes, `tile_kv` for each, and a second kernel merges
    /// what they found. `tile_q` counts the rows that share keys then: queries of all heads that one of keys serves.
    pub split: bool,
    /// Whether a kernel finds which keys each block of 64 queries sees through the mask, and a bit for each pair, before a
    /// pass. Tiles that are masked as a whole are then left out, and tiles that are not masked at all do not read it.
    pub maps_mask: bool,
}

/// Shared memory of the `tcgen05` family at least: the queries and two tiles of keys or values, or backward keys, values,
/// three tiles that come in, gradients of weights and 3 KiB of terms of rows; and at most 256 bytes of barriers.
pub(super) const fn tcgen05_bytes(pass: Pass, head_dim: usize) -> usize {
    let side = TCGEN05_SIDE;
    256 + match pass {
        Pass::Forward => rows_bytes(2 * head_dim, 4 * side),
        Pass::Backward => {
            rows_bytes(2 * head_dim, 5 * side) + rows_bytes(2 * side, side) + (3 << 10)
        }
    }
}

/// Keys of a tile on the tensor cores of Blackwell's data-center GPUs. Forward a tile has twice as many queries.
const TCGEN05_SIDE: usize = 128;
/// Queries of a tile on Hopper's tensor cores, by two warpgroups, and by three.
const WGMMA_TILE_Q: [usize; 2] = [128, 192];
/// A row of the wider tile takes so much of one of the other, in percent: three warpgroups keep the unit for exponentials
/// busier than two. On an H200 it is 84 to 88, of 1024 to 8192 keys.
const WIDE_ROW_PERCENT: usize = 85;
/// From so many queries and keys on, plans that compute products once come first.
const ATOMIC_SEQ: usize = 512;
/// A third warpgroup of such plans is worth so much of two, in percent: one's products hide another's exponentials,
/// and fewer tiles of keys add to dq. An estimate.
const THIRD_GROUP_PERCENT: usize = 115;
/// Shared memory that the largest of them needs: two tiles of each tensor, and two of dS.
const ATOMIC_BYTES: usize = 168 << 10;

/// Queries that plans are made for that divide keys among cubes.
const SPLIT_SEQ_Q: usize = 16;
/// Rows that share keys, and keys, with which such a plan comes first: its cubes read the keys once or twice.
const SPLIT_ROWS: usize = 16;
const SPLIT_SEQ_KV: usize = 128;
/// Arithmetic of the forward pass over all pairs from which on a map of the mask is worth a launch: some 10 us on an H200. An
/// estimate.
const MAP_FLOPS: usize = 4_000_000_000;

/// Relative error of the polynomials that take the place of some exponentials.
pub(super) const POLYNOMIAL_ERROR: f64 = 8.57e-5;

/// Whether the type is one of 16 bits.
pub(super) fn is_half(dtype: ElemType) -> bool {
    [FloatKind::BF16, FloatKind::F16].map(ElemType::Float).contains(&dtype)
}

/// Whether sums of dq, filled up to whole tiles, are counted by 32 bits.
fn fits_sums(problem: &AttentionProblem) -> bool {
    let tiles = problem.rows_q() / 64 + problem.packed.map_or(1, |_| problem.batch);
    let elements = problem.tensor_batch() * problem.heads_q * tiles * 64 * problem.head_dim;
    u32::try_from(elements).is_ok()
}

impl AttentionBlueprint {
    /// The plan that is expected to be fastest.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] where no tile fits the device.
    pub fn plan(
        problem: &AttentionProblem,
        pass: Pass,
        client: &Client,
    ) -> Result<Self, KernelError> {
        let device = DeviceProfile::of(client);
        let plans = Self::candidates_on(problem, pass, device);
        let Some(plan) = plans.first() else {
            return Err(unsupported(format!(
                "head_dim {} with {} bytes of shared memory",
                problem.head_dim, device.shared_bytes
            )));
        };
        let is_twice = pass == Pass::Backward && plan.family == Family::Wgmma && !plan.atomic;
        let twice = if is_twice { Self::why_twice(problem, device) } else { None };
        let why = twice.map(|why| format!("; products computed twice: {why}")).unwrap_or_default();
        let reason = format_args!("{pass}, the first of {} that serve it{why}", plans.len());
        tell_plan(OP, problem, plan, reason);
        Ok(*plan)
    }

    /// Every plan that serves the problem on the client's device, the one expected to be fastest
    /// first; all of them are tested.
    pub fn candidates(problem: &AttentionProblem, pass: Pass, client: &Client) -> Vec<Self> {
        Self::candidates_on(problem, pass, DeviceProfile::of(client))
    }

    /// As [`candidates`](Self::candidates), on a device that need not be there.
    pub fn candidates_on(
        problem: &AttentionProblem,
        pass: Pass,
        device: DeviceProfile,
    ) -> Vec<Self> {
        let plans = Self::unmapped(problem, pass, device);
        if !problem.may_map_mask() {
            return plans;
        }
        // Kernels that read a map have room for the tiles that they have without a mask.
        let mut mapped = Self::unmapped(&AttentionProblem { mask: None, ..*problem }, pass, device);
        // Three warpgroups have no registers for words of the map.
        mapped.retain(|plan| !plan.split && !plan.is_wide());
        mapped.iter_mut().for_each(|plan| plan.maps_mask = true);
        let AttentionProblem { batch, heads_q, seq_q, seq_kv, head_dim, .. } = *problem;
        let flops = [heads_q, seq_q, seq_kv, head_dim]
            .into_iter()
            .fold(batch.saturating_mul(4), usize::saturating_mul);
        if flops < MAP_FLOPS { [plans, mapped].concat() } else { [mapped, plans].concat() }
    }

    /// The plans without maps of masks.
    fn unmapped(problem: &AttentionProblem, pass: Pass, device: DeviceProfile) -> Vec<Self> {
        // Wide tiles read less memory, and need registers, which software devices do not have.
        let (unit_tiles, most): (&[u32], _) =
            if device.compute_capability.is_some() { (&[4, 2, 1], 3) } else { (&[2, 1], 1) };
        let portable = unit_tiles.iter().map(|unit_tile| {
            let kernel =
                PortableBlueprint { unit_tile: *unit_tile, head_dim: problem.head_dim as u32 };
            let side = kernel.side() as usize;
            let plan = Self {
                family: Family::Portable,
                tile_q: side,
                tile_kv: side,
                atomic: false,
                split: false,
                maps_mask: false,
            };
            (plan, kernel.shared_bytes())
        });
        let portable = portable
            .filter(|(_, shared_bytes)| *shared_bytes <= device.shared_bytes)
            .map(|(plan, _)| plan)
            .take(most);
        let is_offered = |family| device.is_offered(FamilyOp::Attention, family);
        let is_hopper = device.compute_capability == Some(90) && is_offered(Family::Wgmma);
        let wgmma = if is_hopper { Self::wgmma(problem, pass, device) } else { Vec::new() };
        let is_tcgen05 = matches!(device.compute_capability, Some(100 | 103));
        let tcgen05 = if is_tcgen05 && is_offered(Family::Tcgen05) {
            Self::tcgen05(problem, pass, device)
        } else {
            None
        };
        let mma = match device.compute_capability {
            Some(capability) if capability >= 80 && is_offered(Family::Mma) => {
                Self::mma(problem, pass, device)
            }
            _ => None,
        };
        let atomic = if is_hopper && pass == Pass::Backward {
            Self::once(problem, device)
        } else {
            Vec::new()
        };
        // A short sequence has few tiles to work on, and two kernels more to wait for.
        let (before, after) = if problem.seq_q.min(problem.seq_kv) >= ATOMIC_SEQ {
            (atomic, Vec::new())
        } else {
            (Vec::new(), atomic)
        };
        let split = if pass == Pass::Forward && problem.seq_q <= SPLIT_SEQ_Q {
            Self::splitting(problem, device)
        } else {
            Vec::new()
        };
        // Few rows leave tensor cores and most cubes idle; of few keys there is nothing to divide.
        let rows = problem.heads_q / problem.heads_kv * problem.seq_q;
        let is_best = rows <= SPLIT_ROWS && problem.seq_kv >= SPLIT_SEQ_KV;
        let (first, last) = if is_best { (split, Vec::new()) } else { (Vec::new(), split) };
        first
            .into_iter()
            .chain(before)
            .chain(tcgen05)
            .chain(wgmma)
            .chain(after)
            .chain(mma)
            .chain(portable)
            .chain(last)
            .collect()
    }

    /// Whether three warpgroups of Hopper multiply instead of two.
    pub(super) fn is_wide(&self) -> bool {
        self.family == Family::Wgmma && self.tile_q == WGMMA_TILE_Q[1]
    }

    /// Whether some exponentials of the forward pass are computed by polynomials: where they are what it waits for, and
    /// weights are rounded to bf16, by 20 times what a polynomial is off. Blackwell Ultra (`sm_103a`) has twice as many
    /// units for exponentials.
    pub(super) fn takes_polynomials(dtype: ElemType, device: DeviceProfile) -> bool {
        dtype == ElemType::Float(FloatKind::BF16) && device.compute_capability == Some(100)
    }

    /// How far off weights of the forward pass may be on the client's device, relatively, besides the error of
    /// exponentials of f32.
    pub fn exponential_error(dtype: ElemType, client: &Client) -> f64 {
        if Self::takes_polynomials(dtype, DeviceProfile::of(client)) {
            POLYNOMIAL_ERROR
        } else {
            0.0
        }
    }

    /// Whether the backward pass by this plan can give the gradient of a bias.
    pub fn gives_bias_gradient(&self, problem: &AttentionProblem, client: &Client) -> bool {
        self.family == Family::Portable || Self::mma_gives_bias(problem, DeviceProfile::of(client))
    }

    /// Whether the same input gives the same bits each time.
    pub fn is_deterministic(&self) -> bool {
        !self.atomic
    }

    /// Whether tensor cores take a problem of 16-bit types.
    fn suits_tensor_cores(problem: &AttentionProblem) -> bool {
        is_half(problem.dtype) && Self::has_whole_chunks(problem)
    }

    /// Whether rows lie in whole chunks of 16 bytes, as they are copied.
    pub(super) fn has_whole_chunks(problem: &AttentionProblem) -> bool {
        let tensors = [
            (problem.q, problem.heads_q, problem.rows_q()),
            (problem.k, problem.heads_kv, problem.rows_kv()),
            (problem.v, problem.heads_kv, problem.rows_kv()),
        ];
        let is_aligned =
            |(HeadStrides { batch, head, row }, heads, seq): (HeadStrides, usize, usize)| {
                let steps = [(batch, problem.tensor_batch()), (head, heads), (row, seq)];
                steps.into_iter().all(|(stride, size)| {
                    let bytes = stride * problem.dtype.size();
                    size == 1 || (stride > 0 && bytes.is_multiple_of(ALIGNMENT_BYTES))
                })
            };
        problem.head_dim.is_multiple_of(16)
            && problem.scale > 0.0
            && tensors.into_iter().all(is_aligned)
    }

    /// The plan by the instructions of Blackwell's data-center GPUs, if they serve the problem: scores and sums fill
    /// tensor memory.
    fn tcgen05(problem: &AttentionProblem, pass: Pass, device: DeviceProfile) -> Option<Self> {
        let atomic = pass == Pass::Backward;
        let serves = problem.head_dim <= 128
            && Self::suits_tensor_cores(problem)
            && (!atomic || !problem.deterministic && fits_sums(problem))
            && tcgen05_bytes(pass, problem.head_dim) <= device.shared_bytes;
        let tile_q = if atomic { TCGEN05_SIDE } else { 2 * TCGEN05_SIDE };
        let family = Family::Tcgen05;
        serves.then_some(Self {
            family,
            tile_q,
            tile_kv: TCGEN05_SIDE,
            atomic,
            split: false,
            maps_mask: false,
        })
    }

    /// The plans by Hopper's instructions, if they serve the problem.
    fn wgmma(problem: &AttentionProblem, pass: Pass, device: DeviceProfile) -> Vec<Self> {
        // Two sums of wider rows do not fit the registers.
        let fits = pass == Pass::Forward || problem.head_dim <= MOST_OWN_COLUMNS;
        if !fits || !Self::suits_tensor_cores(problem) {
            return Vec::new();
        }
        // Scores and outputs have to fit the registers, and what options compute beside them.
        let has_options = problem.softcap.is_some()
            || problem.mask.is_some()
            || problem.bias.is_some()
            || problem.dropout.is_some();
        let tile_kv = match problem.head_dim {
            ..=64 => 128,
            65..=128 if !has_options => 128,
            128 => 64,
            _ if !has_options => 64,
            _ => return Vec::new(),
        };
        let of = |tile_q| Self {
            family: Family::Wgmma,
            tile_q,
            tile_kv,
            atomic: false,
            split: false,
            maps_mask: false,
        };
        let [narrow, wide] = WGMMA_TILE_Q;
        // Three warpgroups have 160 registers a unit: enough for short rows and nothing beside them.
        let is_plain = !has_options && problem.packed.is_none();
        if pass == Pass::Backward || problem.head_dim > 64 || !is_plain {
            return vec![of(narrow)];
        }
        // Every multiprocessor computes as many tiles as the busiest.
        let rows = |tile_q: usize| {
            let tiles = problem.seq_q.div_ceil(tile_q) * problem.heads_q * problem.batch;
            tiles.div_ceil(device.multiprocessors.max(1)) * tile_q
        };
        // A window hides more of a wider tile, and two warpgroups that take turns are faster then.
        let has_window = problem.window.left.is_some() || problem.window.right.is_some();
        let is_wide = !has_window && rows(wide) * WIDE_ROW_PERCENT < rows(narrow) * 100;
        if is_wide { vec![of(wide), of(narrow)] } else { vec![of(narrow), of(wide)] }
    }

    /// The plans by Hopper's instructions that compute products once, if they serve the problem.
    fn once(problem: &AttentionProblem, device: DeviceProfile) -> Vec<Self> {
        let AttentionProblem { head_dim, softcap, mask, bias, packed, .. } = *problem;
        let refused = Self::why_never_atomic(problem, device);
        if refused.is_some() || !Self::suits_tensor_cores(problem) {
            return Vec::new();
        }
        let of = |tile_kv| Self {
            family: Family::Wgmma,
            tile_q: MMA_TILE_Q,
            tile_kv,
            atomic: true,
            split: false,
            maps_mask: false,
        };
        if head_dim > MOST_OWN_COLUMNS {
            return vec![of(MOVING)];
        }
        // A third warpgroup has fewer registers: too few for wide heads and for most options.
        let has_options = softcap.is_some() || mask.is_some() || bias.is_some() || packed.is_some();
        if head_dim > 64 || has_options {
            return vec![of(128)];
        }
        // Keys that the last tile has in vain take as long as others.
        let padded = |tile: usize| problem.seq_kv.next_multiple_of(tile);
        if padded(192) * 100 > padded(128) * THIRD_GROUP_PERCENT {
            vec![of(128), of(192)]
        } else {
            vec![of(192), of(128)]
        }
    }

    /// Why no plan computes products once, of what Hopper's instructions serve.
    fn why_never_atomic(problem: &AttentionProblem, device: DeviceProfile) -> Option<&'static str> {
        let AttentionProblem { head_dim, softcap, bias, deterministic, .. } = *problem;
        // With these the sums of wide heads leave too few registers for what is computed beside them.
        let is_crowded = head_dim > 64 && (softcap.is_some() || bias.is_some());
        [
            (deterministic, "the same bits each time"),
            (is_crowded, "no registers for a cap or a bias in heads above 64"),
            (!fits_sums(problem), "more than 2^32 sums of dq"),
            (device.shared_bytes < ATOMIC_BYTES, "little shared memory"),
        ]
        .into_iter()
        .find_map(|(holds, why)| holds.then_some(why))
    }

    /// Why the first plan is not one that computes products once.
    fn why_twice(problem: &AttentionProblem, device: DeviceProfile) -> Option<&'static str> {
        let is_short = problem.seq_q.min(problem.seq_kv) < ATOMIC_SEQ;
        Self::why_never_atomic(problem, device).or(is_short.then_some("a short sequence"))
    }
}

impl fmt::Display for AttentionBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, tile_q, tile_kv, atomic, split, maps_mask } = self;
        if *split {
            return write!(f, "{family}, tiles of {tile_q} rows, {tile_kv} keys a cube, merged");
        }
        write!(f, "{family}, tiles of {tile_q} queries by {tile_kv} keys")?;
        if *atomic {
            write!(f, ", products once, atomic dq")?;
        }
        if *maps_mask { write!(f, ", mask mapped") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
