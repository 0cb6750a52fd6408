//! Drop-in modules that load `burn::nn` checkpoints.
//!
//! Most of what makes a model fast reaches unmodified `burn::nn` modules through fusion, and needs
//! nothing from here. What fusion cannot reach is what automatic differentiation decides above it:
//! which tensors are kept for the backward pass. Attention is the case in point, whose matrix of
//! weights grows with the square of the sequence. A module that keeps less has to call an operation
//! with a gradient of its own, and such modules are to live here, with the field names of Burn's,
//! since Burn's records are keyed by path: a checkpoint of one loads into the other.
//!
//! There are none yet.
