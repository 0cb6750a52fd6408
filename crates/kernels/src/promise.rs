//! What a plan counts on of the machine code that its kernel is compiled to.

/// What a kernel's machine code has to keep to. `cargo xtask sass` checks it on each architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The most registers that a unit may have, so that as many cubes fit a multiprocessor as the plan
    /// counts on.
    pub max_registers: u32,
    /// The tensor-core instruction that has to be there.
    pub tensor_core: Option<&'static str>,
    /// Bytes of registers that are known to spill on some architecture, stores and loads together.
    pub spill_bytes: u32,
}

impl Promise {
    /// Registers that a unit can address.
    pub const MOST_REGISTERS: u32 = 255;

    /// At most so many registers, and no tensor cores.
    pub const fn registers(max_registers: u32) -> Self {
        Self { max_registers, tensor_core: None, spill_bytes: 0 }
    }

    /// At most so many registers, and that tensor-core instruction.
    pub const fn tensor_core(instruction: &'static str, max_registers: u32) -> Self {
        Self { max_registers, tensor_core: Some(instruction), spill_bytes: 0 }
    }

    /// The same, and at most so many bytes that spill.
    pub const fn spilling(self, spill_bytes: u32) -> Self {
        Self { spill_bytes, ..self }
    }
}
