//! How two numbers become one, and what a product is kept as.

use cubecl::prelude::*;

/// How a scan combines numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScanOperation {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The largest; NaN if one is.
    Max,
    /// The smallest; NaN if one is.
    Min,
}

/// What a kernel combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Combination {
    pub(crate) operation: ScanOperation,
    /// Whether there are NaN and infinity.
    pub(crate) is_float: bool,
    /// Whether numbers are kept as a number and a power of two.
    pub(crate) is_scaled: bool,
}

/// What numbers were combined to: `value`, times two to the power of `exponent` where numbers are scaled.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Combined<A: Numeric> {
    pub(crate) value: A,
    pub(crate) exponent: i32,
}

/// Bits of a number's fraction in f32.
const FRACTION_BITS: u32 = 23;
/// Its exponent, moved to the lowest bits.
const EXPONENT: u32 = 0xff;
/// What is added to an exponent where it is stored.
const BIAS: i32 = 127;
/// Beyond this an exponent is no more told apart: f32 is zero or infinite long before.
const FARTHEST: i32 = 1 << 28;

/// What changes no number. `extreme` is the infinity that every number lies on one side of, of which WGSL has no
/// constant.
#[cube]
pub(crate) fn neutral<A: Numeric>(extreme: f32, #[comptime] how: Combination) -> Combined<A> {
    let value = match comptime!(how.operation) {
        ScanOperation::Sum => A::from_int(0),
        ScanOperation::Product => A::from_int(1),
        ScanOperation::Max => {
            if comptime!(how.is_float) {
                A::cast_from(extreme)
            } else {
                A::min_value()
            }
        }
        ScanOperation::Min => {
            if comptime!(how.is_float) {
                A::cast_from(extreme)
            } else {
                A::max_value()
            }
        }
    };
    Combined::<A> { value, exponent: 0i32.runtime() }
}

/// A number as it was read.
#[cube]
pub(crate) fn read<A: Numeric>(value: A, #[comptime] how: Combination) -> Combined<A> {
    let plain = Combined::<A> { value, exponent: 0i32.runtime() };
    if comptime!(how.is_scaled) { scaled::<A>(&plain) } else { plain }
}

/// The same number, with a value in `[1, 2)` or `(-2, -1]`. Zero, infinity and NaN stay.
#[cube]
fn scaled<A: Numeric>(number: &Combined<A>) -> Combined<A> {
    let x = f32::cast_from(number.value);
    // Subnormal numbers have no exponent of their own before they are multiplied.
    let is_small = (u32::reinterpret(x) >> FRACTION_BITS) & EXPONENT == 0;
    let large = select(is_small, x * 16_777_216.0f32, x);
    let lifted = select(is_small, 24i32, 0i32);
    let bits = u32::reinterpret(large);
    let field = (bits >> FRACTION_BITS) & EXPONENT;
    let is_plain = field != 0 && field != EXPONENT;
    let fraction =
        (bits & !(EXPONENT << FRACTION_BITS)) | comptime!((BIAS as u32) << FRACTION_BITS);
    let value = select(is_plain, f32::reinterpret(fraction), x);
    let moved = number.exponent + i32::cast_from(field) - BIAS - lifted;
    let moved = max(min(moved, FARTHEST), -FARTHEST);
    Combined::<A> { value: A::cast_from(value), exponent: select(is_plain, moved, 0i32) }
}

/// `early`, then `late`. A scaled value grows with each number until it is scaled again.
#[cube]
pub(crate) fn append<A: Numeric>(
    early: &Combined<A>,
    late: &Combined<A>,
    #[comptime] how: Combination,
) -> Combined<A> {
    let value = match comptime!(how.operation) {
        ScanOperation::Sum => early.value + late.value,
        ScanOperation::Product => early.value * late.value,
        ScanOperation::Max => {
            let larger = select(late.value > early.value, late.value, early.value);
            nan_or::<A>(early.value, late.value, larger, how)
        }
        ScanOperation::Min => {
            let smaller = select(late.value < early.value, late.value, early.value);
            nan_or::<A>(early.value, late.value, smaller, how)
        }
    };
    let mut exponent = early.exponent;
    if comptime!(how.is_scaled) {
        exponent = early.exponent + late.exponent;
    }
    Combined::<A> { value, exponent }
}

/// `other`, or NaN if one of both is NaN.
#[cube]
fn nan_or<A: Numeric>(early: A, late: A, other: A, #[comptime] how: Combination) -> A {
    if comptime!(how.is_float) {
        let behind = select(is_nan::<A>(late), late, other);
        select(is_nan::<A>(early), early, behind)
    } else {
        other
    }
}

/// By its bits: WGSL promises nothing of comparisons with NaN.
#[cube]
fn is_nan<A: Numeric>(value: A) -> bool {
    let bits = u32::reinterpret(f32::cast_from(value));
    bits << 1 > comptime!(EXPONENT << (FRACTION_BITS + 1))
}

/// `early`, then `late`, scaled again.
#[cube]
pub(crate) fn combine<A: Numeric>(
    early: &Combined<A>,
    late: &Combined<A>,
    #[comptime] how: Combination,
) -> Combined<A> {
    let both = append::<A>(early, late, how);
    if comptime!(how.is_scaled) { scaled::<A>(&both) } else { both }
}

/// The number that is written.
#[cube]
pub(crate) fn written<A: Numeric>(number: &Combined<A>, #[comptime] how: Combination) -> A {
    if comptime!(how.is_scaled) {
        // In two steps, each of which is a number of f32: the last rounds, if any.
        let exponent = max(min(number.exponent, 252i32), -252i32);
        let half = exponent / 2;
        let value = f32::cast_from(number.value);
        A::cast_from(value * power_of_two(half) * power_of_two(exponent - half))
    } else {
        number.value
    }
}

/// For exponents from -126 to 127.
#[cube]
fn power_of_two(exponent: i32) -> f32 {
    f32::reinterpret(u32::cast_from(exponent + BIAS) << FRACTION_BITS)
}
