//! The primitives on GPUs.

use super::{
    AttentionPrimitives, CachedAttentionPrimitives, CachedInputs, CachedOutput, Gradients, Inputs,
    Mask, Output, Settings, mask_maps,
};
use crate::tensors::{contiguous, contiguous_buffer, contiguous_tensor, span};
use blackburn_kernels::{
    KernelError, Pass,
    attention::{
        self, AppendProblem, AppendTensors, AttentionBlueprint, AttentionInputs, AttentionProblem,
        AttentionResult, Dropout, HeadStrides, MaskMaps, Order, Pairs, Window,
    },
    buffer::Buffer,
    matmul::F32Precision,
};
use burn::{
    backend::{TensorMetadata, tensor::FloatTensor},
    tensor::{DType, Shape},
};
use burn_backend::cubecl::dtype_to_elem_type;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use burn_std::Metadata;
use cubecl::{
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::CubeElement,
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

impl AttentionPrimitives for CubeBackend {
    fn attention_forward(inputs: Inputs<Self>, settings: Settings) -> Output<Self> {
        let call = Call::new(inputs, &settings);
        call.plan().and_then(|plan| call.forward(&plan)).unwrap_or_else(|error| panic!("{error}"))
    }

    fn attention_backward(
        inputs: Inputs<Self>,
        output: Output<Self>,
        dout: FloatTensor<Self>,
        settings: Settings,
        wants_bias: bool,
    ) -> Gradients<Self> {
        let inputs = if wants_bias { with_gradients_apart(inputs) } else { inputs };
        let mut call = Call::new(inputs, &settings);
        // dq is ordered as the output is, which the forward pass ordered as q.
        let out = if is_ordered(&output.out, call.problem.order_q) {
            output.out
        } else {
            call.problem.order_q = Order::HeadsFirst;
            contiguous(output.out)
        };
        let dout = with_whole_rows(dout);
        let result = AttentionResult {
            out: &span(&out),
            lse: &span(&contiguous(output.lse)),
            dout: &span(&dout),
            dout_strides: call.rows(&dout),
        };
        let gradients = attention::attention_backward(
            call.client(),
            &call.problem,
            &call.inputs(),
            &result,
            wants_bias,
        )
        .unwrap_or_else(|error| panic!("{error}"));
        let dbias = gradients.dbias.map(|dbias| {
            let (q, k) = (call.q.shape(), call.k.shape());
            let pairs = Shape::new([call.problem.bias_batches(), q[1], q[2], k[2]]);
            contiguous_tensor(&call.q, dbias, pairs, DType::F32)
        });
        Gradients {
            dq: like(&call.q, gradients.dq, call.problem.order_q),
            dk: like(&call.k, gradients.dk, call.problem.order_kv),
            dv: like(&call.v, gradients.dv, call.problem.order_kv),
            dbias: dbias.into(),
        }
    }
}

impl CachedAttentionPrimitives for CubeBackend {
    fn cached_attention(inputs: CachedInputs<Self>, settings: Settings) -> CachedOutput<Self> {
        let CachedInputs { q, k, v, keys, values, position } = inputs;
        let position = contiguous_buffer(position);
        append([&keys, &values], [k, v].map(with_whole_rows), &position);
        let (mask, bias) = (Mask::Absent, None.into());
        let call =
            Call::new(Inputs { q, k: keys.clone(), v: values.clone(), mask, bias }, &settings);
        let out = call.decode(&position).unwrap_or_else(|error| panic!("{error}"));
        CachedOutput { out, keys, values }
    }
}

/// Puts new keys and values into the memory of a cache.
fn append(cached: [&CubeTensor; 2], new: [CubeTensor; 2], position: &Buffer) {
    for tensor in cached {
        let (shape, strides) = (tensor.shape(), tensor.meta.strides());
        // A copy of the cache would have the new tokens, and the cache would not.
        assert!(
            !tensor.meta.is_tiled() && (shape[3] == 1 || strides[3] == 1),
            "attention: argument `keys`: expected rows whose elements lie side by side, got strides {strides:?}"
        );
    }
    let (shape, capacity) = (new[0].shape(), cached[0].shape()[2]);
    let problem = AppendProblem {
        batch: shape[0],
        heads: shape[1],
        seq: shape[2],
        capacity,
        head_dim: shape[3],
        dtype: dtype_to_elem_type(new[0].dtype),
        cached: cached.map(|tensor| rows(tensor, false)),
        new: [&new[0], &new[1]].map(|tensor| rows(tensor, false)),
    };
    let [keys, values] = cached.map(span);
    let [new_keys, new_values] = [&new[0], &new[1]].map(span);
    let tensors =
        AppendTensors { cached: [&keys, &values], new: [&new_keys, &new_values], position };
    attention::attention_append(&new[0].client, &problem, &tensors)
        .unwrap_or_else(|error| panic!("{error}"));
}

/// Whether the same input has to give the same bits each time.
static DETERMINISTIC: AtomicBool = AtomicBool::new(false);

/// Whether products of f32 keep all bits.
static FULL_F32: AtomicBool = AtomicBool::new(true);

/// Says for calls from now on whether they have to give the same bits for the same input, and whether products of f32 keep
/// all bits.
pub(crate) fn set_up(deterministic: bool, full_f32: bool) {
    DETERMINISTIC.store(deterministic, Ordering::Relaxed);
    FULL_F32.store(full_f32, Ordering::Relaxed);
}

/// How products of f32 are computed.
pub(crate) fn f32_precision() -> F32Precision {
    if FULL_F32.load(Ordering::Relaxed) { F32Precision::Full } else { F32Precision::Tf32 }
}

/// What rows that tensor cores fetch are aligned to.
const FETCHED_BYTES: usize = 16;
/// What their size is a multiple of, in elements.
const FETCHED_ELEMENTS: usize = 16;

/// What a kernel is told, and the memory that it reads.
pub(crate) struct Call {
    problem: AttentionProblem,
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    /// Of q, k and v.
    buffers: [Buffer; 3],
    mask: Option<Buffer>,
    bias: Option<Buffer>,
    starts: Option<Buffer>,
    /// Of dropout.
    key: Option<Buffer>,
    /// Where maps of the mask are kept for other layers.
    maps: Option<Arc<MaskMaps>>,
}

impl Call {
    /// Copies tensors that no kernel reads as they lie. None may be empty.
    pub(crate) fn new(inputs: Inputs<CubeBackend>, settings: &Settings) -> Self {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(with_whole_rows);
        let mask = match inputs.mask {
            Mask::Present(mask) => Some(mask),
            Mask::Absent => None,
        };
        let bias = inputs.bias.into_option();
        let (shape_q, shape_kv) = (q.shape(), k.shape());
        let sequences = settings.sequences.as_deref();
        let longest = |starts: &[usize]| {
            starts.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or_default()
        };
        let is_packed = sequences.is_some();
        let problem = AttentionProblem {
            batch: sequences.map_or(shape_q[0], |sequences| sequences.q.len() - 1),
            heads_q: shape_q[1],
            heads_kv: shape_kv[1],
            seq_q: sequences.map_or(shape_q[2], |sequences| longest(&sequences.q)),
            seq_kv: sequences.map_or(shape_kv[2], |sequences| longest(&sequences.kv)),
            head_dim: shape_q[3],
            dtype: dtype_to_elem_type(q.dtype),
            q: rows(&q, is_packed),
            k: rows(&k, is_packed),
            v: rows(&v, is_packed),
            order_q: order(&q),
            order_kv: order(&k),
            scale: settings.scale as f32,
            window: Window { left: settings.window.left, right: settings.window.right },
            softcap: settings.softcap.map(|cap| cap as f32),
            dropout: settings
                .dropout
                .map(|dropout| Dropout { rate: dropout.rate, seed: dropout.seed }),
            mask: mask.as_ref().map(pairs),
            bias: bias.as_ref().map(pairs),
            packed: is_packed.then(|| [shape_q[2], shape_kv[2]]),
            deterministic: DETERMINISTIC.load(Ordering::Relaxed),
            full_f32: FULL_F32.load(Ordering::Relaxed),
        };
        let starts = sequences.map(|sequences| {
            // Totals are dimensions of tensors, which `AttentionProblem` refuses beyond 2^32.
            let starts: Vec<u32> =
                sequences.q.iter().chain(&sequences.kv).map(|start| *start as u32).collect();
            let handle = q.client.create_from_slice(u32::as_bytes(&starts));
            Buffer { handle, elements: starts.len(), dtype: ElemType::UInt(UIntKind::U32) }
        });
        Self {
            problem,
            buffers: [&q, &k, &v].map(span),
            mask: mask.as_ref().map(span),
            bias: bias.as_ref().map(span),
            starts,
            key: settings.dropout.and_then(|dropout| dropout.key?.words()),
            maps: mask.as_ref().and_then(|_| mask_maps::current()),
            q,
            k,
            v,
        }
    }

    /// How the forward pass is expected to be fastest.
    pub(crate) fn plan(&self) -> Result<AttentionBlueprint, KernelError> {
        self.problem.validate()?;
        AttentionBlueprint::plan(&self.problem, Pass::Forward, self.client())
    }

    pub(crate) fn forward(
        &self,
        plan: &AttentionBlueprint,
    ) -> Result<Output<CubeBackend>, KernelError> {
        let (problem, inputs) = (&self.problem, self.inputs());
        let output = attention::attention_forward_with(self.client(), problem, plan, &inputs)?;
        let shape = self.q.shape();
        let lse = Shape::new([2, shape[0], shape[1], shape[2]]);
        Ok(Output {
            out: like(&self.q, output.out, problem.order_q),
            lse: contiguous_tensor(&self.q, output.lse, lse, DType::F32),
        })
    }

    /// As [`forward`](Self::forward), over a cache whose length is on the device.
    fn decode(&self, position: &Buffer) -> Result<CubeTensor, KernelError> {
        let (problem, inputs) = (&self.problem, self.inputs());
        let output = attention::attention_decode(self.client(), problem, &inputs, position)?;
        Ok(like(&self.q, output.out, problem.order_q))
    }

    pub(crate) fn client(&self) -> &Client {
        &self.q.client
    }

    fn inputs(&self) -> AttentionInputs<'_> {
        let [q, k, v] = &self.buffers;
        AttentionInputs {
            q,
            k,
            v,
            mask: self.mask.as_ref(),
            bias: self.bias.as_ref(),
            starts: self.starts.as_ref(),
            key: self.key.as_ref(),
            maps: self.maps.as_deref(),
        }
    }

    fn rows(&self, tensor: &CubeTensor) -> HeadStrides {
        rows(tensor, self.problem.packed.is_some())
    }
}

