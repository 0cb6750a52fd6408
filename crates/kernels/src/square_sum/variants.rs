//! Tensors that cover the plans: see [`variants`](crate::variants).

use super::{MOST_TENSORS, PLACES, SquareSumBlueprint, square_sum};
use crate::{
    buffer::{Buffer, Rows},
    variants::{FLOATS, Variant},
};
use cubecl::{client::Client, ir::ElemType};

/// Tensors of a launch, whether something lies between their rows, and whether somebody else holds the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SquareSumVariant {
    /// How many, all of one type.
    pub tensors: usize,
    /// Whether rows are apart.
    pub by_rows: bool,
    /// Whether the sums go to new memory.
    pub held: bool,
}

/// As many tensors as a launch takes, one, and a few.
pub const VARIANTS: [SquareSumVariant; 3] = [
    SquareSumVariant { tensors: MOST_TENSORS, by_rows: false, held: false },
    SquareSumVariant { tensors: 1, by_rows: true, held: false },
    SquareSumVariant { tensors: 8, by_rows: true, held: true },
];

/// Each of [`VARIANTS`] in every type of tensors.
pub(crate) fn variants() -> Vec<Variant> {
    let mut all = Vec::new();
    for (dtype, name) in FLOATS {
        for SquareSumVariant { tensors, by_rows, held } in VARIANTS {
            let mut name = format!("of_{tensors}_{name}");
            for (is_it, part) in [(by_rows, "_by_rows"), (held, "_copied")] {
                if is_it {
                    name += part;
                }
            }
            let promises = [("square_sum", SquareSumBlueprint::promise(tensors, dtype, by_rows))];
            all.push(Variant::new(name, promises, move |client| {
                let all: Vec<_> = (0..tensors).map(|_| rows(client, dtype, by_rows)).collect();
                let sums = Buffer::empty(client, PLACES, FLOATS[0].0);
                let holder = held.then(|| sums.clone());
                let result = square_sum(client, sums, &all).map(drop);
                drop(holder);
                result
            }));
        }
    }
    all
}

fn rows(client: &Client, dtype: ElemType, by_rows: bool) -> Rows {
    const COLUMNS: usize = 1000;
    let pitch = if by_rows { 1024 } else { COLUMNS };
    let buffer = Buffer::empty(client, 64 * pitch, dtype);
    Rows { buffer, rows: 64, columns: COLUMNS, pitch }
}
