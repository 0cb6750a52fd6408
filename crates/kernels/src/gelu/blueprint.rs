use crate::{
    Promise,
    column_sum::{ColumnSumBlueprint, ColumnSumProblem},
    elementwise::{ElementwiseBlueprint, ElementwiseProblem},
    plan::tell_plan,
};
use cubecl::client::Client;
use std::fmt;

/// How the gradient of GELU and the sums of its columns are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GeluSumBlueprint {
    /// By one kernel, spread over the device as that of a column sum.
    Fused(ColumnSumBlueprint),
    /// By the gradient's kernel, and a column sum that reads what it wrote.
    Separate,
}

impl GeluSumBlueprint {
    /// The share of lanes with columns from which one kernel pays. Idle ones slow the gradient down as
    /// much as they slow the sum, and the sum takes a third of the gradient's time: a third of its bytes
    /// at about the same rate (bf16, H200).
    const BUSY_LANES: f64 = 0.75;
    /// Four cubes of 256 units a multiprocessor, all that a launch has for it.
    pub(crate) const PROMISE: Promise = Promise::registers(64);
    /// With a bias and dropout: three cubes on Blackwell, which has never run it, and four elsewhere.
    pub(crate) const LAYER_PROMISE: Promise = Promise::registers(80);

    /// One kernel, unless columns leave too many of its lanes idle or allow only narrower vectors than
    /// the gradient by itself has.
    pub fn plan(problem: &ColumnSumProblem, client: &Client) -> Self {
        let sum = ColumnSumBlueprint::plan(problem, client);
        let elements = problem.outer * problem.rows * problem.columns;
        let gradient = ElementwiseProblem { elements, dtype: problem.dtype };
        let gradient = ElementwiseBlueprint::plan(&gradient, client);
        let pays = sum.vector_size == gradient.vector_size
            && sum.busy_lanes(problem.columns) >= Self::BUSY_LANES;
        let plan = if pays { Self::Fused(sum) } else { Self::Separate };
        let busy = sum.busy_lanes(problem.columns);
        let reason = format_args!("{busy:.2} of the lanes have columns");
        tell_plan("gelu_backward_sum", problem, &plan, reason);
        plan
    }
}

impl fmt::Display for GeluSumBlueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fused(sum) => write!(f, "one kernel, {sum}"),
            Self::Separate => f.write_str("gradient and sum apart"),
        }
    }
}
