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

/// The `k` largest elements of a row, and their columns. A cube takes a row. `sorted` is the power of two that holds
/// the columns, and `units` those of a cube.
#[cube(launch_unchecked)]
pub(crate) fn top_k_kernel<F: Float>(
    x: &[F],
    values: &mut [F],
    indices: &mut [i32],
    columns: u32,
    k: u32,
    #[comptime] sorted: u32,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let mut keys = Shared::<[u32]>::new_slice(comptime!(sorted as usize));
    let mut places = Shared::<[u32]>::new_slice(comptime!(sorted as usize));
    let first = CUBE_POS_X * columns;

    // 1. What fills up the row is behind all others by its place.
    let mut place = UNIT_POS;
    while place < sorted {
        let mut key = u32::MAX.runtime();
        if place < columns {
            key = descending(f32::cast_from(x[(first + place) as usize]));
        }
        keys[place as usize] = key;
        places[place as usize] = place;
        place += units;
    }
    sync_cube();

    // 2. The network: sorted runs, ascending and descending in turns, are merged to runs of twice their size.
    let mut run = 2u32;
    while run <= sorted {
        let mut distance = run / 2;
        while distance > 0 {
            let mut pair = UNIT_POS;
            while pair < comptime!(sorted / 2) {
                let low = 2 * distance * (pair / distance) + pair % distance;
                let high = low + distance;
                let (low_key, low_place) = (keys[low as usize], places[low as usize]);
                let (high_key, high_place) = (keys[high as usize], places[high as usize]);
                let follows = low_key > high_key || (low_key == high_key && low_place > high_place);
                let ascends = low & run == 0;
                if (ascends && follows) || (!ascends && !follows) {
                    keys[low as usize] = high_key;
                    places[low as usize] = high_place;
                    keys[high as usize] = low_key;
                    places[high as usize] = low_place;
                }
                pair += units;
            }
            sync_cube();
            distance /= 2;
        }
        run *= 2;
    }

    // 3. The first ones.
    let mut rank = UNIT_POS;
    while rank < k {
        let place = places[rank as usize];
        values[(CUBE_POS_X * k + rank) as usize] = x[(first + place) as usize];
        indices[(CUBE_POS_X * k + rank) as usize] = i32::cast_from(place);
        rank += units;
    }
}
