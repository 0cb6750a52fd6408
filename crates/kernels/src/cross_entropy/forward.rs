use super::CrossEntropyBlueprint;
use crate::functions::exponential_by;
use cubecl::prelude::*;

/// What was seen of a row.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Seen {
    /// The largest logit.
    pub(crate) peak: f32,
    /// The sum of `exp(logit - peak)`.
    pub(crate) total: f32,
    /// The sum of the logits, with smoothing.
    pub(crate) sum: f32,
}

/// Nothing. The peak is finite, so that no difference of infinities comes of it.
#[cube]
pub(crate) fn nothing() -> Seen {
    Seen { peak: f32::min_value(), total: 0.0f32.runtime(), sum: 0.0f32.runtime() }
}

/// Adds logits to what was seen. NaN need not become the peak: it stays in the total.
#[cube]
fn see<N: Size>(
    seen: &mut Seen,
    logits: Vector<f32, N>,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[comptime] is_smoothed: bool,
) {
    let hardware = comptime!(blueprint.hardware);
    let mut peak = seen.peak;
    #[unroll]
    for i in 0..N::value().comptime() {
        peak = max(peak, logits.extract(i));
    }
    let mut total = seen.total * exponential_by(seen.peak - peak, hardware);
    #[unroll]
    for i in 0..N::value().comptime() {
        total += exponential_by(logits.extract(i) - peak, hardware);
    }
    if comptime!(is_smoothed) {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..N::value().comptime() {
            sum += logits.extract(i);
        }
        seen.sum += sum;
    }
    seen.peak = peak;
    seen.total = total;
}

/// Adds what another unit saw of the same row.
#[cube]
fn join(seen: &mut Seen, other: &Seen, #[comptime] blueprint: CrossEntropyBlueprint) {
    let hardware = comptime!(blueprint.hardware);
    let peak = max(seen.peak, other.peak);
    seen.total = seen.total * exponential_by(seen.peak - peak, hardware)
        + other.total * exponential_by(other.peak - peak, hardware);
    seen.sum += other.sum;
    seen.peak = peak;
}

/// Adds what the other units of the row saw. All units of the cube have to call it.
#[cube]
pub(crate) fn join_row(
    seen: &mut Seen,
    partials: &mut [f32],
    #[comptime] blueprint: CrossEntropyBlueprint,
) {
    let lanes = comptime!(blueprint.lanes);
    let width = comptime!(if blueprint.plane < lanes { blueprint.plane } else { lanes });
    #[unroll]
    for step in 0..comptime!(width.ilog2()) {
        let distance = comptime!(1u32 << step);
        let other = Seen {
            peak: plane_shuffle_xor(seen.peak, distance),
            total: plane_shuffle_xor(seen.total, distance),
            sum: plane_shuffle_xor(seen.sum, distance),
        };
        join(seen, &other, blueprint);
    }
    if comptime!(width < lanes) {
        let groups = comptime!(blueprint.units / width);
        let group = UNIT_POS / width;
        let place = UNIT_POS % width;
        if place == 0 {
            partials[group as usize] = seen.peak;
            partials[(groups + group) as usize] = seen.total;
            partials[(2 * groups + group) as usize] = seen.sum;
        }
        sync_cube();
        let groups_a_row = comptime!(lanes / width);
        let first = UNIT_POS / lanes * groups_a_row;
        seen.peak = f32::min_value();
        seen.total = 0.0f32;
        seen.sum = 0.0f32;
        for index in 0..groups_a_row {
            let at = first + index;
            let other = Seen {
                peak: partials[at as usize],
                total: partials[(groups + at) as usize],
                sum: partials[(2 * groups + at) as usize],
            };
            join(seen, &other, blueprint);
        }
        // The next row's may not come before all have read these.
        sync_cube();
    }
}

/// Logits, by vectors and one by one: both are the same memory.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Logits<F: Float, N: Size> {
    pub(crate) vectors: Box<[Vector<F, N>]>,
    pub(crate) elements: Box<[F]>,
}

/// Rows of logits, and how far apart they are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) rows: u32,
    pub(crate) classes: u32,
    pub(crate) row_stride: u32,
}

/// What the loss of a row depends on besides.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LossRules {
    pub(crate) ignore_index: i32,
    pub(crate) smoothing: f32,
    /// NaN, of which WGSL has no constant.
    pub(crate) invalid: f32,
    /// Rows with the target `ignore_index` have a loss of 0.
    #[cube(comptime)]
    pub(crate) ignores: bool,
    #[cube(comptime)]
    pub(crate) is_smoothed: bool,
}