/// The inputs, with a bias of which each sequence has a gradient of its own: kernels add up those of a bias that was
/// expanded over sequences.
fn with_gradients_apart(mut inputs: Inputs<CubeBackend>) -> Inputs<CubeBackend> {
    let bias = inputs.bias.into_option().map(|bias| {
        let is_expanded = bias.shape()[0] > 1 && bias.meta.strides()[0] == 0;
        if is_expanded { contiguous(bias) } else { bias }
    });
    inputs.bias = bias.into();
    inputs
}

/// The tensor, copied if the elements of a row do not lie side by side, or if rows lie where tensor
/// cores cannot fetch them and a copy's would not.
fn with_whole_rows(tensor: CubeTensor) -> CubeTensor {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let is_whole = shape[3] == 1 || strides[3] == 1;
    let size = tensor.dtype.size();
    let is_multiplied_there = size == 2 || size == 4 && !FULL_F32.load(Ordering::Relaxed);
    let is_fetched = is_multiplied_there && shape[3].is_multiple_of(FETCHED_ELEMENTS);
    let is_aligned = |dim: usize| {
        let is_step = strides[dim] > 0 && (strides[dim] * size).is_multiple_of(FETCHED_BYTES);
        shape[dim] == 1 || is_step
    };
    let start = tensor.handle.offset_start.unwrap_or(0);
    let can_be_fetched =
        start.is_multiple_of(FETCHED_BYTES as u64) && (0..3).all(is_aligned) || !is_fetched;
    if is_whole && can_be_fetched && !tensor.meta.is_tiled() { tensor } else { contiguous(tensor) }
}

