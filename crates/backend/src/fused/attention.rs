//! The provider that takes Burn's own `module::attention`, which without autodiff is one operation
//! in the stream. With autodiff Burn breaks it up into its parts, and nothing is left to take.
//!
//! Burn's operation and the kernel mean the same: a mask is true where a pair is left out, the cap
//! is below the mask and the bias above it, causality is aligned at the lower right, and a query
//! that sees nothing has output zero. They part where a number is not finite: behind a pair that is
//! left out, Burn multiplies it by zero, which is NaN, and the kernel may never read it.

use crate::{
    declined::unsupported,
    ops::attention::{Inputs, Mask, Settings, Window, cube::Call},
    stream::{Done, Replacement, SingleOperation},
    tensors::{Location, Tensors, consume, cube_tensor, register_cube_tensor, register_zeros},
};
use blackburn_kernels::{Family, KernelError};
use burn_backend::{Shape, TensorMetadata, ops::AttentionModuleOptions};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_ir::{AttentionOpIr, ModuleOperationIr, OperationIr};
use cubecl::client::Client;
use serde::{Deserialize, Serialize};

const OP: &str = "attention";

/// Attention on the kernel, or as Burn has it where that declines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Attention(AttentionOpIr);

impl SingleOperation for Attention {
    type Settings = ();

    fn of(operation: &OperationIr, (): &()) -> Option<Self> {
        let OperationIr::Module(ModuleOperationIr::Attention(attention)) = operation else {
            return None;
        };
        Some(Self(attention.clone()))
    }
}

impl Replacement for Attention {
    const NAME: &'static str = "BlackburnAttention";

    fn launch(&self, tensors: &mut Tensors) -> Result<Done, KernelError> {
        let AttentionOpIr { query, key, value, mask, attn_bias, options, out } = &self.0;
        let tensor = |tensor| cube_tensor(tensors, tensor, OP);
        let inputs = Inputs {
            q: tensor(query)?,
            k: tensor(key)?,
            v: tensor(value)?,
            mask: mask.as_ref().map(tensor).transpose()?.map_or(Mask::Absent, Mask::Present),
            bias: attn_bias.as_ref().map(tensor).transpose()?.into(),
        };
        check(&inputs)?;
        if [&inputs.q, &inputs.k].iter().any(|tensor| tensor.shape().num_elements() == 0) {
            // A query that sees nothing has output zero.
            register_zeros(tensors, out, &Location::of(&inputs.q), OP)?;
        } else {
            let settings = settings(&options.clone().into(), &inputs.q.shape());
            let call = Call::new(inputs, &settings);
            let plan = call.plan()?;
            if !pays(plan.family, has_tensor_cores(call.client())) {
                let reason = "no kernel on tensor cores, which Burn's own products run on";
                return Err(unsupported(OP, reason));
            }
            let output = call.forward(&plan)?;
            register_cube_tensor(tensors, out, output.out, OP)?;
        }
        for tensor in [query, key, value].into_iter().chain(mask).chain(attn_bias) {
            consume(tensors, tensor);
        }
        Ok(Done::All)
    }
}

fn settings(options: &AttentionModuleOptions, q: &Shape) -> Settings {
    Settings {
        scale: options.scale.unwrap_or_else(|| 1.0 / (q[3] as f64).sqrt()),
        window: Window { left: None, right: options.is_causal.then_some(0) },
        softcap: options.softcap,
        dropout: None,
        sequences: None,
    }
}

/// Whether a kernel is expected to be faster than Burn's operations. Those go through all pairs
/// several times, but run their products on tensor cores where there are some, f32 by way of TF32.
/// A kernel of ordinary arithmetic has not been measured against that.
fn pays(family: Family, has_tensor_cores: bool) -> bool {
    family != Family::Portable || !has_tensor_cores
}

/// Whether CubeCL knows of matrix instructions on the device, of whatever types.
fn has_tensor_cores(client: &Client) -> bool {
    let matmul = &client.properties().features.matmul;
    !(matmul.cmma.is_empty() && matmul.mma.is_empty())
}

