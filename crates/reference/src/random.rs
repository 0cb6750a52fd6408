//! Seeded inputs.

use crate::storage::Storage;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::f64::consts::TAU;

/// `count` normal numbers of that deviation, rounded to `storage`: what a device is given is what
/// the reference computes with, so the rounding of inputs is never counted as error.
pub fn normal(seed: u64, count: usize, deviation: f64, storage: Storage) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Uniform in (0, 1]: the logarithm needs it above zero.
    let mut uniform = || ((rng.next_u64() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    // Box and Muller's transform.
    (0..count)
        .map(|_| {
            let radius = (-2.0 * uniform().ln()).sqrt();
            storage.round(deviation * radius * (TAU * uniform()).cos())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers_and_another_seed_others() {
        let draw = |seed| normal(seed, 100, 1.0, Storage::F32);
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn mean_and_deviation_are_as_asked() {
        let values = normal(3, 40_000, 2.0, Storage::Bf16);
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        // Five standard errors: 5 * 2 / 200 and 5 * 2 / sqrt(2 * 40000).
        assert!(mean.abs() < 0.05, "{mean}");
        assert!((variance.sqrt() - 2.0).abs() < 0.036, "{variance}");
    }
}
