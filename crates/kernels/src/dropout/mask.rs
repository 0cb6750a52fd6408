//! Which elements are left out, as the kernels of all operations take it that leave some out on the way.

use crate::{
    KernelError,
    buffer::Buffer,
    philox::{combined, philox4x32},
    random::check_key,
};
use cubecl::prelude::*;

/// Which elements of a tensor are left out. No memory holds the mask: it is drawn anew where it is needed.
#[derive(Clone, Debug)]
pub struct DropoutMask {
    /// The share that is left out, from 0 to below 1.
    pub rate: f64,
    /// What the choice depends on.
    pub seed: u64,
    /// Two u32 that the seed is combined with when a kernel runs.
    pub key: Option<Buffer>,
}

impl DropoutMask {
    /// Checks what the rate and the key have to be.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for a rate out of its range and for a key that is not two words.
    pub(crate) fn validate(&self, op: &'static str) -> Result<(), KernelError> {
        if !(0.0..1.0).contains(&self.rate) {
            return Err(KernelError::invalid(op, "rate", "a number from 0 to below 1", self.rate));
        }
        self.key.as_ref().map_or(Ok(()), |key| check_key(op, key))
    }

    /// A random word below this leaves its element out.
    pub(super) fn threshold(&self) -> u32 {
        // The cast stops at the largest.
        (self.rate * 2f64.powi(32)).round() as u32
    }

    /// What elements that stay are multiplied by.
    pub(super) fn scale(&self) -> f32 {
        (1.0 / (1.0 - self.rate)) as f32
    }

    /// The mask as an argument of a kernel, and how it is drawn there. Without a mask nothing of it is compiled in, nor
    /// is a key where there is none: `stand_in` takes its place.
    pub(crate) fn argument(
        mask: Option<&Self>,
        stand_in: &Buffer,
    ) -> (ElementMaskLaunch, DropoutForm) {
        let key = mask.and_then(|mask| mask.key.as_ref());
        let form = match (mask, key) {
            (None, _) => DropoutForm::None,
            (Some(_), None) => DropoutForm::Seeded,
            (Some(_), Some(_)) => DropoutForm::Keyed,
        };
        let seed = mask.map_or(0, |mask| mask.seed);
        let launch = ElementMaskLaunch {
            key: key.unwrap_or(stand_in).arg(1),
            seed_low: seed as u32,
            seed_high: (seed >> 32) as u32,
            threshold: mask.map_or(0, Self::threshold),
            scale: mask.map_or(1.0, Self::scale),
        };
        (launch, form)
    }
}

/// How a mask is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DropoutForm {
    /// Nothing is left out.
    None,
    /// By the seed.
    Seeded,
    /// By the seed, combined with a key on the device.
    Keyed,
}

/// The mask in a kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ElementMask {
    key: Box<[u32]>,
    seed_low: u32,
    seed_high: u32,
    threshold: u32,
    scale: f32,
}

/// Elements that a call of the generator has words for.
const WORDS: usize = 4;

#[cube]
impl ElementMask {
    /// What dropout makes of a vector of which element 0 is number `first` of the tensor, a multiple of its size.
    pub(crate) fn dropped<N: Size>(
        &self,
        value: Vector<f32, N>,
        first: u32,
        #[comptime] form: DropoutForm,
    ) -> Vector<f32, N> {
        let mut kept = value;
        if comptime!(form != DropoutForm::None) {
            let size = N::value().comptime();
            let has_key = comptime!(form == DropoutForm::Keyed);
            let (low, high) = combined(self.seed_low, self.seed_high, &self.key, has_key);
            // A call for every four elements: vectors are aligned, and have one or two of these, or a part.
            #[unroll]
            for call in 0..comptime!(size.div_ceil(WORDS)) {
                let counter = first / 4 + comptime!(call as u32);
                let words = philox4x32((counter, 0u32, 0u32, 0u32), low, high);
                #[unroll]
                for lane in 0..comptime!(if size < WORDS { size } else { WORDS }) {
                    let place = first % 4 + comptime!(lane as u32);
                    let at = comptime!(call * WORDS + lane);
                    let even = select(place & 2 != 0, words.2, words.0);
                    let odd = select(place & 2 != 0, words.3, words.1);
                    let word = select(place & 1 != 0, odd, even);
                    let scaled = value.extract(at) * self.scale;
                    kept.insert(at, select(word < self.threshold, 0.0f32, scaled));
                }
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(rate: f64) -> DropoutMask {
        DropoutMask { rate, seed: 0, key: None }
    }

    #[test]
    fn half_of_all_words_are_below_the_threshold_of_a_half() {
        assert_eq!((mask(0.5).threshold(), mask(0.5).scale()), (1 << 31, 2.0));
        assert_eq!(mask(0.0).threshold(), 0);
    }

    #[test]
    fn a_rate_that_makes_no_sense_is_refused() {
        for rate in [-0.1, 1.0, f64::NAN] {
            let refused = mask(rate).validate("op");
            assert!(matches!(refused, Err(KernelError::InvalidProblem { argument: "rate", .. })));
        }
    }
}
