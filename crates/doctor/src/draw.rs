//! What a case is made of: numbers drawn from a seed, so that the seed makes the same case again, or told.

use blackburn_reference::{random::normal, storage::Storage};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::{collections::BTreeSet, fmt::Debug, ops::RangeInclusive};

/// The stream that says which plan a case has; plans and cases have streams of their own.
const WHICH_PLAN: u64 = 0;
const PLANS: u64 = 1 << 32;
const CASES: u64 = 1 << 33;
const WHOLE_NUMBERS: u64 = 1 << 34;

/// What is told to a case, and not drawn.
///
/// Names are those that the case draws by; choices are spelled as `Debug` spells them. A case that is told anything
/// is an ordinary one: it has no contradiction, is not empty, and holds neither NaN nor infinity unless told so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    choices: Vec<(&'static str, String)>,
    whole_numbers: bool,
}

impl Told {
    /// The same with a choice.
    #[must_use]
    pub fn with(mut self, name: &'static str, choice: impl Debug) -> Self {
        self.choices.push((name, format!("{choice:?}")));
        self
    }

    /// The same with a choice, by its spelling.
    #[must_use]
    pub fn named(mut self, name: &'static str, spelling: &str) -> Self {
        self.choices.push((name, spelling.to_owned()));
        self
    }

    /// The same with whole numbers from -3 to 3 for all normal ones: products and their sums are exact then.
    #[must_use]
    pub fn with_whole_numbers(mut self) -> Self {
        self.whole_numbers = true;
        self
    }
}

/// Draws a case.
///
/// What a kernel is compiled for (a type, an option, the width of a row) comes from one of a few *plans*, so
/// that thousands of cases compile as many kernels as there are plans. The rest (sizes, strides, numbers)
/// comes from the case alone. Another seed has other plans.
#[derive(Clone, Debug)]
pub struct Draw {
    plan: ChaCha8Rng,
    case: ChaCha8Rng,
    /// By how many bits each size is cut, in the order in which sizes are drawn.
    shifts: Vec<u32>,
    sizes: usize,
    told: Vec<String>,
    /// What is not drawn, and which of it was asked for and is a choice.
    given: Option<Told>,
    heeded: BTreeSet<&'static str>,
}

/// The plan of case `index`, of so many.
pub fn plan_of(seed: u64, plans: u64, index: u64) -> u64 {
    let mut which = stream(seed, WHICH_PLAN);
    which.set_word_pos(u128::from(index) * 2);
    which.next_u64() % plans.max(1)
}

fn stream(seed: u64, number: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(number);
    rng
}

impl Draw {
    /// Case `index` of a seed, with the sizes cut by `shifts`.
    pub fn new(seed: u64, plans: u64, index: u64, shifts: &[u32]) -> Self {
        let plan = plan_of(seed, plans, index);
        Self {
            plan: stream(seed, PLANS + plan),
            case: stream(seed, CASES + index),
            shifts: shifts.to_vec(),
            sizes: 0,
            told: vec![format!("plan={plan}")],
            given: None,
            heeded: BTreeSet::new(),
        }
    }

    /// A case of which some is told, and the rest drawn from a seed.
    pub fn of(given: &Told, seed: u64) -> Self {
        let drawn = Self::new(seed, 1, 0, &[]);
        Self { given: Some(given.clone()), told: Vec::new(), ..drawn }
    }

    /// What was told and not asked for, or is no choice: it had no effect.
    pub fn unheeded(&self) -> Vec<String> {
        let choices = self.given.iter().flat_map(|given| &given.choices);
        let unheeded = choices.filter(|(name, _)| !self.heeded.contains(name));
        unheeded.map(|(name, choice)| format!("{name}={choice}")).collect()
    }

    /// Whether normal numbers are whole ones.
    pub fn has_whole_numbers(&self) -> bool {
        self.given.as_ref().is_some_and(|given| given.whole_numbers)
    }

    /// What is told of `name`, if `read` can make something of it.
    fn given<T>(&mut self, name: &str, read: impl Fn(&str) -> Option<T>) -> Option<T> {
        let choices = &self.given.as_ref()?.choices;
        let (known, choice) = choices.iter().find(|(known, _)| *known == name)?;
        let value = read(choice)?;
        self.heeded.insert(known);
        Some(value)
    }

