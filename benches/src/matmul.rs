//! Matrix products of the catalogue on the device, checked against f64.

use crate::{Rotated, dtype_of};
use blackburn_kernels::{
    KernelError,
    buffer::Buffer,
    matmul::{
        Epilogue, F32Precision, MatmulBlueprint, MatmulProblem, TensorLayout, matmul, matmul_with,
    },
};
use blackburn_reference::{
    matmul::{MatmulCase, MatmulPrecision, spot_check_indices},
    storage::Storage,
    tolerance::compare,
};
use clap::ValueEnum;
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};

/// In what a product is computed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ProductType {
    /// bf16 into bf16.
    Bf16,
    /// f16 into f16.
    F16,
    /// f32 into f32, through TF32.
    Tf32,
    /// f32 into f32.
    F32,
    /// e4m3 into bf16.
    E4m3,
}

impl ProductType {
    fn precision(self) -> F32Precision {
        if matches!(self, Self::F32) { F32Precision::Full } else { F32Precision::Tf32 }
    }

    fn operand(self) -> ElemType {
        match self {
            Self::E4m3 => ElemType::Float(FloatKind::E4M3),
            _ => dtype_of(self.output()),
        }
    }

    fn output(self) -> Storage {
        match self {
            Self::Bf16 | Self::E4m3 => Storage::Bf16,
            Self::F16 => Storage::F16,
            Self::Tf32 | Self::F32 => Storage::F32,
        }
    }

    fn bounds(self, promotion: usize) -> MatmulPrecision {
        match self {
            Self::Bf16 | Self::F16 => MatmulPrecision::tensor_core(self.output()),
            Self::Tf32 => MatmulPrecision::tf32(),
            Self::F32 => MatmulPrecision::exact(Storage::F32),
            Self::E4m3 => {
                MatmulPrecision::fp8(Storage::Bf16, (promotion > 0).then_some(128 * promotion))
            }
        }
    }
}

/// A product with its operands on the device.
#[derive(Debug)]
pub struct Product {
    /// What is asked of the kernels.
    pub problem: MatmulProblem,
    case: MatmulCase,
    dtype: ProductType,
    lhs: Rotated,
    rhs: Rotated,
}

impl Product {
    /// Puts normal numbers on the device.
    ///
    /// # Errors
    ///
    /// Cases that no kernel takes.
    pub fn new(client: &Client, case: MatmulCase, dtype: ProductType) -> Result<Self, KernelError> {
        let (lhs, rhs) = (case.lhs_strides(), case.rhs_strides());
        let problem = MatmulProblem::new(
            TensorLayout {
                shape: &[case.batch, case.m, case.k],
                strides: &lhs,
                dtype: dtype.operand(),
            },
            TensorLayout {
                shape: &[case.batch, case.k, case.n],
                strides: &rhs,
                dtype: dtype.operand(),
            },
            dtype_of(dtype.output()),
            dtype.precision(),
        )?;
        let lhs = Rotated::new(client, 1, problem.lhs_span(), dtype.operand());
        let rhs = Rotated::new(client, 2, problem.rhs_span(), dtype.operand());
        Ok(Self { problem, case, dtype, lhs, rhs })
    }

    /// Launches it, by `plan` or by the selector's.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn run(
        &self,
        client: &Client,
        plan: Option<&MatmulBlueprint>,
    ) -> Result<Buffer, KernelError> {
        let (lhs, rhs) = (&self.lhs.buffer, &self.rhs.buffer);
        let epilogue = Epilogue::default();
        let output = match plan {
            Some(plan) => matmul_with(client, &self.problem, plan, lhs, rhs, &epilogue)?,
            None => matmul(client, &self.problem, lhs, rhs, &epilogue)?,
        };
        Ok(output.out)
    }

    /// Compares some elements of `out`, corners among them, with f64; returns the worst error in
    /// units of its bound. `promotion` is the plan's.
    ///
    /// # Errors
    ///
    /// What is wrong.
    pub fn verify(&self, client: &Client, out: &Buffer, promotion: usize) -> Result<f64, String> {
        let case = &self.case;
        let bytes = client.read_one(out.handle.clone()).map_err(|error| error.to_string())?;
        let values = self.dtype.output().decode(&bytes);
        if let Some(at) = values[..case.out_len()].iter().position(|value| !value.is_finite()) {
            return Err(format!("element {at} is {}", values[at]));
        }
        let bounds = self.dtype.bounds(promotion);
        let indices = spot_check_indices(case, 600, 1);
        let (lhs, rhs) = (case.lhs_strides(), case.rhs_strides());
        let mut expected = Vec::with_capacity(indices.len());
        let mut limits = Vec::with_capacity(indices.len());
        for index in &indices {
            let (batch, row) = (index / (case.m * case.n), index / case.n % case.m);
            let column = index % case.n;
            let (mut sum, mut magnitude) = (0.0, 0.0);
            for k in 0..case.k {
                let left = self.lhs.at(lhs[0] * batch + lhs[1] * row + lhs[2] * k);
                let term = left * self.rhs.at(rhs[0] * batch + rhs[1] * k + rhs[2] * column);
                sum += term;
                magnitude += term.abs();
            }
            expected.push(sum);
            limits.push(bounds.bound(sum, magnitude, case.k));
        }
        let actual: Vec<f64> = indices.iter().map(|index| values[*index]).collect();
        compare(&actual, &expected, &limits)
            .map(|agreement| agreement.worst_ratio)
            .map_err(|mismatch| mismatch.to_string())
    }
}