/// Whether the tensors go together as the kernel has it. Burn takes more, and refuses what remains.
fn check(inputs: &Inputs<CubeBackend>) -> Result<(), KernelError> {
    let Inputs { q, k, v, mask, bias } = inputs;
    let (shape_q, shape_kv) = (q.shape(), k.shape());
    if v.shape() != shape_kv {
        return Err(unsupported(OP, "values of another shape than keys"));
    }
    if [0, 1, 3].iter().any(|dim| shape_q[*dim] != shape_kv[*dim]) {
        return Err(unsupported(
            OP,
            "keys of another batch, other heads or another width than queries",
        ));
    }
    if k.dtype != q.dtype || v.dtype != q.dtype {
        return Err(unsupported(OP, "queries, keys and values of different types"));
    }
    let pairs = [shape_q[0], shape_q[1], shape_q[2], shape_kv[2]];
    let is_broadcast = |tensor: &CubeTensor| {
        let shape = tensor.shape();
        pairs.iter().zip(shape.iter()).all(|(pairs, size)| *size == 1 || size == pairs)
    };
    if let Mask::Present(mask) = mask
        && !is_broadcast(mask)
    {
        return Err(unsupported(OP, "a mask of another shape than the pairs of queries and keys"));
    }
    if let Some(bias) = bias.as_option()
        && !(is_broadcast(bias) && bias.dtype == q.dtype)
    {
        return Err(unsupported(OP, "a bias of another shape or type than the scores"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Fuser, SingleSearch, emit::tensor};
    use burn_backend::DType;
    use burn_ir::{
        AttentionOptionsIr, FloatOperationIr, NumericOperationIr, ScalarIr, ScalarOpIr,
        TensorStatus::{NotInit, ReadOnly, ReadWrite},
        UnaryOpIr,
    };

    fn attention() -> OperationIr {
        let of = |id| tensor(id, [2, 3, 4, 5], ReadWrite);
        OperationIr::Module(ModuleOperationIr::Attention(AttentionOpIr {
            query: of(1),
            key: of(2),
            value: of(3),
            mask: None,
            attn_bias: None,
            options: AttentionOptionsIr { scale: None, softcap: None, is_causal: true },
            out: tensor(4, [2, 3, 4, 5], NotInit),
        }))
    }

    /// Tensor 1 times a number.
    fn scaled() -> OperationIr {
        let lhs = tensor(0, [2, 3, 4, 5], ReadOnly);
        let out = tensor(1, [2, 3, 4, 5], NotInit);
        let operation = ScalarOpIr { lhs, rhs: ScalarIr::UInt(0), out };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::MulScalar(operation))
    }

    fn exponential() -> OperationIr {
        let input = tensor(0, [2, 3, 4, 5], ReadOnly);
        let out = tensor(1, [2, 3, 4, 5], NotInit);
        OperationIr::Float(DType::F32, FloatOperationIr::Exp(UnaryOpIr { input, out }))
    }

    /// The operations taken, if the fuser is ready behind them.
    fn taken(operations: &[OperationIr]) -> Option<usize> {
        Fuser::after(SingleSearch::<Attention>::default(), operations).claims()
    }

    #[test]
    fn attention_is_taken_alone_and_behind_arithmetic() {
        assert_eq!(taken(&[attention()]), Some(1));
        assert_eq!(taken(&[scaled(), attention()]), Some(2));
        assert_eq!(taken(&[attention(), scaled()]), Some(1));
        assert_eq!(taken(&[scaled(), scaled(), attention()]), Some(3));
        assert_eq!(taken(&[exponential(), attention()]), None);
    }

    #[test]
    fn tensor_cores_are_left_to_burn_where_no_kernel_uses_them() {
        assert!(pays(Family::Wgmma, true));
        assert!(!pays(Family::Portable, true));
        assert!(pays(Family::Portable, false));
    }

    #[test]
    fn scale_and_causality_are_those_of_burn() {
        let plain = settings(&AttentionModuleOptions::default(), &Shape::new([1, 2, 3, 16]));
        assert_eq!((plain.scale, plain.window, plain.softcap), (0.25, Window::default(), None));
        let options =
            AttentionModuleOptions { scale: Some(2.0), softcap: Some(30.0), is_causal: true };
        let given = settings(&options, &Shape::new([1, 2, 3, 16]));
        let window = Window { left: None, right: Some(0) };
        assert_eq!((given.scale, given.window, given.softcap), (2.0, window, Some(30.0)));
    }
}