    fn given_size(&mut self, name: &str) -> Option<usize> {
        self.given(name, |choice| choice.parse().ok())
    }

    /// What is told, or one of `choices` that was drawn.
    fn choose<T: Copy + Debug>(&mut self, name: &str, choices: &[T], drawn: usize) -> T {
        let is = |choice: &T, text: &str| format!("{choice:?}") == text;
        let given = self.given(name, |text| choices.iter().copied().find(|c| is(c, text)));
        let choice = given.unwrap_or(choices[drawn]);
        self.tell(name, choice);
        choice
    }

    /// What was drawn, by name.
    pub fn told(&self) -> String {
        self.told.join(" ")
    }

    /// How many sizes were drawn.
    pub fn sizes(&self) -> usize {
        self.sizes
    }

    fn tell(&mut self, name: &str, value: impl Debug) {
        self.told.push(format!("{name}={value:?}"));
    }

    /// One of `choices`, by the plan.
    pub fn plan<T: Copy + Debug>(&mut self, name: &str, choices: &[T]) -> T {
        let drawn = below(&mut self.plan, choices.len());
        self.choose(name, choices, drawn)
    }

    /// Whether something holds that holds for one of `one_in` plans.
    pub fn planned(&mut self, name: &str, one_in: usize) -> bool {
        let drawn = usize::from(below(&mut self.plan, one_in) == 0);
        self.choose(name, &[false, true], drawn)
    }

    /// A size in `range`, by the plan: small ones as often as large ones, those around the edges of tiles
    /// most often.
    pub fn planned_size(&mut self, name: &str, range: RangeInclusive<usize>) -> usize {
        let drawn = sized(&mut self.plan, &range);
        let size = self.given_size(name).unwrap_or(drawn);
        self.tell(name, size);
        size
    }

    /// One of `choices`.
    pub fn one_of<T: Copy + Debug>(&mut self, name: &str, choices: &[T]) -> T {
        let drawn = below(&mut self.case, choices.len());
        self.choose(name, choices, drawn)
    }

    /// Whether something holds that holds for one of `one_in` cases. Only what holds is told.
    pub fn holds(&mut self, name: &str, one_in: usize) -> bool {
        /// What holds for fewer is no ordinary case.
        const ORDINARY: usize = 10;
        let drawn = below(&mut self.case, one_in) == 0;
        let drawn = drawn && (self.given.is_none() || one_in <= ORDINARY);
        let holds = self.given(name, |choice| choice.parse().ok()).unwrap_or(drawn);
        if holds {
            self.told.push(name.to_owned());
        }
        holds
    }

    /// A size in `range`, as [`planned_size`](Self::planned_size) draws them, by the case.
    pub fn size(&mut self, name: &str, range: RangeInclusive<usize>) -> usize {
        self.multiple(name, range, 1)
    }

    /// A size in `range`, rounded up to a multiple of `step`.
    pub fn multiple(&mut self, name: &str, range: RangeInclusive<usize>, step: usize) -> usize {
        let shift = self.shifts.get(self.sizes).copied().unwrap_or(0);
        self.sizes += 1;
        let drawn = sized(&mut self.case, &range) >> shift;
        let size = self.given_size(name).unwrap_or(drawn);
        let size = size.max(*range.start()).next_multiple_of(step);
        self.tell(name, size);
        size
    }

    /// A size in `range`, or a little above it, that is a multiple of 8, or even and none of 8, or odd, where `by`
    /// is 8, 2 or 1: what decides how wide columns are stored.
    pub fn divided(&mut self, name: &str, range: RangeInclusive<usize>, by: usize) -> usize {
        let shift = self.shifts.get(self.sizes).copied().unwrap_or(0);
        self.sizes += 1;
        let drawn = sized(&mut self.case, &range) >> shift;
        let size = self.given_size(name).unwrap_or(drawn).max(*range.start());
        let size = match by {
            8 => size.next_multiple_of(8),
            2 => size / 8 * 8 + [2, 4, 6][size % 3],
            _ => size | 1,
        };
        self.tell(name, size);
        size
    }

