//! The bytes that a stretch of operations has to move at least.

use super::{OperationKind, OperationRecord};
use std::collections::{HashMap, HashSet};

/// The bytes that `operations`, done as one, have to read and write: what they read of tensors made
/// before, each once, and what they make that is needed after. `None` where an operation's bytes are not
/// known, and for views alone.
///
/// For operations that run apart, add up the traffic of each.
pub fn traffic_bytes<'a>(operations: impl IntoIterator<Item = &'a OperationRecord>) -> Option<u64> {
    let mut stretch = Stretch::default();
    let mut moves = false;
    for operation in operations {
        if !operation.bytes_known {
            return None;
        }
        moves |= !matches!(operation.kind, OperationKind::View | OperationKind::Drop);
        stretch.add(operation);
    }
    moves.then(|| stretch.bytes())
}

/// Tensors by the memory they look at.
#[derive(Default)]
struct Stretch {
    /// The tensor whose memory a view looks at.
    roots: HashMap<u64, u64>,
    /// Bytes of the memory of a root.
    sizes: HashMap<u64, u64>,
    /// Read from outside.
    read: HashMap<u64, u64>,
    /// Made here: the tensors that still look at it.
    made: HashMap<u64, HashSet<u64>>,
}

impl Stretch {
    fn add(&mut self, operation: &OperationRecord) {
        let is_view = operation.kind == OperationKind::View;
        for tensor in &operation.reads {
            let root = *self.roots.entry(tensor.id).or_insert(tensor.id);
            let size = match tensor.bytes {
                // It is named, and not read: this does not tell its size.
                0 => 0,
                bytes => *self.sizes.entry(root).or_insert(bytes),
            };
            if let Some(alive) = self.made.get_mut(&root) {
                if is_view {
                    alive.extend(operation.writes.iter().map(|view| view.id));
                }
                if tensor.last {
                    alive.remove(&tensor.id);
                }
            } else if !is_view && operation.kind != OperationKind::Drop {
                // A broadcast reads no more than there is.
                let bytes = self.read.entry(root).or_default();
                *bytes = (*bytes).max(tensor.bytes.min(size));
            }
            if is_view {
                self.roots.extend(operation.writes.iter().map(|view| (view.id, root)));
            }
        }
        if !is_view {
            for tensor in &operation.writes {
                self.roots.insert(tensor.id, tensor.id);
                self.sizes.insert(tensor.id, tensor.bytes);
                self.made.insert(tensor.id, HashSet::from([tensor.id]));
            }
        }
    }

    fn bytes(&self) -> u64 {
        let kept = self.made.iter().filter(|(_, alive)| !alive.is_empty());
        let written: u64 = kept.map(|(root, _)| self.sizes[root]).sum();
        written + self.read.values().sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::TensorUse;

    fn tensors(uses: &[(u64, u64, bool)]) -> Vec<TensorUse> {
        uses.iter().map(|&(id, bytes, last)| TensorUse { id, bytes, last }).collect()
    }

    fn operation(
        kind: OperationKind,
        reads: &[(u64, u64, bool)],
        writes: &[(u64, u64, bool)],
    ) -> OperationRecord {
        OperationRecord {
            name: format!("{kind:?}"),
            kind,
            reads: tensors(reads),
            writes: tensors(writes),
            bytes_known: true,
            arithmetic: None,
        }
    }

    #[test]
    fn what_is_made_and_used_up_within_is_not_moved() {
        use OperationKind::ElementWise;
        // y = f(x), z = g(y, x), and y is used up.
        let make = operation(ElementWise, &[(1, 40, false)], &[(2, 40, false)]);
        let use_up =
            |last| operation(ElementWise, &[(2, 40, last), (1, 40, false)], &[(3, 20, false)]);
        assert_eq!(traffic_bytes([&make, &use_up(true)]), Some(40 + 20));
        // Kept for the backward pass, it is written.
        assert_eq!(traffic_bytes([&make, &use_up(false)]), Some(40 + 40 + 20));
        let end = operation(OperationKind::Drop, &[(2, 40, true)], &[]);
        assert_eq!(traffic_bytes([&make, &use_up(false), &end]), Some(40 + 20));
    }

    #[test]
    fn a_view_is_the_memory_it_looks_at() {
        use OperationKind::{ElementWise, View};
        // A bias of 4 bytes, seen as 40, is 4; a result seen in another shape is written once.
        let broadcast = operation(View, &[(1, 4, true)], &[(2, 40, false)]);
        let add = operation(ElementWise, &[(2, 40, true), (3, 40, false)], &[(4, 40, false)]);
        let reshape = operation(View, &[(4, 40, true)], &[(5, 40, false)]);
        assert_eq!(traffic_bytes([&broadcast, &add, &reshape]), Some(4 + 40 + 40));
        assert_eq!(traffic_bytes([&broadcast]), None);
        // Used up through the view, it need not be written.
        let sum = operation(OperationKind::Reduction, &[(5, 40, true)], &[(6, 4, false)]);
        assert_eq!(traffic_bytes([&broadcast, &add, &reshape, &sum]), Some(4 + 40 + 4));
    }

    #[test]
    fn indices_that_nobody_knows_leave_the_bytes_unknown() {
        let known = operation(OperationKind::ElementWise, &[(1, 4, false)], &[(2, 4, false)]);
        let scatter = OperationRecord { bytes_known: false, ..known.clone() };
        assert_eq!(traffic_bytes([&known, &scatter]), None);
    }
}
