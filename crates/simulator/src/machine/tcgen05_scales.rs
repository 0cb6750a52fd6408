//! Block-scaled products of tensor memory, and the copies of their scales: what they are checked for when they are
//! issued.

use super::{block::Block, run::known, warp::Warp};
use crate::{
    async_::{
        COPIED_COLUMNS, ProductRows, ScaleCopy, ScaledProduct, TensorProduct, TensorScales,
        TensorTask,
    },
    error::{FaultKind, Outcome, Trouble},
    ptx::{Address, Operand, Tcgen05},
    race::Actor,
    tensor::{Descriptor, ScaledTensorShape},
};

impl Block<'_> {
    pub(super) fn scaled_product(
        &mut self,
        warp: &Warp,
        instruction: &Tcgen05,
        mask: u32,
        at: usize,
    ) -> Outcome {
        let Tcgen05::ScaledProduct {
            of_pair,
            kind,
            sums,
            descriptors,
            instruction,
            scales,
            accumulate,
        } = instruction
        else {
            return Ok(());
        };
        let blocks = self.working_blocks(warp, *of_pair, "issues a product of")?;
        let lane = Self::issuer(mask)?;
        let value = |operand: Operand, what: &str| -> Outcome<u64> {
            known(warp, operand, mask, what)?;
            Ok(warp.registers.get(operand)?[lane])
        };
        let bits = value(*instruction, "an instruction descriptor")? as u32;
        let ScaledTensorShape { shape, scaling, bytes } =
            ScaledTensorShape::decode(bits, *kind, blocks.len())?;
        let column = self.tensor_column(warp, *sums, mask, "sums")?;
        let counts = [shape.m / blocks.len(), shape.n];
        let scales = [0, 1].map(|i| {
            let column = self.tensor_column(warp, scales[i], mask, "scales")?;
            Ok(TensorScales { column, byte: bytes[i], scaling })
        });
        let [a, b] = descriptors.map(|operand| value(operand, "a descriptor"));
        let [scales_a, scales_b] = scales;
        let scales = [scales_a?, scales_b?];
        for memory in &self.tensor[blocks.clone()] {
            memory.check(column..column + shape.n)?;
            for (scales, count) in scales.iter().zip(counts) {
                memory.check(scales.columns(count))?;
            }
        }
        let product = ScaledProduct {
            product: TensorProduct {
                shape,
                column,
                a: ProductRows::Shared(Descriptor::decode_tcgen05(a?)?),
                b: Descriptor::decode_tcgen05(b?)?,
                accumulate: value(*accumulate, "whether sums begin anew")? == 1,
                disabled: [0; 2],
                blocks,
            },
            scales,
        };
        let time = self.tensor_work.products(warp.index) + 1;
        if let Some(races) = &mut self.races {
            for operand in product.product.operands() {
                operand
                    .addresses()
                    .try_for_each(|at| races.read(warp.index, Actor::Product, time, at, 16))?;
            }
            races.tensor_access(warp.index, Actor::Product, time, product.cells())?;
        }
        self.issue_task(warp, lane, at, TensorTask::Scaled(product))
    }

    pub(super) fn copy_scales(
        &mut self,
        warp: &Warp,
        of_pair: bool,
        (place, descriptor): (Address, Operand),
        mask: u32,
        at: usize,
    ) -> Outcome {
        let blocks = self.working_blocks(warp, of_pair, "issues a copy of scales of")?;
        let lane = Self::issuer(mask)?;
        known(warp, descriptor, mask, "a descriptor")?;
        let descriptor = Descriptor::decode_tcgen05(warp.registers.get(descriptor)?[lane])?;
        if descriptor.is_swizzled() {
            let reason = "scales are copied from rows that are permuted";
            return Err(Trouble::new(FaultKind::Unsupported, reason));
        }
        let column = self.tensor_column(warp, place, mask, "scales")?;
        for memory in &self.tensor[blocks.clone()] {
            memory.check(column..column + COPIED_COLUMNS)?;
        }
        let copy = ScaleCopy { blocks, descriptor, column };
        let time = self.tensor_work.products(warp.index) + 1;
        if let Some(races) = &mut self.races {
            copy.addresses()
                .try_for_each(|at| races.read(warp.index, Actor::Product, time, at, 16))?;
            races.tensor_access(warp.index, Actor::Product, time, copy.cells())?;
        }
        self.issue_task(warp, lane, at, TensorTask::Scales(copy))
    }
}
