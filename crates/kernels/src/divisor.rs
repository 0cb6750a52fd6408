//! Division by numbers that are known at the launch: a product and a shift (Granlund and Montgomery,
//! "Division by Invariant Integers using Multiplication", 1994, figure 4.1).

use cubecl::prelude::*;

/// Dividends have to be below this: one more bit and the sum of the two terms would overflow.
pub(crate) const DIVIDEND_LIMIT: usize = 1 << 31;

/// A divisor with its inverse.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Divisor {
    pub(crate) divisor: u32,
    multiplier: u32,
    shift: u32,
}

/// The divisor as an argument of a kernel. Nothing is divided by zero: it stands for 1.
pub(crate) fn divisor(divisor: usize) -> DivisorLaunch {
    let (multiplier, shift) = inverse(divisor.max(1) as u32);
    DivisorLaunch::new(divisor.max(1) as u32, multiplier, shift)
}

/// Multiplier and shift.
fn inverse(divisor: u32) -> (u32, u32) {
    let shift = divisor.next_power_of_two().trailing_zeros();
    let excess = (1u64 << shift) - u64::from(divisor);
    // Below 2^32, because a power of two is less than twice the number below it.
    (((excess << 32) / u64::from(divisor) + 1) as u32, shift)
}

/// Quotient and remainder.
#[cube]
pub(crate) fn divide(dividend: u32, by: &Divisor) -> (u32, u32) {
    let quotient = (u32::mul_hi(dividend, by.multiplier) + dividend) >> by.shift;
    (quotient, dividend - quotient * by.divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_those_of_a_division() {
        let divisors = (1..300).chain([1 << 16, (1 << 16) + 1, 802_816, (1 << 31) - 1, 1 << 31]);
        for divisor in divisors {
            let (multiplier, shift) = inverse(divisor);
            let largest = DIVIDEND_LIMIT as u32 - 1;
            let edges = [largest / divisor, largest / divisor / 2]
                .map(|quotient| quotient * divisor)
                .into_iter()
                .flat_map(|multiple| [multiple.saturating_sub(1), multiple, multiple + 1]);
            for dividend in (0..1000).chain(edges).chain([largest]).filter(|it| *it <= largest) {
                let product = ((u64::from(dividend) * u64::from(multiplier)) >> 32) as u32;
                let quotient = product.checked_add(dividend).unwrap() >> shift;
                assert_eq!(quotient, dividend / divisor, "{dividend} by {divisor}");
            }
        }
    }
}
