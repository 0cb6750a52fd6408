//! Readings of the device's memory pools.

use burn::tensor::Device;

/// One reading of a device's memory pools, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolMemory {
    /// Bytes that live tensors use, padding excluded.
    pub in_use_bytes: u64,
    /// Bytes taken from the device: those in use, and those kept for reuse.
    pub reserved_bytes: u64,
}

/// Reads a device's memory pools and remembers the largest readings.
///
/// Burn's pools keep what they once needed. So the reserved bytes tell what the program takes from the device,
/// whenever you read them. The bytes in use change within a step, and their peak is only that of the moments of
/// reading. Work that is queued and not yet executed is not counted.
#[derive(Clone, Debug)]
pub struct MemoryMonitor {
    device: Device,
    peak: Option<PoolMemory>,
}

impl MemoryMonitor {
    /// Watches the pools of `device`.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), peak: None }
    }

    /// Reads the pools. `None` where the backend has none, as Burn's CPU backend.
    pub fn read(&mut self) -> Option<PoolMemory> {
        let usage = self.device.memory_pool_usage()?;
        let now =
            PoolMemory { in_use_bytes: usage.bytes_in_use, reserved_bytes: usage.bytes_reserved };
        self.note(now);
        Some(now)
    }

    /// The largest value of each kind in all readings. `None` before the first.
    pub fn peak(&self) -> Option<PoolMemory> {
        self.peak
    }

    fn note(&mut self, now: PoolMemory) {
        let peak = self.peak.get_or_insert_default();
        peak.in_use_bytes = peak.in_use_bytes.max(now.in_use_bytes);
        peak.reserved_bytes = peak.reserved_bytes.max(now.reserved_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_keeps_the_largest_of_each_value() {
        let mut memory = MemoryMonitor::new(&Device::flex());
        for (in_use_bytes, reserved_bytes) in [(5, 10), (9, 12), (1, 12)] {
            memory.note(PoolMemory { in_use_bytes, reserved_bytes });
        }
        let peak = PoolMemory { in_use_bytes: 9, reserved_bytes: 12 };
        assert_eq!(memory.peak(), Some(peak));
    }
}
