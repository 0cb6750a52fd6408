//! Several tensors in one launch: which go together, and how many cubes each has.
//!
//! A launch takes some microseconds, and many a tensor less. Each cube finds the tensor that is its own by comparing its
//! place with the end of each, since buffers cannot be chosen at run time.

/// Tensors of a launch.
pub const MOST_TENSORS: usize = 16;

/// The cubes of each part of a launch by its passes: about `most` in all, so that each cube has as much to
/// do as any other.
pub(crate) fn divide(most: usize, passes: &[usize]) -> Vec<u32> {
    let rounds = passes.iter().sum::<usize>().div_ceil(most.max(1)).max(1);
    // At most some thousands.
    passes.iter().map(|passes| passes.div_ceil(rounds).max(1) as u32).collect()
}

/// Launches each of `all` together with those that it `goes_with`, as many at once as there is `room` for
/// such, and hands them back in their order.
pub(crate) fn in_launches<T>(
    all: Vec<T>,
    room: impl Fn(&T) -> usize,
    goes_with: impl Fn(&T, &T) -> bool,
    mut launch: impl FnMut(&mut [T]),
) -> Vec<T> {
    let mut launches: Vec<(Vec<usize>, Vec<T>)> = Vec::new();
    for (place, one) in all.into_iter().enumerate() {
        let fits = |others: &[T]| goes_with(&others[0], &one) && others.len() < room(&others[0]);
        match launches.iter_mut().find(|(_, others)| fits(others)) {
            Some((places, others)) => {
                places.push(place);
                others.push(one);
            }
            None => launches.push((vec![place], vec![one])),
        }
    }
    let mut done = Vec::new();
    for (places, mut together) in launches {
        launch(&mut together);
        done.extend(places.into_iter().zip(together));
    }
    done.sort_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, one)| one).collect()
}
