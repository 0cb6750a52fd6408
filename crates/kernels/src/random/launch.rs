use super::{
    RandomDistribution, RandomProblem,
    forward::{Kind, random_kernel},
    problem::{OP, Threshold, threshold},
};
use crate::{KernelError, ahead, buffer::Buffer, device::widest_vector};
use cubecl::{
    CubeDim, calculate_cube_count_elemwise,
    client::Client,
    ir::{ElemType, UIntKind},
};

/// Numbers of `problem` under `key`, two words.
///
/// # Errors
///
/// As [`RandomProblem::validate`], and [`KernelError::InvalidProblem`] when the key is not two words of 32
/// bits.
pub fn random(
    client: &Client,
    problem: &RandomProblem,
    key: &Buffer,
) -> Result<Buffer, KernelError> {
    problem.validate()?;
    check_key(OP, key)?;
    let y = Buffer::empty(client, problem.elements, problem.dtype);
    if problem.elements == 0 {
        return Ok(y);
    }
    let (kind, limit, low, scale) = match problem.distribution {
        RandomDistribution::Bernoulli(p) => match threshold(p) {
            Threshold::OfHalf(limit) => (Kind::BernoulliOfHalves, limit, 0.0, 1.0),
            Threshold::OfWord(limit) => (Kind::Bernoulli, limit, 0.0, 1.0),
        },
        RandomDistribution::Uniform { low, high } => {
            (Kind::Uniform(problem.bits().unwrap_or_default()), 0, low, high - low)
        }
        RandomDistribution::Normal { mean, deviation } => (Kind::Normal, 0, mean, deviation),
    };
    let numbers = kind.numbers();
    let units = problem.elements.div_ceil(numbers);
    let vector_size = widest_vector(client, problem.dtype.size(), |size| {
        problem.elements.is_multiple_of(size) && numbers.is_multiple_of(size)
    });
    let dim = CubeDim::new(client, units);
    let count = calculate_cube_count_elemwise(client, units, dim);
    // SAFETY: the key has two words, and y its elements, a multiple of the vector size; units stop past its end.
    ahead::launch(client, |client| unsafe {
        random_kernel::launch_unchecked(
            client,
            count.clone(),
            dim,
            vector_size,
            key.arg(1),
            y.arg(vector_size),
            problem.number,
            limit,
            low as f32,
            scale as f32,
            kind,
            problem.dtype,
        )
    });
    Ok(y)
}

/// Checks that `key` is two words. Their signs do not matter.
pub(crate) fn check_key(op: &'static str, key: &Buffer) -> Result<(), KernelError> {
    let is_word = matches!(key.dtype, ElemType::UInt(UIntKind::U32)) || key.dtype == SIGNED_WORD;
    match is_word && key.elements == 2 {
        true => Ok(()),
        false => Err(KernelError::InvalidProblem {
            op,
            argument: "key",
            expected: "2 words of 32 bits".into(),
            actual: format!("{} elements of {:?}", key.elements, key.dtype),
        }),
    }
}

const SIGNED_WORD: ElemType = ElemType::Int(cubecl::ir::IntKind::I32);
