use super::{AdamwWalk, launch::AdamwTensors};
use crate::{
    KernelError,
    buffer::{Buffer, Rows},
};
use cubecl::ir::{ElemType, FloatKind};

pub(super) const OP: &str = "adamw_update";

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// A step's numbers, of which all parameters of a group share all but the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwStep {
    /// Decay of the first moment, from 0 to below 1.
    pub beta_1: f64,
    /// Decay of the second moment, from 0 to below 1.
    pub beta_2: f64,
    /// Keeps the division finite; not negative.
    pub epsilon: f64,
    /// Decoupled weight decay, before the rate.
    pub weight_decay: f64,
    /// The learning rate.
    pub rate: f64,
    /// Steps up to this one and with it, those included that a gate took back; from 1.
    pub time: usize,
}

impl AdamwStep {
    /// Checks what would make the update no number.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] naming the number.
    pub fn check(&self) -> Result<(), KernelError> {
        let invalid = |argument, expected: &str, actual: String| {
            Err(KernelError::InvalidProblem { op: OP, argument, expected: expected.into(), actual })
        };
        for (argument, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return invalid(argument, "a number from 0 to below 1", beta.to_string());
            }
        }
        if !(self.epsilon >= 0.0 && self.epsilon.is_finite()) {
            return invalid("epsilon", "a number from 0", self.epsilon.to_string());
        }
        if self.time == 0 {
            return invalid("time", "at least 1, the first step", "0".into());
        }
        Ok(())
    }
}

/// What an update asks: how many elements of which types, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamwProblem {
    /// Rows of each tensor; 1 where nothing lies between the rows of any.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Elements from one row to the next, of parameter, gradient and both moments.
    pub pitches: [usize; 4],
    /// Type of the parameter.
    pub parameter: ElemType,
    /// Type of its gradient.
    pub gradient: ElemType,
    /// Elements of the widest vectors that may go beyond the end of every row.
    beyond_rows: usize,
}

impl AdamwProblem {
    /// The problem that `tensors` pose.
    ///
    /// # Errors
    ///
    /// [`KernelError::Unsupported`] for a dtype other than f32, f16 and bf16 and for parameters beyond
    /// 32-bit indices; [`KernelError::InvalidProblem`] when the tensors do not go together.
    pub fn new(tensors: &AdamwTensors) -> Result<Self, KernelError> {
        /// Units step beyond the end before they stop.
        const STEP: usize = 1 << 24;
        let AdamwTensors { parameter, gradient, first, second } = tensors;
        for (argument, tensor) in [("parameter", parameter), ("gradient", gradient)] {
            let dtype = tensor.buffer.dtype;
            if !matches!(dtype, ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16))
            {
                let reason = format!("{argument} of {dtype:?}; it takes f32, f16 and bf16");
                return Err(KernelError::Unsupported { op: OP, reason });
            }
        }
        let all = [parameter, gradient, first, second];
        let pitched = all.into_iter().find(|tensor| !tensor.is_contiguous());
        let (rows, columns) =
            pitched.map_or((1, parameter.elements()), |tensor| (tensor.rows, tensor.columns));
        check_rows([rows, columns], parameter.buffer.dtype, "parameter", parameter)?;
        check_rows([rows, columns], gradient.buffer.dtype, "gradient", gradient)?;
        check_rows([rows, columns], F32, "first", first)?;
        check_rows([rows, columns], F32, "second", second)?;
        let pitches = all.map(|tensor| if tensor.is_contiguous() { columns } else { tensor.pitch });
        let longest = pitches.iter().max().map_or(0, |pitch| rows * pitch);
        if u32::try_from(longest + STEP).is_err() {
            let reason = format!("{longest} elements with what lies between their rows");
            return Err(KernelError::Unsupported { op: OP, reason });
        }
        // All that any device has.
        let beyond_rows = [8, 4, 2, 1].into_iter().find(|size| {
            all.iter().all(|tensor| !tensor.is_contiguous() && tensor.takes_vectors(*size, false))
        });
        Ok(Self {
            rows,
            columns,
            pitches,
            parameter: parameter.buffer.dtype,
            gradient: gradient.buffer.dtype,
            beyond_rows: beyond_rows.unwrap_or(1),
        })
    }

    /// Elements of the parameter.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// Bytes that have to be moved: parameter and moments in and out, the gradient in.
    pub fn bytes(&self) -> usize {
        let moments = 4 * F32.size();
        self.elements() * (moments + 2 * self.parameter.size() + self.gradient.size())
    }

    /// Whether vectors of that many elements can be walked so.
    pub(super) fn allows(&self, walk: AdamwWalk, vector_size: usize) -> bool {
        let Self { rows, columns, pitches: [parameter, gradient, first, second], .. } = *self;
        let divides = |elements: usize| elements.is_multiple_of(vector_size);
        let is_flat = |pitch: usize| rows == 1 || pitch == columns;
        match walk {
            AdamwWalk::Flat => self.pitches.into_iter().all(is_flat) && divides(columns * rows),
            AdamwWalk::Rows => {
                self.pitches.into_iter().all(divides)
                    && (divides(columns) || vector_size <= self.beyond_rows)
            }
            AdamwWalk::Gathered => {
                [parameter, first, second].into_iter().all(is_flat)
                    && !is_flat(gradient)
                    && divides(columns * rows)
                    // A vector goes from one row into the next, and no further.
                    && vector_size <= columns
            }
        }
    }

    /// Vectors of a walk.
    pub(super) fn vectors(&self, walk: AdamwWalk, vector_size: usize) -> usize {
        match walk {
            AdamwWalk::Flat | AdamwWalk::Gathered => self.elements() / vector_size,
            AdamwWalk::Rows => self.rows * self.columns.div_ceil(vector_size),
        }
    }
}

