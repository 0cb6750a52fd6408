//! Faults planted in the PTX of kernels that were launched: does the simulator notice them?

use super::machine::Recording;
use blackburn_simulator::{Options, Program, Schedule};
use std::{collections::BTreeSet, fmt, sync::Arc};

/// What is done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    DroppedBlockBarrier,
    DroppedFence,
    DroppedCopyWait,
    LooserCopyWait,
    DroppedProductWait,
    LooserProductWait,
    DroppedPhaseWait,
    FlippedParity,
    FewerBytesExpected,
    MoreBytesExpected,
    DroppedArrival,
    MoreArrivalsExpected,
    DroppedCommit,
    DroppedCopy,
    SwizzleBit,
    StrideBit,
    StartBit,
    LeadingBit,
    FlippedTransposition,
    MatrixAddress,
    BoxCoordinate,
    VersionBit,
    ColumnsBit,
    TypeBit,
    MajorBit,
    FlippedAccumulation,
    DroppedTensorWait,
    FewerTensorColumns,
    DroppedTensorFree,
    TensorColumn,
    ScaleByte,
    ScaleThread,
    NarrowerScope,
    OtherBlock,
    OtherBlocksTold,
}

impl Fault {
    pub(crate) const ALL: [Self; 35] = [
        Self::DroppedBlockBarrier,
        Self::DroppedFence,
        Self::DroppedCopyWait,
        Self::LooserCopyWait,
        Self::DroppedProductWait,
        Self::LooserProductWait,
        Self::DroppedPhaseWait,
        Self::FlippedParity,
        Self::FewerBytesExpected,
        Self::MoreBytesExpected,
        Self::DroppedArrival,
        Self::MoreArrivalsExpected,
        Self::DroppedCommit,
        Self::DroppedCopy,
        Self::SwizzleBit,
        Self::StrideBit,
        Self::StartBit,
        Self::LeadingBit,
        Self::FlippedTransposition,
        Self::MatrixAddress,
        Self::BoxCoordinate,
        Self::VersionBit,
        Self::ColumnsBit,
        Self::TypeBit,
        Self::MajorBit,
        Self::FlippedAccumulation,
        Self::DroppedTensorWait,
        Self::FewerTensorColumns,
        Self::DroppedTensorFree,
        Self::TensorColumn,
        Self::ScaleByte,
        Self::ScaleThread,
        Self::NarrowerScope,
        Self::OtherBlock,
        Self::OtherBlocksTold,
    ];

