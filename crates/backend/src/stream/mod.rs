//! Burn's operation stream: patterns of operations that are looked for in it, and the protocol by which a
//! provider follows it and claims operations.

mod arithmetic;
mod clock;
#[cfg(test)]
pub(crate) mod emit;
mod fuser;
mod matcher;
mod pattern;
mod scalars;
mod single;
#[cfg(test)]
mod tests;

pub(crate) use arithmetic::{arithmetic_output, is_parameter_cast, parameter_cast};
pub(crate) use clock::{StreamClock, is_own_or_reduction, separates};
pub(crate) use fuser::{
    Claim, Claimed, Done, Elapsed, Fuser, Moment, Next, Part, Replacement, Search, register,
};
pub(crate) use matcher::Matcher;
pub(crate) use pattern::{
    ANY_NUMBER, ExpectedScalar, Name, Pattern, PatternStep, burn_score, is_last, number,
};
pub(crate) use scalars::{Scalars, range, ranges};
pub(crate) use single::{SingleOperation, SingleSearch};
