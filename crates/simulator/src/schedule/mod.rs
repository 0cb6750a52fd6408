//! Which warp runs, and when what was started lands.

/// When copies and products land, between the instruction that starts them and the one that waits for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Landing {
    /// At once.
    Earliest,
    /// Only when somebody waits for them, or nothing else can go on.
    Latest,
    /// At any time in between.
    Random,
}

/// A schedule: the same one for the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Schedule {
    /// What the order of warps and blocks and the times of landing are drawn from.
    pub seed: u64,
    /// When asynchronous work lands.
    pub landing: Landing,
}

impl Schedule {
    /// Schedules to try a kernel under: both extremes first, then random ones.
    pub fn several(count: u64) -> impl Iterator<Item = Self> {
        (0..count).map(|seed| {
            let landing = match seed {
                0 => Landing::Earliest,
                1 => Landing::Latest,
                seed if seed % 8 == 7 => Landing::Latest,
                _ => Landing::Random,
            };
            Self { seed, landing }
        })
    }
}

/// Draws numbers (`SplitMix64`: Steele, Lea, Flood, 2014).
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % below.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_begin_with_the_extremes() {
        let landings: Vec<_> = Schedule::several(3).map(|schedule| schedule.landing).collect();
        assert_eq!(landings, [Landing::Earliest, Landing::Latest, Landing::Random]);
    }

    #[test]
    fn dice_are_the_same_for_the_same_seed() {
        let rolls = |seed| {
            let mut dice = Dice::new(seed);
            [0; 8].map(|_: u64| dice.roll(100))
        };
        assert_eq!(rolls(1), rolls(1));
        assert_ne!(rolls(1), rolls(2));
    }
}