    /// The statement with the fault, if it is one that can have it.
    fn plant(self, statement: &str) -> Option<String> {
        let (opcode, operands) =
            statement.split_once(char::is_whitespace).unwrap_or((statement, ""));
        let operands: Vec<_> = split(operands.trim_end_matches(';'));
        let is = |start: &str| opcode.trim_end_matches(';').starts_with(start);
        let dropped = |found: bool| found.then(String::new);
        let number = |place: usize| operands.get(place)?.trim().parse::<u64>().ok();
        // A register for what becomes of an operand, in a scope of its own.
        let changed = |place: usize, ty: &str, change: &str| {
            let old = operands.get(place)?.trim();
            let mut new: Vec<_> = operands.iter().map(|operand| operand.trim()).collect();
            new[place] = "planted";
            let text = format!(
                "{{ .reg .{ty} planted; {}; {opcode} {}; }}",
                change.replace("OLD", old),
                new.join(", ")
            );
            Some(text)
        };
        let descriptor = |bit: u32| {
            // Operand B; A may lie in registers.
            if !is("wgmma.mma_async") && !is("tcgen05.mma") {
                return None;
            }
            changed(2, "b64", &format!("xor.b64 planted, OLD, {:#x}", 1_u64 << bit))
        };
        let instruction = |bit: u32| {
            if !is("tcgen05.mma") {
                return None;
            }
            changed(3, "b32", &format!("xor.b32 planted, OLD, {:#x}", 1_u32 << bit))
        };
        // Another scale of those in a register, where they differ.
        let is_scaled = opcode.contains(".block_scale");
        let in_pairs = u32::from(opcode.contains("scale_vec::2X"));
        let selector = |place: usize, part: usize, bit: u32| {
            if !is_scaled || !is("mma.sync") || operands.get(4)?.trim() == "ones" {
                return None;
            }
            let old = operands.get(place)?.trim().trim_matches(['{', '}']);
            let mut ids: Vec<u32> =
                old.split(',').filter_map(|id| id.trim().parse().ok()).collect();
            *ids.get_mut(part)? ^= bit;
            let new = format!("{{{}, {}}}", ids.first()?, ids.get(1)?);
            let mut all: Vec<_> = operands.iter().map(|operand| operand.trim()).collect();
            all[place] = &new;
            Some(format!("{opcode} {};", all.join(", ")))
        };
        // An address with another offset.
        let moved = |place: usize, by: i64| {
            let mut new = operands.clone();
            let wrong = operands.get(place)?.trim_end().strip_suffix(']')?;
            let (base, offset) = wrong.split_once('+').unwrap_or((wrong, "0"));
            let offset: i64 = offset.trim().parse().ok()?;
            let address = format!("{base}+ {}]", offset + by);
            new[place] = &address;
            Some(format!("{opcode} {};", new.join(", ")))
        };
        match self {
            Self::DroppedBlockBarrier => dropped(is("bar.sync") || is("barrier.cluster")),
            Self::DroppedFence => dropped(is("fence.") || is("wgmma.fence") || is("tcgen05.fence")),
            Self::DroppedCopyWait => dropped(is("cp.async.wait")),
            Self::LooserCopyWait if is("cp.async.wait_group") => {
                Some(format!("cp.async.wait_group {};", number(0)? + 1))
            }
            Self::DroppedProductWait => dropped(is("wgmma.wait_group")),
            Self::LooserProductWait if is("wgmma.wait_group") => {
                Some(format!("{opcode} {};", number(0)? + 1))
            }
            Self::DroppedPhaseWait if is("mbarrier.try_wait") => {
                Some(format!("setp.eq.u32 {}, 0, 0;", operands.first()?.trim()))
            }
            Self::FlippedParity if is("mbarrier.try_wait") => {
                changed(2, "b32", "xor.b32 planted, OLD, 1")
            }
            Self::FewerBytesExpected if is("mbarrier.arrive.expect_tx") => {
                changed(2, "b32", "add.s32 planted, OLD, -16")
            }
            Self::MoreBytesExpected if is("mbarrier.arrive.expect_tx") => {
                changed(2, "b32", "add.s32 planted, OLD, 16")
            }
            Self::DroppedArrival => {
                dropped(is("mbarrier.arrive.shared") || is("mbarrier.arrive.release"))
            }
            Self::MoreArrivalsExpected if is("mbarrier.init") => {
                changed(1, "b32", "add.s32 planted, OLD, 1")
            }
            Self::DroppedCommit => dropped(
                is("cp.async.commit_group") || is("wgmma.commit_group") || is("tcgen05.commit"),
            ),
            Self::DroppedCopy => {
                dropped(is("cp.async.c") && operands.len() == 4 || is("tcgen05.cp"))
            }
            Self::StrideBit if is("tcgen05.cp") => {
                changed(1, "b64", &format!("xor.b64 planted, OLD, {:#x}", 1_u64 << 36))
            }
            Self::TensorColumn if is("tcgen05.cp") => moved(0, 4),
            Self::SwizzleBit => descriptor(62),
            Self::StrideBit => descriptor(38),
            Self::StartBit => descriptor(0),
            Self::LeadingBit if uses_leading(opcode, &operands) => descriptor(25),
            Self::FlippedTransposition if is("ldmatrix") => Some(if opcode.contains(".trans") {
                statement.replacen(".trans", "", 1)
            } else {
                statement.replacen(".shared", ".trans.shared", 1)
            }),
            Self::MatrixAddress if is("ldmatrix") => moved(1, 16),
            Self::VersionBit if is("tcgen05.mma") => descriptor(46),
            Self::ColumnsBit => instruction(18),
            Self::TypeBit => instruction(7),
            Self::MajorBit => instruction(16),
            Self::FlippedAccumulation if is("tcgen05.mma") => {
                changed(operands.len() - 1, "pred", "not.pred planted, OLD")
            }
            Self::DroppedTensorWait => dropped(is("tcgen05.wait")),
            Self::FewerTensorColumns if is("tcgen05.alloc") => {
                changed(1, "b32", "shr.u32 planted, OLD, 1")
            }
            Self::DroppedTensorFree => dropped(is("tcgen05.dealloc")),
            Self::TensorColumn if is("tcgen05.ld") => moved(1, 8),
            // Of four scales in a row there are no others in a word.
            Self::ScaleByte if opcode.contains("scale_vec::4X") => None,
            Self::ScaleByte if is_scaled && is("tcgen05") => instruction(4 + in_pairs),
            Self::ScaleThread if is_scaled && is("tcgen05") => instruction(29 + in_pairs),
            Self::ScaleByte => selector(5, 0, 1 << in_pairs),
            Self::ScaleThread => selector(7, 1, 1),
            // Of what another block is told only that it was told.
            Self::NarrowerScope if is("barrier.cluster.arrive.release") => {
                Some(statement.replacen(".release", ".relaxed", 1))
            }
            Self::NarrowerScope if is("mbarrier") && opcode.contains("e.cluster.") => {
                Some(statement.replacen("e.cluster.", "e.cta.", 1))
            }
            Self::OtherBlock if is("mapa") => changed(2, "b32", "xor.b32 planted, OLD, 1"),
            Self::OtherBlocksTold if opcode.contains("multicast::cluster") && is("tcgen05") => {
                changed(1, "b16", "xor.b16 planted, OLD, 2")
            }
            Self::BoxCoordinate if is("cp.async.bulk.tensor") => {
                let source = operands.get(1)?;
                let first = source.split('{').nth(1)?.split([',', '}']).next()?.trim();
                let wrong = source.replacen(first, "planted", 1);
                Some(format!(
                    "{{ .reg .b32 planted; add.s32 planted, {first}, 8; {opcode} {}, {wrong}, {}; }}",
                    operands.first()?,
                    operands.get(2..)?.join(", ")
                ))
            }
            _ => None,
        }
    }
}

