use cubecl::prelude::*;

/// The sign of a number in f32.
const SIGN: u32 = 1 << 31;

/// A word that is the smaller the larger the number is.
#[cube]
fn descending(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let is_negative = bits >= SIGN;
    // Magnitudes of negative numbers count the other way.
    select(is_negative, bits, !(bits | SIGN))
}

/// What is sorted: a key of each element, and where it is in the row.
#[derive(CubeType)]
struct Sorted {
    keys: Shared<[u32]>,
    places: Shared<[u32]>,
}

#[cube]
impl Sorted {
    /// Whether the element at `low` comes behind the one at `high`.
    fn follows(&self, low: u32, high: u32) -> bool {
        let (low_key, high_key) = (self.keys[low as usize], self.keys[high as usize]);
        let (low_place, high_place) = (self.places[low as usize], self.places[high as usize]);
        low_key > high_key || (low_key == high_key && low_place > high_place)
    }

    /// Puts pairs of elements, `distance` apart within each of `runs` runs, in order. Parts of `part` elements ascend and
    /// descend in turns; a run begins every `stride` elements.
    fn order_pairs(
        &mut self,
        runs: u32,
        stride: u32,
        part: u32,
        distance: u32,
        #[comptime] run: u32,
        #[comptime] units: u32,
    ) {
        let half = comptime!(run / 2);
        let mut pair = UNIT_POS;
        while pair < runs * half {
            let (own, within) = (pair / half, pair % half);
            let first = 2 * distance * (within / distance) + within % distance;
            let low = own * stride + first;
            let high = low + distance;
            let ascends = (own * run + first) & part == 0;
            let follows = self.follows(low, high);
            if (ascends && follows) || (!ascends && !follows) {
                let (key, place) = (self.keys[low as usize], self.places[low as usize]);
                self.keys[low as usize] = self.keys[high as usize];
                self.places[low as usize] = self.places[high as usize];
                self.keys[high as usize] = key;
                self.places[high as usize] = place;
            }
            pair += units;
        }
        sync_cube();
    }
}

/// The `k` largest elements of a row, and their columns. A cube takes a row. `sorted` is the power of two that holds
/// the columns, `run` the one that holds k, and `units` are those of a cube.
#[cube(launch_unchecked)]
pub(crate) fn top_k_kernel<F: Float>(
    x: &[F],
    values: &mut [F],
    indices: &mut [i32],
    columns: u32,
    k: u32,
    #[comptime] sorted: u32,
    #[comptime] run: u32,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let mut all = Sorted {
        keys: Shared::<[u32]>::new_slice(comptime!(sorted as usize)),
        places: Shared::<[u32]>::new_slice(comptime!(sorted as usize)),
    };
    let first = CUBE_POS_X * columns;

    // 1. What fills up the row is behind all others by its place.
    let mut place = UNIT_POS;
    while place < sorted {
        let mut key = u32::MAX.runtime();
        if place < columns {
            key = descending(f32::cast_from(x[(first + place) as usize]));
        }
        all.keys[place as usize] = key;
        all.places[place as usize] = place;
        place += units;
    }
    sync_cube();

    // 2. Each run is sorted. They ascend and descend in turns.
    let mut runs = comptime!(sorted / run).runtime();
    let mut stride = run.runtime();
    let mut part = 2u32;
    while part <= run {
        let mut distance = part / 2;
        while distance > 0 {
            all.order_pairs(runs, stride, part, distance, run, units);
            distance /= 2;
        }
        part *= 2;
    }

    // 3. Of two runs side by side, the elements of one of them remain: what comes first of each pair.
    while runs > 1 {
        runs /= 2;
        let mut element = UNIT_POS;
        while element < runs * run {
            let low = element / run * (2 * stride) + element % run;
            let high = low + stride;
            if all.follows(low, high) {
                all.keys[low as usize] = all.keys[high as usize];
                all.places[low as usize] = all.places[high as usize];
            }
            element += units;
        }
        sync_cube();
        stride *= 2;
        let mut distance = comptime!(run / 2).runtime();
        while distance > 0 {
            all.order_pairs(runs, stride, run, distance, run, units);
            distance /= 2;
        }
    }

    // 4. The first ones.
    let mut rank = UNIT_POS;
    while rank < k {
        let place = all.places[rank as usize];
        values[(CUBE_POS_X * k + rank) as usize] = x[(first + place) as usize];
        indices[(CUBE_POS_X * k + rank) as usize] = i32::cast_from(place);
        rank += units;
    }
}