    /// A size with as many binary digits as `middle`, divisible by the same power of two up to 8: what decides on
    /// vectors, alignments and, for the most part, tiles.
    pub fn size_in_class(&mut self, name: &str, middle: usize) -> usize {
        let shift = self.shifts.get(self.sizes).copied().unwrap_or(0);
        self.sizes += 1;
        let low = 1 << middle.ilog2();
        let divisor = 1 << middle.trailing_zeros().min(3);
        let steps = (low + below(&mut self.case, low)) / divisor;
        // An odd multiple, unless it is one of 8.
        let size = divisor * if divisor < 8 { steps | 1 } else { steps };
        let size = self.given_size(name).unwrap_or((size >> shift).max(1));
        self.tell(name, size);
        size
    }

    /// A size around `middle` of which `is_alike` holds, or the middle: what is compiled for the one serves
    /// the other.
    pub fn size_alike(
        &mut self,
        name: &str,
        middle: usize,
        is_alike: impl Fn(usize) -> bool,
    ) -> usize {
        const TRIES: usize = 6;
        let shift = self.shifts.get(self.sizes).copied().unwrap_or(0);
        self.sizes += 1;
        let mut size = middle;
        for _ in 0..TRIES {
            let around = sized(&mut self.case, &(middle.div_ceil(2)..=2 * middle));
            if size == middle && is_alike(around) {
                size = around;
            }
        }
        let size = self.given_size(name).unwrap_or((size >> shift).max(1));
        self.tell(name, size);
        size
    }

    /// A number from `low` to below `high`.
    pub fn number(&mut self, name: &str, low: f64, high: f64) -> f64 {
        let share = (self.case.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        // A number of f32, which is what kernels take.
        let number = f64::from((low + share * (high - low)) as f32);
        self.tell(name, number);
        number
    }

    /// A place below `limit`, which is at least 1.
    pub fn place(&mut self, limit: usize) -> usize {
        below(&mut self.case, limit)
    }

    /// Normal numbers, or whole ones from -3 to 3 where that was told.
    pub fn normal(&mut self, count: usize, deviation: f64, storage: Storage) -> Vec<f64> {
        let seed = self.case.next_u64();
        if self.has_whole_numbers() {
            let mut rng = stream(seed, WHOLE_NUMBERS);
            return (0..count).map(|_| below(&mut rng, 7) as f64 - 3.0).collect();
        }
        normal(seed, count, deviation, storage)
    }

    /// A seed for what draws by itself.
    pub fn seed(&mut self) -> u64 {
        self.case.next_u64()
    }

    /// Now and then makes one of `values` NaN or infinite.
    pub fn spoil(&mut self, name: &str, values: &mut [f64]) {
        self.spoil_by(name, values, &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]);
    }

    /// Now and then makes one of `values` one of those.
    pub fn spoil_by(&mut self, name: &str, values: &mut [f64], by: &[f64]) {
        if self.holds(&format!("spoilt-{name}"), 60) && !values.is_empty() {
            let value = self.one_of("by", by);
            let drawn = self.place(values.len());
            let place = self.given_size("at").unwrap_or(drawn).min(values.len() - 1);
            self.tell("at", place);
            values[place] = value;
        }
    }
}

fn below(rng: &mut ChaCha8Rng, limit: usize) -> usize {
    (rng.next_u64() % limit as u64) as usize
}