fn rows(tensor: &CubeTensor, is_packed: bool) -> HeadStrides {
    let strides = tensor.meta.strides();
    let batch = if is_packed { 0 } else { strides[0] };
    HeadStrides { batch, head: strides[1], row: strides[2] }
}

/// Strides of a mask or a bias; 0 where one element serves a whole dimension.
fn pairs(tensor: &CubeTensor) -> Pairs {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    let stride = |dim: usize| if shape[dim] == 1 { 0 } else { strides[dim] };
    Pairs { batch: stride(0), head: stride(1), row: stride(2), column: stride(3) }
}

/// How results are ordered: with heads side by side if these are.
fn order(tensor: &CubeTensor) -> Order {
    let (shape, strides) = (tensor.shape(), tensor.meta.strides());
    if shape[1] > 1 && shape[2] > 1 && strides[1] < strides[2] {
        Order::PositionsFirst
    } else {
        Order::HeadsFirst
    }
}

/// Strides of a tensor of that shape.
fn ordered_strides(shape: &Shape, order: Order) -> [usize; 4] {
    let HeadStrides { batch, head, row } = order.strides(shape[1], shape[2], shape[3]);
    [batch, head, row, 1]
}

fn is_ordered(tensor: &CubeTensor, order: Order) -> bool {
    let shape = tensor.shape();
    let strides = ordered_strides(&shape, order);
    let fits = |dim: usize| shape[dim] == 1 || tensor.meta.strides()[dim] == strides[dim];
    !tensor.meta.is_tiled() && (0..4).all(fits)
}

/// A tensor in the shape of `model`, in that order.
fn like(model: &CubeTensor, buffer: Buffer, order: Order) -> CubeTensor {
    let shape = model.shape();
    let strides = ordered_strides(&shape, order);
    CubeTensor::new(
        model.client.clone(),
        buffer.handle,
        Metadata::new(shape, strides),
        model.device.clone(),
        model.dtype,
    )
}