/// Adds to what was seen the part of a row, from element `start` on, that is the unit's, the `lane`-th of
/// the row's.
#[cube]
pub(crate) fn see_row<F: Float, N: Size>(
    seen: &mut Seen,
    logits: &Logits<F, N>,
    start: u32,
    classes: u32,
    lane: u32,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[comptime] is_smoothed: bool,
) {
    let lanes = comptime!(blueprint.lanes);
    let width = comptime!(blueprint.vector_size as u32);
    // 1. What lies before the first whole vector of the row and behind the last.
    let head = min((width - start % width) % width, classes);
    let vectors = (classes - head) / width;
    let ends = classes - vectors * width;
    let mut end = lane;
    while end < ends {
        let column = select(end < head, end, end + vectors * width);
        let logit = f32::cast_from(logits.elements[(start + column) as usize]);
        see::<Const<1>>(seen, Vector::new(logit), blueprint, is_smoothed);
        end += lanes;
    }

    // 2. The vectors, each asked for before the one ahead of it is looked at.
    let first = (start + head) / width;
    let mut index = lane;
    if index < vectors {
        let mut next = logits.vectors[(first + index) as usize];
        while index < vectors {
            let current = Vector::<f32, N>::cast_from(next);
            index += lanes;
            if index < vectors {
                next = logits.vectors[(first + index) as usize];
            }
            see::<N>(seen, current, blueprint, is_smoothed);
        }
    }
}

/// The logit of a row's class, or NaN if it has none.
#[cube]
pub(crate) fn target_logit<F: Float, N: Size>(
    logits: &Logits<F, N>,
    start: u32,
    target: i32,
    classes: u32,
    rules: &LossRules,
) -> f32 {
    let mut picked = rules.invalid;
    if target >= 0 && u32::cast_from(target) < classes {
        picked = f32::cast_from(logits.elements[(start + u32::cast_from(target)) as usize]);
    }
    picked
}

/// The loss of a row, of its class's logit, the logarithm of its sum of exponentials, and the sum of its logits.
#[cube]
pub(crate) fn loss_of(
    picked: f32,
    log: f32,
    target: i32,
    sum: f32,
    classes: u32,
    rules: &LossRules,
) -> f32 {
    let mut loss = log - picked;
    if comptime!(rules.is_smoothed) {
        let of_all = log - sum / f32::cast_from(classes);
        loss = (1.0f32 - rules.smoothing) * loss + rules.smoothing * of_all;
    }
    if comptime!(rules.ignores) {
        loss = select(target == rules.ignore_index, 0.0f32, loss);
    }
    loss
}

/// `loss[r]` and `lse[r]` of each row. Rows are spread over the cubes along x, `lanes` units a row.
#[cube(launch_unchecked)]
pub(crate) fn cross_entropy_forward_kernel<F: Float, N: Size>(
    logits: &Logits<F, N>,
    targets: &[i32],
    loss: &mut [f32],
    lse: &mut [f32],
    extent: Extent,
    rules: &LossRules,
    #[comptime] blueprint: CrossEntropyBlueprint,
    #[define(F)] _dtype: ElemType,
) {
    let lanes = comptime!(blueprint.lanes);
    let rows_a_cube = comptime!(blueprint.rows_a_cube());
    let lane = UNIT_POS % lanes;
    let (rows, classes, row_stride) = (extent.rows, extent.classes, extent.row_stride);
    let mut partials = Shared::<[f32]>::new_slice(comptime!(blueprint.partials()));

    let mut first_row = CUBE_POS_X * rows_a_cube;
    while first_row < rows {
        let row = first_row + UNIT_POS / lanes;
        let mut seen = nothing();
        // 1. Each unit sees its part.
        if row < rows {
            let is_smoothed = comptime!(rules.is_smoothed);
            let start = row * row_stride;
            see_row::<F, N>(&mut seen, logits, start, classes, lane, blueprint, is_smoothed);
        }

        // 2. The units of the row meet.
        join_row(&mut seen, &mut partials, blueprint);
        if row < rows && lane == 0 {
            let log = seen.peak + seen.total.ln();
            let target = targets[row as usize];
            let picked = target_logit::<F, N>(logits, row * row_stride, target, classes, rules);
            loss[row as usize] = loss_of(picked, log, target, seen.sum, classes, rules);
            lse[row as usize] = log;
        }
        first_row += CUBE_COUNT_X * rows_a_cube;
    }
}