fn sized(rng: &mut ChaCha8Rng, range: &RangeInclusive<usize>) -> usize {
    /// What tiles, vectors and planes are multiples of.
    const EDGES: [usize; 8] = [4, 8, 16, 32, 64, 128, 256, 1024];

    let (low, high) = (*range.start(), *range.end());
    if low >= high {
        return low;
    }
    let share = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    let ratio = (high + 1) as f64 / low.max(1) as f64;
    let size = (low.max(1) as f64 * ratio.powf(share)) as usize;
    let edge = EDGES[below(rng, EDGES.len())];
    let beside = below(rng, 6);
    let size = match beside {
        // Beneath an edge, on it, above it.
        0..=2 if size >= edge => size / edge * edge + beside - 1,
        _ => size,
    };
    size.clamp(low.max(1), high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(seed: u64, index: u64, shifts: &[u32]) -> Vec<usize> {
        let mut draw = Draw::new(seed, 5, index, shifts);
        (0..4).map(|_| draw.size("x", 1..=4096)).collect()
    }

    #[test]
    fn a_seed_and_an_index_make_the_same_case_again() {
        assert_eq!(sizes(1, 7, &[]), sizes(1, 7, &[]));
        assert_ne!(sizes(1, 7, &[]), sizes(1, 8, &[]));
        assert_ne!(sizes(1, 7, &[]), sizes(2, 7, &[]));
    }

    #[test]
    fn what_is_told_is_not_drawn_and_leaves_the_rest_as_it_is() {
        let ask = |draw: &mut Draw| {
            let kind = draw.plan("kind", &["a", "b", "c"]);
            let planned = draw.planned("planned", 2);
            let rare = (0..500).any(|_| draw.holds("rare", 60));
            (kind, planned, rare, draw.size("size", 1..=4096), draw.size("other", 1..=4096))
        };
        let drawn = ask(&mut Draw::of(&Told::default(), 7));
        let told = Told::default().with("kind", "c").with("planned", true).with("size", 5);
        let mut draw = Draw::of(&told, 7);
        let (kind, planned, rare, size, other) = ask(&mut draw);
        assert_eq!((kind, planned, rare, size), ("c", true, false, 5));
        assert_eq!(other, drawn.4);
        assert!(draw.unheeded().is_empty());
    }

    #[test]
    fn what_is_told_in_vain_is_named() {
        let told = Told::default().with("kind", "z").with("knid", "a");
        let mut draw = Draw::of(&told, 7);
        draw.plan("kind", &["a", "b"]);
        assert_eq!(draw.unheeded(), ["kind=\"z\"", "knid=\"a\""]);
    }

    #[test]
    fn whole_numbers_are_small_and_of_both_signs() {
        let numbers = Draw::of(&Told::default().with_whole_numbers(), 7);
        let numbers = numbers.clone().normal(1000, 0.01, Storage::F16);
        assert!(numbers.iter().all(|x| x.fract() == 0.0 && x.abs() <= 3.0));
        for number in -3..=3 {
            assert!(numbers.contains(&f64::from(number)), "{number}");
        }
    }

    #[test]
    fn a_cut_size_leaves_the_others_as_they_are() {
        let (whole, cut) = (sizes(1, 7, &[]), sizes(1, 7, &[0, 2]));
        assert_eq!((whole[0], whole[2], whole[3]), (cut[0], cut[2], cut[3]));
        assert_eq!(cut[1], (whole[1] >> 2).max(1));
    }

    #[test]
    fn cases_share_a_few_plans() {
        let drawn = |index| {
            let mut draw = Draw::new(3, 5, index, &[]);
            draw.planned_size("x", 1..=1_000_000)
        };
        let mut seen: Vec<usize> = (0..500).map(drawn).collect();
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() <= 5, "{seen:?}");
        assert!(seen.len() > 2, "{seen:?}");
    }

    #[test]
    fn sizes_of_a_class_differ_and_divide_as_one() {
        for middle in [1, 2, 3, 8, 12, 100, 255, 768] {
            let mut seen = Vec::new();
            for index in 0..200 {
                let size = Draw::new(4, 5, index, &[]).size_in_class("x", middle);
                assert_eq!(size.ilog2(), middle.ilog2(), "{size} for {middle}");
                let class = |size: usize| size.trailing_zeros().min(3);
                assert_eq!(class(size), class(middle), "{size} for {middle}");
                seen.push(size);
            }
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() > middle / 25, "{} sizes for {middle}", seen.len());
        }
    }

    #[test]
    fn divided_sizes_are_of_one_kind() {
        let kind = |size: usize| [1, 2, 2, 8][size.trailing_zeros().min(3) as usize];
        for by in [1, 2, 8] {
            let size = |index| Draw::new(4, 5, index, &[]).divided("x", 1..=520, by);
            assert!((0..200).all(|index| kind(size(index)) == by && size(index) < 530));
        }
    }

    #[test]
    fn sizes_reach_their_limits_and_edges() {
        let mut seen = Vec::new();
        for index in 0..2000 {
            seen.extend(sizes(9, index, &[]));
        }
        assert!(seen.iter().all(|size| (1..=4096).contains(size)));
        for edge in [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129] {
            assert!(seen.contains(&edge), "{edge}");
        }
    }
}