/// Whether a product uses the leading dimension's distance of its operand B: a swizzled tile whose k runs along
/// memory does not, and neither does one with a single chunk of 64 columns.
fn uses_leading(opcode: &str, operands: &[&str]) -> bool {
    // Only 16-bit types have the flag that k runs across memory; it is the last operand.
    let has_flag = opcode.ends_with(".bf16.bf16") || opcode.ends_with(".f16.f16");
    let columns = opcode.split_once(".m64n").and_then(|(_, rest)| rest.split_once('k'));
    let columns: u32 = columns.and_then(|(columns, _)| columns.parse().ok()).unwrap_or(0);
    has_flag && columns > 64 && operands.last().is_some_and(|flag| flag.trim() == "1")
}

/// Operands at commas outside brackets and braces.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let mut parts = Vec::new();
    let mut first = 0;
    for (at, c) in text.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[first..at]);
                first = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[first..]);
    parts
}

/// A kernel and all launches of it.
#[derive(Clone, Debug)]
pub(crate) struct Suite {
    pub(crate) ptx: Arc<str>,
    pub(crate) launches: Vec<Recording>,
}

impl Suite {
    /// One suite for each kernel that was launched, in the order of their first launches.
    pub(crate) fn by_kernel(launches: impl IntoIterator<Item = Recording>) -> Vec<Self> {
        let mut suites: Vec<Self> = Vec::new();
        for launch in launches {
            match suites.iter_mut().find(|suite| suite.ptx == launch.ptx) {
                Some(suite) => suite.launches.push(launch),
                None => suites.push(Self { ptx: launch.ptx.clone(), launches: vec![launch] }),
            }
        }
        suites
    }

    /// At most `most` places of each fault in what the launches ran, spread over it.
    pub(crate) fn mutations(&self, most: usize) -> Vec<Mutation> {
        let ran: BTreeSet<_> = self.launches.iter().flat_map(|launch| &launch.lines).collect();
        let lines: Vec<_> = self.ptx.lines().collect();
        let mut all = Vec::new();
        for fault in Fault::ALL {
            let places: Vec<_> = lines
                .iter()
                .enumerate()
                .filter(|(at, _)| ran.contains(&(*at as u32 + 1)))
                .filter_map(|(at, line)| Some((at, fault.plant(line.trim())?)))
                .collect();
            let step = places.len().div_ceil(most.max(1)).max(1);
            for (at, planted) in places.iter().step_by(step) {
                let mut lines = lines.clone();
                lines[*at] = planted;
                all.push(Mutation { fault, line: at + 1, ptx: lines.join("\n") });
            }
        }
        all
    }

    /// What the launches, the shortest first, show of a fault.
    pub(crate) fn judge(&self, mutation: &Mutation, schedules: u64) -> Verdict {
        let program = match Program::parse(&mutation.ptx) {
            Ok(program) => program,
            Err(error) => return Verdict::Reported(error.to_string()),
        };
        let mut launches: Vec<_> = self.launches.iter().collect();
        launches.sort_by_key(|launch| launch.instructions);
        let verdicts = launches.iter().map(|launch| launch.judge(&program, schedules));
        verdicts
            .into_iter()
            .find(|verdict| *verdict != Verdict::Survived)
            .unwrap_or(Verdict::Survived)
    }
}

/// A fault in a line of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Mutation {
    pub(crate) fault: Fault,
    pub(crate) line: usize,
    ptx: String,
}

/// What became of a mutation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The simulator named a fault.
    Reported(String),
    /// The result was another one.
    Different,
    /// Nothing was noticed.
    Survived,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reported(reason) => f.write_str(reason),
            Self::Different => f.write_str("another result"),
            Self::Survived => f.write_str("SURVIVED"),
        }
    }
}

impl Recording {
    /// Runs the launch with another program, under a few schedules.
    fn judge(&self, program: &Program, schedules: u64) -> Verdict {
        // Enough for a kernel that waits in a loop, and little enough that one that never ends is noticed.
        let most_instructions = 20 * self.instructions + 100_000;
        for schedule in Schedule::several(schedules) {
            let mut device = self.before.clone();
            let options = Options { schedule, most_instructions, ..Options::default() };
            if let Err(error) = device.launch(program, &self.launch, &options) {
                return Verdict::Reported(error.to_string());
            }
            if device.difference(&self.after).is_some() {
                return Verdict::Different;
            }
        }
        Verdict::Survived
    }
}
