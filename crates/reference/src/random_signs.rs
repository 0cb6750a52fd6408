//! How large sums are whose terms have random signs.
//!
//! What a sum errs by is a multiple of its partial sums. In the worst case a partial sum is as large as the
//! sum M of its terms' magnitudes, which grows with their number K. Where the terms have random signs, as
//! products of normal numbers have, it is as large as the square root of the sum Q of their squares, which
//! grows with the square root of K. At K = 14336 the difference is a factor of 100: a bound by M does not find
//! 64 lost terms, and one by the square root of Q does.
//!
//! A sum of terms with random signs is beyond `t sqrt(Q)` with a probability of at most `2 exp(-t^2 / 2)`
//! (Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", 1963, theorem 2), and its mean
//! square is Q.

/// With what probability one of all sums of a comparison may be larger than it is taken to be.
const CHANCE: f64 = 1e-9;

/// What no partial sum of any of `sums` sums exceeds, of one of `terms` terms with those M and Q: a device forms
/// at most twice as many partial sums as there are terms, in whatever order.
pub fn largest_partial_sum(magnitude: f64, squares: f64, terms: usize, sums: usize) -> f64 {
    let partial_sums = 2.0 * (terms * sums).max(1) as f64;
    let t = (2.0 * (2.0 * partial_sums / CHANCE).ln()).sqrt();
    magnitude.min(t * squares.sqrt())
}

/// What partial sums come to in the root mean square over `sums` sums, for one with that Q.
///
/// The squares of two different sums are not correlated, and that of one deviates by at most `sqrt(2) Q`, so
/// that their mean deviates by `sqrt(2 / sums) Q`; six times that is allowed.
pub fn typical_partial_sum(squares: f64, sums: usize) -> f64 {
    (squares * (1.0 + 6.0 * (2.0 / sums.max(1) as f64).sqrt())).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{random::normal, storage::Storage};

    #[test]
    fn partial_sums_are_as_large_as_they_are_taken_to_be() {
        const SUMS: usize = 400;
        for terms in [1, 16, 1000] {
            let all = normal(1, SUMS * terms, 1.0, Storage::F32);
            let (mut square, mut typical) = (0.0, 0.0);
            for sum in all.chunks(terms) {
                let magnitude = sum.iter().map(|x| x.abs()).sum();
                let squares = sum.iter().map(|x| x * x).sum();
                let bound = largest_partial_sum(magnitude, squares, terms, SUMS);
                let mut partial = 0.0f64;
                for x in sum {
                    partial += x;
                    assert!(partial.abs() <= bound * (1.0 + 1e-12), "{partial} of {terms}");
                }
                square += partial * partial;
                typical += typical_partial_sum(squares, SUMS).powi(2);
            }
            assert!(square <= typical && square > 0.4 * typical, "{square} of {typical}");
        }
    }

    #[test]
    fn many_terms_are_far_from_the_sum_of_their_magnitudes() {
        let terms = normal(2, 14_336, 1.0, Storage::F32);
        let magnitude = terms.iter().map(|x| x.abs()).sum();
        let squares = terms.iter().map(|x| x * x).sum();
        assert!(largest_partial_sum(magnitude, squares, terms.len(), 1000) < magnitude / 9.0);
        assert!(typical_partial_sum(squares, 1000) < magnitude / 80.0);
        // Of few terms the sum of magnitudes is the smaller.
        assert_eq!(largest_partial_sum(3.0, 3.0, 3, 1), 3.0);
    }
}
