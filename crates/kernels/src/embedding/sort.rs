//! Sorts places by their index, one digit after the other from the lowest, equal ones in their order.

use cubecl::prelude::*;

/// Bits of an index that a pass sorts by.
pub(super) const DIGIT_BITS: u32 = 8;
/// Values of such a digit. A cube has a unit for each of them, and looks at as many places at once.
pub(crate) const DIGITS: u32 = 1 << DIGIT_BITS;

/// The digit that a pass sorts by. An index that names no row counts as the number of rows, behind all others.
#[cube]
fn digit_of(index: u32, rows: u32, shift: u32) -> u32 {
    (min(index, rows) >> shift) & comptime!(DIGITS - 1)
}

/// `counts[c, d]` says how many places of cube c's stretch have digit d.
#[cube(launch_unchecked)]
pub(crate) fn embedding_count_kernel(
    keys: &[u32],
    counts: &mut [u32],
    places: u32,
    rows: u32,
    shift: u32,
    stretch: u32,
) {
    let mut tile = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));
    let mut first = CUBE_POS_X * stretch;
    let end = min(places, first + stretch);
    let mut count = 0u32;
    while first < end {
        let at = first + UNIT_POS;
        if at < end {
            tile[UNIT_POS as usize] = digit_of(keys[at as usize], rows, shift);
        }
        sync_cube();
        for k in 0..min(DIGITS, end - first) {
            count += u32::cast_from(tile[k as usize] == UNIT_POS);
        }
        sync_cube();
        first += DIGITS;
    }
    counts[(CUBE_POS_X * DIGITS + UNIT_POS) as usize] = count;
}

/// Moves each place behind all with a smaller digit and those with the same one before it. `order` has the
/// places as the last pass left them; the first pass takes them as they come.
#[cube(launch_unchecked)]
pub(crate) fn embedding_sort_kernel(
    keys: &[u32],
    order: &[u32],
    counts: &[u32],
    sorted_keys: &mut [u32],
    sorted_order: &mut [u32],
    places: u32,
    rows: u32,
    shift: u32,
    stretch: u32,
    #[comptime] is_first: bool,
) {
    let mut tile = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));
    let mut begins = Shared::<[u32]>::new_slice(comptime!(DIGITS as usize));

    // 1. Where the stretch's places of each digit go.
    let mut total = 0u32;
    let mut in_cubes_before = 0u32;
    for cube in 0..CUBE_COUNT_X {
        let count = counts[(cube * DIGITS + UNIT_POS) as usize];
        total += count;
        if cube < CUBE_POS_X {
            in_cubes_before += count;
        }
    }
    begins[UNIT_POS as usize] = total;
    sync_cube();
    let mut smaller = 0u32;
    for digit in 0..UNIT_POS {
        smaller += begins[digit as usize];
    }
    sync_cube();
    begins[UNIT_POS as usize] = smaller + in_cubes_before;

    // 2. As many places as there are digits at a time.
    let mut first = CUBE_POS_X * stretch;
    let end = min(places, first + stretch);
    while first < end {
        let at = first + UNIT_POS;
        let mut key = 0u32;
        // Beyond the end it is none.
        let mut digit = DIGITS.runtime();
        if at < end {
            key = min(keys[at as usize], rows);
            digit = digit_of(key, rows, shift);
        }
        tile[UNIT_POS as usize] = digit;
        sync_cube();
        let mut before = 0u32;
        let mut count = 0u32;
        for k in 0..DIGITS {
            let other = tile[k as usize];
            before += u32::cast_from(other == digit && k < UNIT_POS);
            count += u32::cast_from(other == UNIT_POS);
        }
        if at < end {
            let to = begins[digit as usize] + before;
            let mut place = at;
            if comptime!(!is_first) {
                place = order[at as usize];
            }
            sorted_keys[to as usize] = key;
            sorted_order[to as usize] = place;
        }
        sync_cube();
        begins[UNIT_POS as usize] += count;
        first += DIGITS;
    }
}
