//! The sizes of GPT-2 small, and the types its parameters are stepped in.

use blackburn_reference::storage::Storage;
use criterion::Throughput;

/// Features of a token.
pub const WIDTH: usize = 768;

/// Tokens that there are.
pub const VOCABULARY: usize = 50_257;

/// Elements of each parameter, with a head that is not tied: 163.0 million.
pub fn parameters() -> Vec<usize> {
    const LAYERS: usize = 12;
    const CONTEXT: usize = 1024;
    let linear = |outputs: usize, inputs: usize| [outputs * inputs, outputs];
    let norm = [WIDTH, WIDTH];
    let layer = [
        norm,
        linear(3 * WIDTH, WIDTH),
        linear(WIDTH, WIDTH),
        norm,
        linear(4 * WIDTH, WIDTH),
        linear(WIDTH, 4 * WIDTH),
    ]
    .concat();
    let mut all = layer.repeat(LAYERS);
    all.extend(norm);
    all.extend([VOCABULARY * WIDTH, CONTEXT * WIDTH, VOCABULARY * WIDTH]);
    all
}

/// Types of an optimizer's step.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    /// Of the parameters.
    pub parameter: Storage,
    /// Of their gradients.
    pub gradient: Storage,
}

impl Types {
    /// What a step of that many elements moves with so many states of each in f32: parameter and states in
    /// and out, the gradient in.
    pub fn bytes(self, elements: usize, states: usize) -> Throughput {
        let states = 2 * states * Storage::F32.bytes();
        let each = states + 2 * self.parameter.bytes() + self.gradient.bytes();
        Throughput::Bytes((elements * each) as u64)
    }
}

/// All in f32, f32 masters by bf16 gradients, and all but the optimizer's states in bf16.
pub const TYPES: [Types; 3] = [
    Types { parameter: Storage::F32, gradient: Storage::F32 },
    Types { parameter: Storage::F32, gradient: Storage::Bf16 },
    Types { parameter: Storage::Bf16, gradient: Storage::Bf16 },
];
