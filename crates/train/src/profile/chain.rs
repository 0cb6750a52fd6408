//! Neighboring blocks that move bytes a single kernel would not.

use super::Chains;
use blackburn_backend::profile::{BlockRecord, OperationKind, OperationRecord, traffic_bytes};

/// The chains of one step, in sums.
pub(super) fn chains(blocks: &[BlockRecord], time_us: impl Fn(&BlockRecord) -> f64) -> Chains {
    let mut all = Chains::default();
    let mut links: Vec<&BlockRecord> = Vec::new();
    for block in blocks {
        if is_link(block) {
            links.push(block);
        } else {
            all.end(&mut links, &time_us);
        }
    }
    all.end(&mut links, &time_us);
    all
}

/// Element-wise operations and reductions could be one kernel; a view or the end of a tensor is none, and
/// does not stand between.
fn is_link(block: &BlockRecord) -> bool {
    use OperationKind::{Drop, ElementWise, Reduction, View};
    let fits = |operation: &OperationRecord| {
        matches!(operation.kind, ElementWise | Reduction | View | Drop) && operation.bytes_known
    };
    !block.operations.is_empty() && block.operations.iter().all(fits)
}

impl Chains {
    fn end(&mut self, links: &mut Vec<&BlockRecord>, time_us: impl Fn(&BlockRecord) -> f64) {
        let links = std::mem::take(links);
        let apart: Vec<u64> = links
            .iter()
            .filter(|block| !block.launches.is_empty())
            .filter_map(|block| traffic_bytes(&block.operations))
            .collect();
        if apart.len() < 2 {
            return;
        }
        let together = traffic_bytes(links.iter().flat_map(|block| &block.operations));
        let saved = apart.iter().sum::<u64>().saturating_sub(together.unwrap_or(0));
        if saved == 0 {
            return;
        }
        self.count += 1.0;
        self.blocks += apart.len() as f64;
        self.saved_bytes += saved as f64;
        self.device_us += links.iter().map(|block| time_us(block)).sum::<f64>();
    }
}
