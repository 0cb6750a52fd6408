//! Launches that cover every op's plans on a device.
//!
//! Each op lists its own in `variants.rs`: problems, and the plans that the device has for them. With the
//! feature `recorder` the machine code of what they launch is checked without a GPU; tests and benches take
//! their shapes from the same lists.

use crate::{
    KernelError, Promise, adamw, attention, batch_norm, column_sum, conv, cross_entropy, dropout,
    embedding, frames, gelu, group_norm, interpolate, layer_norm, loss_scale, lstm, matmul,
    milestone, overwrite, pool, quantize, random, region, rotary, row_sum, scan, scatter, sgd,
    sketch, softmax, square_sum, swiglu, top_k,
};
use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use std::fmt;

/// The types of tensors that every op serves, and how names of variants say them.
pub(crate) const FLOATS: [(ElemType, &str); 3] = [
    (ElemType::Float(FloatKind::F32), "f32"),
    (ElemType::Float(FloatKind::F16), "f16"),
    (ElemType::Float(FloatKind::BF16), "bf16"),
];

type Launch = Box<dyn Fn(&Client) -> Result<(), KernelError> + Send + Sync>;

/// One or several launches of a problem by a plan.
pub struct Variant {
    /// What tells it apart from the other variants of the same kernels.
    pub name: String,
    /// What each kernel that it launches promises, by the kernel's name without `_kernel`.
    pub promises: Vec<(&'static str, Promise)>,
    launch: Launch,
}

impl Variant {
    pub(crate) fn new(
        name: String,
        promises: impl Into<Vec<(&'static str, Promise)>>,
        launch: impl Fn(&Client) -> Result<(), KernelError> + Send + Sync + 'static,
    ) -> Self {
        Self { name, promises: promises.into(), launch: Box::new(launch) }
    }

    /// Launches it, on tensors with whatever their memory held before.
    ///
    /// # Errors
    ///
    /// What the launcher says.
    pub fn launch(&self, client: &Client) -> Result<(), KernelError> {
        (self.launch)(client)
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, promises, launch: _ } = self;
        f.debug_struct("Variant")
            .field("name", name)
            .field("promises", promises)
            .finish_non_exhaustive()
    }
}

/// The variants of all ops on the client's device.
pub fn variants(client: &Client) -> Vec<Variant> {
    [
        gelu::variants(),
        swiglu::variants(),
        lstm::variants(),
        rotary::variants(),
        column_sum::variants(),
        row_sum::variants(),
        scan::variants(),
        scatter::variants(client),
        conv::variants(client),
        dropout::variants(),
        batch_norm::variants(),
        layer_norm::variants(client),
        group_norm::variants(),
        interpolate::variants(),
        cross_entropy::variants(),
        softmax::variants(client),
        matmul::variants(client),
        quantize::variants(),
        attention::variants(client),
        embedding::variants(client),
        frames::variants(client),
        adamw::variants(),
        sgd::variants(),
        sketch::variants(),
        square_sum::variants(),
        loss_scale::variants(),
        milestone::variants(),
        overwrite::variants(),
        pool::variants(),
        random::variants(),
        region::variants(),
        top_k::variants(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
