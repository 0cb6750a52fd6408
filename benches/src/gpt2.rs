//! The sizes of GPT-2 small.

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
