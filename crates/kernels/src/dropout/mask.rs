//! Which elements are left out, as the kernels of all operations take it that leave some out on the way.

#[cfg(feature = "cuda")]
use crate::ptx::bytes_of_two;
use crate::{
    DeviceProfile, KernelError,
    buffer::Buffer,
    philox::{combined, philox2x32},
    random::{Threshold, check_key, threshold},
};
use cubecl::{client::Client, prelude::*};

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
        client: &Client,
    ) -> (ElementMaskLaunch, DropoutForm) {
        let key = mask.and_then(|mask| mask.key.as_ref());
        let (draws, threshold) = match mask.map(Self::threshold) {
            None => (None, 0),
            // The upper half of a word is compared.
            Some(Threshold::OfHalf(limit)) => (Some(Draws::Bytes), limit << 16),
            Some(Threshold::OfWord(limit)) => (Some(Draws::Words), limit),
        };
        let form = match draws {
            None => DropoutForm::None,
            Some(draws) => DropoutForm::Drawn {
                draws,
                has_key: key.is_some(),
                picks_bytes: DeviceProfile::of(client).compute_capability.is_some(),
            },
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
        /// Whether the device picks bytes of two words by an instruction, as NVIDIA's do.
        picks_bytes: bool,
    },
}

/// What each element takes of the generator: as much as tells its rate from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Draws {
    /// A byte of its own. Below it is its neighbor's in reverse order, which counts only where its own equals the rate's:
    /// once in 256 draws.
    Bytes,
    /// A word.
    Words,
}

impl DropoutForm {
    fn has_key(self) -> bool {
        matches!(self, Self::Drawn { has_key: true, .. })
    }

    #[cfg(feature = "cuda")]
    fn picks_bytes(self) -> bool {
        matches!(self, Self::Drawn { picks_bytes: true, .. })
    }

    /// Elements that a word of the generator is for.
    fn elements_of_word(self) -> usize {
        match self {
            Self::Drawn { draws: Draws::Bytes, .. } => 4,
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
            let of_call = comptime!(2 * of_word);
            let (low, high) =
                combined(self.seed_low, self.seed_high, &self.key, comptime!(form.has_key()));
            // Vectors are aligned, and have all of one or more calls, or a part of one.
            #[unroll]
            for call in 0..comptime!(size.div_ceil(of_call)) {
                let counter = first / comptime!(of_call as u32) + comptime!(call as u32);
                let words = philox2x32((counter, high), low);
                #[unroll]
                for lane in 0..comptime!(if size < of_call { size } else { of_call }) {
                    let draw = draw_of(words, first, lane, size, form);
                    let at = comptime!(call * of_call + lane);
                    let left = select(draw < self.threshold, 0.0f32, value.extract(at));
                    // Last, so that a sum that follows is one instruction with it.
                    kept.insert(at, left * self.scale);
                }
            }
        }
        kept
    }
}

/// The draw of element `lane` of those that a vector of `size` elements has of a call. Element 0 of the vector is number
/// `first`.
#[cube]
fn draw_of(
    words: (u32, u32),
    first: u32,
    #[comptime] lane: usize,
    #[comptime] size: usize,
    #[comptime] form: DropoutForm,
) -> u32 {
    let of_word = comptime!(form.elements_of_word());
    let word = if comptime!(size <= of_word) {
        select(first & comptime!(of_word as u32) != 0, words.1, words.0)
    } else if comptime!(lane < of_word) {
        words.0
    } else {
        words.1
    };
    if comptime!(of_word == 1) {
        word
    } else if comptime!(size == 1) {
        let pair = word >> ((first & 2) * 8);
        select(first & 1 != 0, byte_draw(pair, 1usize, form), byte_draw(pair, 0usize, form))
    } else if comptime!(size == 2) {
        byte_draw(word >> ((first & 2) * 8), lane, form)
    } else {
        byte_draw(word, comptime!(lane % of_word), form)
    }
}

/// A byte of the word on top, and its neighbor's below it, the other way round.
#[cfg(feature = "cuda")]
#[cube]
fn byte_draw(word: u32, #[comptime] byte: usize, #[comptime] form: DropoutForm) -> u32 {
    if comptime!(form.picks_bytes()) {
        let neighbor = comptime!(reversed_neighbor(byte) + 4);
        // The lower half is no part of the draw.
        bytes_of_two(word, word.reverse_bits(), comptime!((byte << 12 | neighbor << 8) as u32))
    } else {
        shifted_draw(word, byte)
    }
}

/// A byte of the word on top, and its neighbor's below it, the other way round.
#[cfg(not(feature = "cuda"))]
#[cube]
fn byte_draw(word: u32, #[comptime] byte: usize, #[comptime] _form: DropoutForm) -> u32 {
    shifted_draw(word, byte)
}

#[cube]
fn shifted_draw(word: u32, #[comptime] byte: usize) -> u32 {
    let neighbor = word.reverse_bits() >> comptime!(8 * reversed_neighbor(byte) as u32);
    ((word >> comptime!(8 * byte as u32)) << 24) | ((neighbor & 0xff) << 16)
}

/// Where a byte's neighbor is in the reversed word.
fn reversed_neighbor(byte: usize) -> usize {
    3 - (byte ^ 1)
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
