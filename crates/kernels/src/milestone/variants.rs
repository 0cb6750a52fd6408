//! Calls that cover the plans: see [`variants`](crate::variants).

use super::milestone;
use crate::{Promise, buffer::Buffer, variants::Variant};
use cubecl::ir::{ElemType, UIntKind};

/// Registers of its one unit: more would cost nothing.
const PROMISES: [(&str, Promise); 1] = [("milestone", Promise::registers(32))];

pub(crate) fn variants() -> Vec<Variant> {
    vec![Variant::new("plain".into(), PROMISES, |client| {
        milestone(client, &Buffer::empty(client, 1, ElemType::UInt(UIntKind::U32)))
    })]
}