/// Whether `tensor` has those rows, or as many elements in one, of that type and within its memory.
fn check_rows(
    [rows, columns]: [usize; 2],
    dtype: ElemType,
    argument: &'static str,
    tensor: &Rows,
) -> Result<(), KernelError> {
    let is_alike = match tensor.is_contiguous() {
        true => tensor.elements() == rows * columns,
        false => (tensor.rows, tensor.columns) == (rows, columns) && tensor.pitch > columns,
    };
    if is_alike && tensor.buffer.dtype == dtype && tensor.span() <= tensor.buffer.elements {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op: OP,
        argument,
        expected: format!("{rows} rows of {columns} elements of {dtype:?}"),
        actual: format!("{tensor:?}"),
    })
}

/// Whether `buffer` holds that many elements of that type.
fn check(
    elements: usize,
    dtype: ElemType,
    argument: &'static str,
    buffer: &Buffer,
) -> Result<(), KernelError> {
    if (buffer.elements, buffer.dtype) == (elements, dtype) {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op: OP,
        argument,
        expected: format!("{elements} elements of {dtype:?}"),
        actual: format!("{} elements of {:?}", buffer.elements, buffer.dtype),
    })
}

/// Whether a gate's reading is one number of f32.
pub(super) fn check_reading(argument: &'static str, buffer: &Buffer) -> Result<(), KernelError> {
    check(1, F32, argument, buffer)
}

/// Whether a seed is two words.
pub(super) fn check_seed(seed: &Buffer) -> Result<(), KernelError> {
    if seed.elements == 2 && seed.dtype.size() == 4 {
        return Ok(());
    }
    Err(KernelError::InvalidProblem {
        op: OP,
        argument: "seed",
        expected: "2 elements of 32 bits".into(),
        actual: format!("{} elements of {:?}", seed.elements, seed.dtype),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: AdamwStep = AdamwStep {
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        rate: 1e-3,
        time: 1,
    };

    #[test]
    fn an_element_moves_28_bytes_in_f32_and_22_in_bf16() {
        let bytes = |kind| {
            let dtype = ElemType::Float(kind);
            let (rows, pitches) = (1, [10; 4]);
            let (parameter, gradient, beyond_rows) = (dtype, dtype, 1);
            AdamwProblem { rows, columns: 10, pitches, parameter, gradient, beyond_rows }.bytes()
        };
        assert_eq!(bytes(FloatKind::F32), 280);
        assert_eq!(bytes(FloatKind::BF16), 220);
    }

    #[test]
    fn numbers_that_lead_to_no_number_are_named() {
        assert_eq!(STEP.check(), Ok(()));
        let argument = |step: AdamwStep| match step.check() {
            Err(KernelError::InvalidProblem { argument, .. }) => argument,
            other => panic!("{step:?} gave {other:?}"),
        };
        assert_eq!(argument(AdamwStep { beta_1: 1.0, ..STEP }), "beta_1");
        assert_eq!(argument(AdamwStep { beta_2: f64::NAN, ..STEP }), "beta_2");
        assert_eq!(argument(AdamwStep { epsilon: -1.0, ..STEP }), "epsilon");
        assert_eq!(argument(AdamwStep { time: 0, ..STEP }), "time");
    }
}
