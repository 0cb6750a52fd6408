//! `ldmatrix` and `mma.sync`.

use super::{
    block::Block,
    registers::{Lanes, lanes},
    warp::Warp,
};
use crate::{
    arithmetic::TensorCores,
    error::Outcome,
    memory::check_alignment,
    ptx::{Address, MmaScales, Operand, Reg},
    race::Actor,
    tensor::{
        MmaShape, Operands, ScaleSelector, Unit, accumulate, accumulate_scaled, fragment_place,
    },
};

impl Block<'_> {
    /// Each matrix has 8 rows of 16 bytes, whose addresses eight lanes give. A lane gets two elements of 16
    /// bits of row `lane / 4`, or of that column.
    pub(super) fn load_matrix(
        &mut self,
        warp: &mut Warp,
        dst: &[Reg],
        address: Address,
        transposed: bool,
    ) -> Outcome {
        let rows = 8 * dst.len();
        let mask = if rows == 32 { u32::MAX } else { (1 << rows) - 1 };
        let addresses = self.shared_addresses(warp, address, mask)?;
        let mut row = [0; 16];
        for (matrix, dst) in dst.iter().enumerate() {
            let mut elements = [[0_u64; 8]; 8];
            let mut known = [true; 8];
            for (place, elements) in elements.iter_mut().enumerate() {
                let lane = 8 * matrix + place;
                let at = addresses[lane];
                self.load_row(warp.index, lane, at, &mut row)
                    .map(|all| known[place] = all)
                    .map_err(|trouble| trouble.of_lane(lane))?;
                for (element, pair) in elements.iter_mut().zip(row.chunks_exact(2)) {
                    *element = u64::from(u16::from_le_bytes([pair[0], pair[1]]));
                }
            }
            let mut unknown = 0;
            let values: Lanes = std::array::from_fn(|lane| {
                let (major, minor) = (lane / 4, lane % 4 * 2);
                if transposed {
                    unknown |= u32::from(!known[minor] || !known[minor + 1]) << lane;
                    elements[minor][major] | elements[minor + 1][major] << 16
                } else {
                    unknown |= u32::from(!known[major]) << lane;
                    elements[major][minor] | elements[major][minor + 1] << 16
                }
            });
            warp.registers.set(*dst, &values, u32::MAX, unknown)?;
        }
        Ok(())
    }

    fn load_row(&mut self, warp: usize, lane: usize, at: u64, row: &mut [u8; 16]) -> Outcome<bool> {
        check_alignment(at, 16)?;
        if let Some(races) = &mut self.races {
            races.read(warp, Actor::Lane(lane), 0, at, 16)?;
        }
        self.shared.read(at, row)
    }
}

/// What each of `lane_of`'s lanes gives as scales, and, bit by bit, which of them are unknown.
fn scales(
    warp: &Warp,
    scales: MmaScales,
    count: usize,
    lane_of: impl Fn(ScaleSelector, usize) -> usize,
) -> Outcome<(Vec<f64>, u32)> {
    let MmaScales { register, selector, scaling } = scales;
    let (values, unknown) = (warp.registers.get(register)?, warp.registers.unknown(register));
    let (mut numbers, mut bits) = (Vec::new(), 0);
    for place in 0..count {
        let lane = lane_of(selector, place);
        let is_unknown = unknown >> lane & 1;
        scaling.read(values[lane] as u32, selector.byte, is_unknown == 0, &mut numbers)?;
        bits |= is_unknown << place;
    }
    Ok((numbers, bits))
}

/// `d = a b + c` of 16 rows, 8 columns and 32 bytes of k, with rows and columns scaled or not.
pub(super) fn mma(
    warp: &mut Warp,
    cores: TensorCores,
    shape: MmaShape,
    d: &[Reg],
    [a, b, c]: [&Vec<Operand>; 3],
    block_scales: Option<&[MmaScales; 2]>,
) -> Outcome {
    const ROWS: usize = 16;
    const COLUMNS: usize = 8;
    let k = shape.a.in_bytes(32);
    let mut lhs = vec![0.0; ROWS * k];
    let mut rhs = vec![0.0; COLUMNS * k];
    let (mut unknown_rows, mut unknown_columns) = (0_u32, 0_u32);
    let in_word = shape.a.in_bytes(4);
    for (register, operand) in a.iter().enumerate() {
        let (values, unknown) = (warp.registers.get(*operand)?, warp.registers.unknown(*operand));
        for lane in lanes(u32::MAX) {
            let (row, at) = fragment_place(lane, register, shape.a);
            let word = (values[lane] as u32).to_le_bytes();
            shape.a.decode(&word, &mut lhs[row * k + at..][..in_word]);
            unknown_rows |= (unknown >> lane & 1) << row;
        }
    }
    let mut elements = [0.0; 8];
    for (register, operand) in b.iter().enumerate() {
        let (values, unknown) = (warp.registers.get(*operand)?, warp.registers.unknown(*operand));
        for lane in lanes(u32::MAX) {
            let (_, at) = fragment_place(lane, 2 * register, shape.b);
            let column = lane / 4;
            shape.b.decode(&(values[lane] as u32).to_le_bytes(), &mut elements[..in_word]);
            for (offset, element) in elements[..in_word].iter().enumerate() {
                rhs[(at + offset) * COLUMNS + column] = *element;
            }
            unknown_columns |= (unknown >> lane & 1) << column;
        }
    }
    let place =
        |lane: usize, register: usize| (lane / 4 + 8 * (register / 2), lane % 4 * 2 + register % 2);
    let mut sums = [0.0; ROWS * COLUMNS];
    let mut unknown_sums = [0; 4];
    for (register, operand) in c.iter().enumerate() {
        let values = warp.registers.get(*operand)?;
        unknown_sums[register] = warp.registers.unknown(*operand);
        for lane in lanes(u32::MAX) {
            let (row, column) = place(lane, register);
            sums[row * COLUMNS + column] = f32::from_bits(values[lane] as u32);
        }
    }
    match block_scales {
        None => {
            let elements = [shape.a, shape.b];
            let operands = Operands { a: &lhs, b: &rhs, elements, n: COLUMNS, k };
            accumulate(cores, Unit::Mma, &mut sums, operands);
        }
        Some([of_rows, of_columns]) => {
            let (rows, unknown) = scales(warp, *of_rows, ROWS, ScaleSelector::lane_of_row)?;
            unknown_rows |= unknown;
            let lane_of = ScaleSelector::lane_of_column;
            let (columns, unknown) = scales(warp, *of_columns, COLUMNS, lane_of)?;
            unknown_columns |= unknown;
            accumulate_scaled(&mut sums, [&lhs, &rhs], [&rows, &columns], k);
        }
    }
    for (register, dst) in d.iter().enumerate() {
        let mut unknown = unknown_sums[register];
        let values = std::array::from_fn(|lane| {
            let (row, column) = place(lane, register);
            unknown |= ((unknown_rows >> row | unknown_columns >> column) & 1) << lane;
            u64::from(sums[row * COLUMNS + column].to_bits())
        });
        warp.registers.set(*dst, &values, u32::MAX, unknown)?;
    }
    Ok(())
}
