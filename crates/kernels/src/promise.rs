//! What a plan counts on of the machine code that its kernel is compiled to.

/// What a kernel's machine code has to keep to. `cargo xtask sass` checks it on each architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The most registers that a unit may have, so that as many cubes fit a multiprocessor as the plan
    /// counts on.
    pub max_registers: u32,
    /// The tensor-core instruction that has to be there.
    pub tensor_core: Option<&'static str>,
}

impl Promise {
    /// Registers that a unit can address.
    pub const MOST_REGISTERS: u32 = 255;

    /// At most so many registers, and no tensor cores.
    pub const fn registers(max_registers: u32) -> Self {
        Self { max_registers, tensor_core: None }
    }

    /// At most so many registers, and that tensor-core instruction.
    pub const fn tensor_core(instruction: &'static str, max_registers: u32) -> Self {
        Self { max_registers, tensor_core: Some(instruction) }
    }
}
