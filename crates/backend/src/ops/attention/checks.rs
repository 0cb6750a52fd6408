//! What arguments have to be. Each check panics by the name of the argument, before anything runs.

use super::AttentionOptions;
use burn::tensor::{DType, Device, Int, Tensor};

/// The widest heads of which a kernel holds a row.
const MOST_HEAD_DIM_ON_GPUS: usize = 256;

const NAMES: [&str; 3] = ["q", "k", "v"];

/// q, k and v.
pub(super) struct Operands<'a, const D: usize> {
    pub(super) tensors: [&'a Tensor<D>; 3],
    /// Batch, heads, positions and elements of a row of each.
    pub(super) shapes: [[usize; 4]; 3],
}

impl<const D: usize> Operands<'_, D> {
    pub(super) fn head_dim(&self) -> usize {
        self.shapes[0][3]
    }

    fn dtype(&self) -> DType {
        self.tensors[0].dtype()
    }

    fn device(&self) -> Device {
        self.tensors[0].device()
    }

    pub(super) fn check(&self) {
        let dims = self.tensors.map(|tensor| tensor.dims());
        for (name, dims) in NAMES.iter().zip(dims) {
            if dims.contains(&0) {
                refuse(name, "at least 1 in every dimension", format!("shape {dims:?}"));
            }
        }
        let [[batch, heads_q, _, head_dim], k, v] = self.shapes;
        if k[3] != head_dim {
            let expected = format!("{head_dim} in the last dimension, as q has");
            refuse("k", &expected, format!("shape {:?}", dims[1]));
        }
        if k[0] != batch {
            let expected = format!("{batch} sequences, as q has");
            refuse("k", &expected, format!("shape {:?}", dims[1]));
        }
        if !heads_q.is_multiple_of(k[1]) {
            let expected = format!("a number of heads that divides the {heads_q} of q");
            refuse("k", &expected, format!("{} heads", k[1]));
        }
        if v != k {
            let expected = format!("the shape of k, {:?}", dims[1]);
            refuse("v", &expected, format!("shape {:?}", dims[2]));
        }
        self.check_types();
        self.check_devices();
    }

    fn check_types(&self) {
        let (q, on_cpu) = (self.dtype(), is_cpu(&self.device()));
        let is_served = match q {
            DType::F32 | DType::F16 | DType::BF16 => true,
            DType::F64 => on_cpu,
            _ => false,
        };
        if !is_served {
            let expected = if on_cpu { "f32, f16, bf16 or f64" } else { "f32, f16 or bf16" };
            refuse("q", expected, format!("{q:?}"));
        }
        for (name, tensor) in NAMES.iter().zip(self.tensors) {
            if tensor.dtype() != q {
                refuse(name, &format!("{q:?}, as q is"), format!("{:?}", tensor.dtype()));
            }
        }
        if !on_cpu && self.head_dim() > MOST_HEAD_DIM_ON_GPUS {
            let expected = format!("at most {MOST_HEAD_DIM_ON_GPUS} in the last dimension");
            refuse("q", &expected, self.head_dim().to_string());
        }
    }

    fn check_devices(&self) {
        for (name, tensor) in NAMES.iter().zip(self.tensors) {
            self.check_device(name, tensor.device());
        }
    }

    fn check_device(&self, name: &str, device: Device) {
        if device != self.device() {
            refuse(name, &format!("{:?}, as q is on", self.device()), format!("{device:?}"));
        }
    }

    pub(super) fn check_options(&self, options: &AttentionOptions) {
        self.check_numbers(options);
        let [batch, heads, rows, _] = self.shapes[0];
        let keys = self.shapes[1][2];
        let check_pairs = |name: &str, dims: [usize; 4]| {
            let broadcast = [batch, heads, rows].iter().zip(dims).all(|(n, d)| d == 1 || d == *n);
            if !broadcast || dims[3] != keys {
                let expected =
                    format!("[{batch} or 1, {heads} or 1, {rows} or 1, {keys}] as its shape");
                refuse(name, &expected, format!("{dims:?}"));
            }
        };
        if let Some(mask) = &options.mask {
            check_pairs("mask", mask.dims());
            self.check_device("mask", mask.device());
        }
        if let Some(bias) = &options.bias {
            check_pairs("bias", bias.dims());
            self.check_device("bias", bias.device());
            if !bias.dtype().is_float() {
                refuse("bias", "floats", format!("{:?}", bias.dtype()));
            }
        }
        if let Some(padding) = &options.key_padding {
            if padding.dims() != [batch, keys] {
                let actual = format!("{:?}", padding.dims());
                refuse("key_padding", &format!("[{batch}, {keys}] as its shape"), actual);
            }
            self.check_device("key_padding", padding.device());
        }
    }

    /// What is put into a cache, which the keys and values here are.
    pub(super) fn check_new(&self, new: [&Tensor<D>; 2], position: &Tensor<1, Int>) {
        let [[batch, _, seq, head_dim], [_, heads, capacity, _], _] = self.shapes;
        for (name, tensor) in ["k", "v"].into_iter().zip(new) {
            let expected = [batch, heads, seq, head_dim];
            if tensor.dims()[..] != expected {
                let actual = format!("shape {:?}", tensor.dims());
                refuse(name, &format!("shape {expected:?}"), actual);
            }
            if tensor.dtype() != self.dtype() {
                let expected = format!("{:?}, as q is", self.dtype());
                refuse(name, &expected, format!("{:?}", tensor.dtype()));
            }
            self.check_device(name, tensor.device());
        }
        if seq > capacity {
            refuse("q", &format!("at most {capacity} tokens, as the cache has"), seq.to_string());
        }
        let [positions] = position.dims();
        if positions != 1 && positions != batch {
            refuse("position", &format!("1 or {batch} numbers"), positions.to_string());
        }
        self.check_device("position", position.device().without_autodiff());
    }

    /// As [`check_options`](Self::check_options), over a cache.
    pub(super) fn check_cached(&self, options: &AttentionOptions) {
        self.check_numbers(options);
        for (name, given) in [
            ("mask", options.mask.is_some()),
            ("key_padding", options.key_padding.is_some()),
            ("bias", options.bias.is_some()),
            ("dropout", options.dropout.is_some_and(|dropout| dropout.rate > 0.0)),
        ] {
            if given {
                refuse(name, "none over a cache", "one".into());
            }
        }
    }

    /// As [`check_options`](Self::check_options), of sequences that are packed.
    pub(super) fn check_packed(
        &self,
        options: &AttentionOptions,
        starts_q: &[usize],
        starts_kv: &[usize],
    ) {
        self.check_numbers(options);
        for (name, given) in [
            ("mask", options.mask.is_some()),
            ("key_padding", options.key_padding.is_some()),
            ("bias", options.bias.is_some()),
        ] {
            if given {
                refuse(name, "none with packed sequences", "one".into());
            }
        }
        let totals = [self.shapes[0][2], self.shapes[1][2]];
        for ((name, starts), total) in
            [("starts_q", starts_q), ("starts_kv", starts_kv)].into_iter().zip(totals)
        {
            let is_whole = starts.len() > 1
                && starts.first() == Some(&0)
                && starts.last() == Some(&total)
                && starts.is_sorted();
            if !is_whole {
                let expected = format!("two numbers or more, ascending from 0 to {total}");
                refuse(name, &expected, format!("{starts:?}"));
            }
        }
        if starts_kv.len() != starts_q.len() {
            let expected = format!("{} numbers, as starts_q has", starts_q.len());
            refuse("starts_kv", &expected, starts_kv.len().to_string());
        }
    }

    fn check_numbers(&self, options: &AttentionOptions) {
        // What kernels and the CPU compute with.
        let rounded = |x: f64| if self.dtype() == DType::F64 { x } else { f64::from(x as f32) };
        if let Some(scale) = options.scale
            && !rounded(scale).is_finite()
        {
            refuse("scale", "a finite number", scale.to_string());
        }
        if let Some(cap) = options.softcap
            && !(rounded(cap).is_finite() && rounded(cap) > 0.0)
        {
            refuse("softcap", "a finite number above zero", cap.to_string());
        }
        if let Some(dropout) = options.dropout
            && !(0.0..1.0).contains(&dropout.rate)
        {
            let expected = "a rate of at least 0 and below 1";
            refuse("dropout", expected, dropout.rate.to_string());
        }
    }
}

fn is_cpu(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    return *device == Device::flex();
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        false
    }
}

fn refuse(argument: &str, expected: &str, actual: String) -> ! {
    panic!("attention: argument `{argument}`: expected {expected}, got {actual}")
}
