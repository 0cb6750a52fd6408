//! Which elements are left out, as the kernels of all operations take it that leave some out on the way.

use crate::{
    KernelError,
    buffer::Buffer,
    philox::{LOW_HALF, combined, philox4x32},
    random::{Threshold, check_key, threshold},
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

    /// A draw below this leaves its element out.
    pub(super) fn threshold(&self) -> Threshold {
        threshold(self.rate)
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
        let (draws, threshold) = match mask.map(Self::threshold) {
            None => (None, 0),
            Some(Threshold::OfHalf(limit)) => (Some(Draws::Halves), limit),
            Some(Threshold::OfWord(limit)) => (Some(Draws::Words), limit),
        };
        let form = match draws {
            None => DropoutForm::None,
            Some(draws) => DropoutForm::Drawn { draws, has_key: key.is_some() },
        };
        let seed = mask.map_or(0, |mask| mask.seed);
        let launch = ElementMaskLaunch {
            key: key.unwrap_or(stand_in).arg(1),
            seed_low: seed as u32,
            seed_high: (seed >> 32) as u32,
            threshold,
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
    /// By the seed, combined with a key on the device if there is one.
    Drawn {
        /// What an element takes of the generator.
        draws: Draws,
        /// Whether there is a key.
        has_key: bool,
    },
}

/// What each element takes of the generator: as much as tells its rate from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Draws {
    /// Half a word, the low one first.
    Halves,
    /// A word.
    Words,
}

impl DropoutForm {
    fn has_key(self) -> bool {
        matches!(self, Self::Drawn { has_key: true, .. })
    }

    /// Elements that a word of the generator is for.
    fn elements_of_word(self) -> usize {
        match self {
            Self::Drawn { draws: Draws::Halves, .. } => 2,
            _ => 1,
        }
    }
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

/// Words of a call of the generator.
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
            let of_word = comptime!(form.elements_of_word());
            let of_call = comptime!(WORDS * of_word);
            let (low, high) =
                combined(self.seed_low, self.seed_high, &self.key, comptime!(form.has_key()));
            // Vectors are aligned, and have all of one or more calls, or a part of one.
            #[unroll]
            for call in 0..comptime!(size.div_ceil(of_call)) {
                let counter = first / comptime!(of_call as u32) + comptime!(call as u32);
                let words = philox4x32((counter, 0u32, 0u32, 0u32), low, high);
                #[unroll]
                for lane in 0..comptime!(if size < of_call { size } else { of_call }) {
                    let draw = if comptime!(size < of_call) {
                        let place = first % comptime!(of_call as u32) + comptime!(lane as u32);
                        draw_at(words, place, of_word)
                    } else {
                        draw_of(words, lane, of_word)
                    };
                    let at = comptime!(call * of_call + lane);
                    let scaled = value.extract(at) * self.scale;
                    kept.insert(at, select(draw < self.threshold, 0.0f32, scaled));
                }
            }
        }
        kept
    }
}

/// Draw number `place` of a call's, `of_word` of which are in a word.
#[cube]
fn draw_at(words: (u32, u32, u32, u32), place: u32, #[comptime] of_word: usize) -> u32 {
    let index = place / comptime!(of_word as u32);
    let even = select(index & 2 != 0, words.2, words.0);
    let odd = select(index & 2 != 0, words.3, words.1);
    let word = select(index & 1 != 0, odd, even);
    if comptime!(of_word == 1) { word } else { select(place & 1 != 0, word >> 16, word & LOW_HALF) }
}

/// As [`draw_at`], where the place is known at compile time.
#[cube]
fn draw_of(
    words: (u32, u32, u32, u32),
    #[comptime] place: usize,
    #[comptime] of_word: usize,
) -> u32 {
    let index = comptime!(place / of_word);
    let word = if comptime!(index == 0) {
        words.0
    } else if comptime!(index == 1) {
        words.1
    } else if comptime!(index == 2) {
        words.2
    } else {
        words.3
    };
    if comptime!(of_word == 1) {
        word
    } else if comptime!(place % 2 == 1) {
        word >> 16
    } else {
        word & LOW_HALF
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(rate: f64) -> DropoutMask {
        DropoutMask { rate, seed: 0, key: None }
    }

    #[test]
    fn half_of_all_draws_are_below_the_threshold_of_a_half() {
        assert_eq!((mask(0.5).threshold(), mask(0.5).scale()), (Threshold::OfHalf(1 << 15), 2.0));
        assert_eq!(mask(0.0).threshold(), Threshold::OfWord(0));
    }

    #[test]
    fn a_rate_that_makes_no_sense_is_refused() {
        for rate in [-0.1, 1.0, f64::NAN] {
            let refused = mask(rate).validate("op");
            assert!(matches!(refused, Err(KernelError::InvalidProblem { argument: "rate", .. })));
        }
    }
}
