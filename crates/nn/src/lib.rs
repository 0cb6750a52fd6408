//! Drop-in modules that load `burn::nn` checkpoints.
