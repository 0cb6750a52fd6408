use cubecl::prelude::*;

/// Units in a cube, and indices that they look at together.
pub(crate) const UNITS: u32 = 128;

/// Sorts the places 0 to n - 1 by their index, equal ones in their order.
///
/// `order` has the places in their new order. `starts[i]` is the first of i's index there, and `counts[i]`
/// says how many there are, if i is the first of them, and otherwise 0.
#[cube(launch_unchecked)]
pub(crate) fn embedding_sort_kernel(
    index: &[i32],
    order: &mut [u32],
    starts: &mut [u32],
    counts: &mut [u32],
    n: u32,
) {
    let i = CUBE_POS_X * UNITS + UNIT_POS;
    let mut mine = 0i32;
    if i < n {
        mine = index[i as usize];
    }
    let mut smaller = 0u32;
    let mut before = 0u32;
    let mut equal = 0u32;
    let mut tile = Shared::<[i32]>::new_slice(comptime!(UNITS as usize));
    let mut first = 0u32;
    while first < n {
        let at = first + UNIT_POS;
        if at < n {
            tile[UNIT_POS as usize] = index[at as usize];
        }
        sync_cube();
        let length = min(UNITS, n - first);
        for k in 0..length {
            let other = tile[k as usize];
            smaller += u32::cast_from(other < mine);
            let same = u32::cast_from(other == mine);
            equal += same;
            if first + k < i {
                before += same;
            }
        }
        sync_cube();
        first += UNITS;
    }
    if i < n {
        order[(smaller + before) as usize] = i;
        starts[i as usize] = smaller;
        let mut count = 0u32;
        if before == 0 {
            count = equal;
        }
        counts[i as usize] = count;
    }
}
