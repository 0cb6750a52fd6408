//! Rotary positions and their gradient on the device, against f64.

use blackburn_kernels::{
    KernelError, Pass,
    attention::{HeadStrides, Order},
    buffer::{Buffer, Rows},
    rotary::{RotaryProblem, rotary, rotary_watched},
};
use blackburn_reference::{
    random::normal,
    rotary::{Rotation, table},
    storage::Storage,
    tolerance::compare,
};
use blackburn_tests::{
    buffers::{download, dtype, largest_magnitude, upload, upload_behind},
    on_device, on_device_with,
};
use cubecl::{
    client::Client,
    ir::{ElemType, IntKind},
};
use libtest_mimic::{Failed, Trial};

#[path = "rotary_op.rs"]
mod op;

const PASSES: [Pass; 2] = [Pass::Forward, Pass::Backward];

/// Batch, heads, rows and columns: pairs alone, vectors of two and four, a cube and more; one row a unit, two and
/// four, and rows that neighbors do not divide.
const SIZES: [[usize; 4]; 9] = [
    [1, 1, 1, 2],
    [2, 3, 5, 6],
    [1, 2, 7, 8],
    [3, 4, 33, 64],
    [9, 3, 2, 24],
    [2, 5, 3, 128],
    [4, 1, 300, 10],
    [2, 8, 1, 32],
    [17, 1, 3, 4],
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for storage in Storage::ALL {
        for (name, lies) in [
            ("heads_first", Lies::InOrder),
            ("positions_first", Lies::PositionsFirst),
            ("rows_apart", Lies::Apart),
            ("rows_expanded", Lies::Expanded),
        ] {
            let name = format!("rotary::{name}_are_within_bounds_in_{storage:?}").to_lowercase();
            trials.push(Trial::ignorable_test(name, move || {
                on_device_with(dtype(storage), |client| layouts(client, lies, storage))
            }));
        }
    }
    let trial = |name: &str, test: fn(&Client) -> Result<(), Failed>| {
        Trial::ignorable_test(format!("rotary::{name}"), move || on_device(test))
    };
    trials.extend([
        trial("a_planted_fault_is_caught", planted_fault),
        trial("tensors_that_begin_late_are_served", late),
        trial("a_table_in_padded_rows_is_served", padded_table),
        trial("a_table_of_no_rotation_has_its_own_gradient", no_rotation),
        trial("what_others_hold_is_not_overwritten", held),
        trial("nan_reaches_its_own_pair_alone", nan),
        trial("empty_tensors_give_empty_tensors", empty),
        trial("bad_arguments_are_named", bad_arguments),
    ]);
    trials.extend(op::trials());
    trials
}

/// How x lies in memory.
#[derive(Clone, Copy, Debug)]
enum Lies {
    InOrder,
    PositionsFirst,
    /// Heads of a position side by side, with other columns behind those of all heads.
    Apart,
    /// All heads are one.
    Expanded,
}

impl Lies {
    fn strides(self, [_, heads, seq, head_dim]: [usize; 4]) -> HeadStrides {
        match self {
            Self::InOrder => Order::HeadsFirst.strides(heads, seq, head_dim),
            Self::PositionsFirst => Order::PositionsFirst.strides(heads, seq, head_dim),
            Self::Apart => {
                let row = 2 * heads * head_dim + 2;
                HeadStrides { batch: seq * row + 4, head: head_dim, row }
            }
            Self::Expanded => HeadStrides { batch: seq * head_dim, head: 0, row: head_dim },
        }
    }
}

/// Rows, where they lie, and the table that turns them.
struct Case {
    problem: RotaryProblem,
    /// By batch, head, row and column.
    x: Vec<f64>,
    table: Vec<f64>,
}

impl Case {
    fn new(sizes: [usize; 4], lies: Lies, start: usize, storage: Storage) -> Self {
        let [batch, heads, seq, head_dim] = sizes;
        let (strides, positions) = (lies.strides(sizes), start + seq + 1);
        let order = match lies {
            Lies::InOrder | Lies::Expanded => Order::HeadsFirst,
            Lies::PositionsFirst | Lies::Apart => Order::PositionsFirst,
        };
        let dtype = dtype(storage);
        let problem =
            RotaryProblem { batch, heads, seq, head_dim, dtype, strides, order, start, positions };
        let mut x = normal(seq as u64, problem.elements(), 2.0, storage);
        if matches!(lies, Lies::Expanded) {
            let one = seq * head_dim;
            for sequence in x.chunks_mut(heads * one) {
                (one..sequence.len()).for_each(|at| sequence[at] = sequence[at % one]);
            }
        }
        // A base that turns every pair by a good deal.
        Self { problem, x, table: table(positions, head_dim, 7.0) }
    }

    /// Where elements lie in memory that rows begin in by those strides, in the order of `x`.
    fn places(&self, strides: HeadStrides) -> impl Iterator<Item = usize> {
        let RotaryProblem { heads, seq, head_dim, .. } = self.problem;
        (0..self.x.len()).map(move |at| {
            let (row, column) = (at / head_dim, at % head_dim);
            let (position, head, batch) = (row % seq, row / seq % heads, row / seq / heads);
            batch * strides.batch + head * strides.head + position * strides.row + column
        })
    }

    /// What memory holds: NaN between rows.
    fn memory(&self) -> Vec<f64> {
        let mut memory = vec![f64::NAN; self.problem.span()];
        for (place, x) in self.places(self.problem.strides).zip(&self.x) {
            memory[place] = *x;
        }
        memory
    }

    fn turned(
        &self,
        client: &Client,
        pass: Pass,
        x: Buffer,
        table: &Rows,
        storage: Storage,
    ) -> Result<Vec<f64>, String> {
        let y = rotary(client, &self.problem, pass, x, table).map_err(|error| error.to_string())?;
        if y.elements != self.x.len() {
            return Err(format!("{} elements of {}", y.elements, self.x.len()));
        }
        let y = download(client, y, storage)?;
        Ok(self.places(self.problem.out_strides()).map(|place| y[place]).collect())
    }

    /// The kernel that tells magnitudes makes the same numbers, of which it tells the largest.
    fn check_watched(
        &self,
        client: &Client,
        pass: Pass,
        (x, table): (Buffer, &Rows),
        plain: &[f64],
        storage: Storage,
    ) -> Result<(), String> {
        let (y, magnitudes) = rotary_watched(client, &self.problem, pass, x, table)
            .map_err(|error| error.to_string())?;
        let y = download(client, y, storage)?;
        if self.places(self.problem.out_strides()).map(|place| y[place]).ne(plain.iter().copied()) {
            return Err(format!("{pass}: other numbers if watched"));
        }
        let exact = plain.iter().fold(0.0f64, |most, value| most.max(value.abs()));
        match magnitudes.map(|magnitudes| largest_magnitude(client, &magnitudes)).transpose()? {
            Some(told) if told == exact => Ok(()),
            told => Err(format!("{pass}: a largest magnitude of {exact} became {told:?}")),
        }
    }

    fn compare(&self, y: &[f64], pass: Pass, storage: Storage) -> Result<(), String> {
        let RotaryProblem { head_dim, seq, start, .. } = self.problem;
        let gradient = pass == Pass::Backward;
        let rotation = Rotation { table: &self.table, head_dim, start, gradient };
        let (expected, bounds) = rotation.of(&self.x, seq, storage);
        compare(y, &expected, &bounds).map_err(|mismatch| format!("{pass}: {mismatch}"))?;
        Ok(())
    }

    /// Both passes, in the memory of x where that can be, and beside it.
    fn check(&self, client: &Client, storage: Storage) -> Result<(), String> {
        let table = upload(client, &self.table, Storage::F32).into();
        for pass in PASSES {
            let x = upload(client, &self.memory(), storage);
            let beside = self.turned(client, pass, x.clone(), &table, storage)?;
            self.compare(&beside, pass, storage)?;
            self.check_watched(client, pass, (x.clone(), &table), &beside, storage)?;
            let same = self.turned(client, pass, x, &table, storage)?;
            self.compare(&same, pass, storage).map_err(|error| format!("in place: {error}"))?;
        }
        Ok(())
    }
}

fn layouts(client: &Client, lies: Lies, storage: Storage) -> Result<(), Failed> {
    for sizes in SIZES {
        for start in [0, 3] {
            let case = Case::new(sizes, lies, start, storage);
            case.check(client, storage).map_err(|error| format!("{sizes:?} {start}: {error}"))?;
        }
    }
    Ok(())
}

/// The negative controls: the other pass, rows at the positions of their neighbors, exchanged heads, and a last
/// element that is a thousandth off.
fn planted_fault(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let case = Case::new([2, 3, 4, 8], Lies::PositionsFirst, 1, storage);
    let table = upload(client, &case.table, Storage::F32).into();
    let x = upload(client, &case.memory(), storage);
    let y = case.turned(client, Pass::Forward, x.clone(), &table, storage)?;
    case.compare(&y, Pass::Forward, storage)?;
    let mut off = y.clone();
    off[y.len() - 1] *= 1.001;
    let mut exchanged = y.clone();
    exchanged[..64].rotate_left(32);
    let shifted = RotaryProblem { start: 0, ..case.problem };
    let shifted = Case { problem: shifted, x: case.x.clone(), table: case.table.clone() };
    let shifted = shifted.turned(client, Pass::Forward, x.clone(), &table, storage)?;
    let back = case.turned(client, Pass::Backward, x, &table, storage)?;
    for faulty in [off, exchanged, shifted, back] {
        if case.compare(&faulty, Pass::Forward, storage).is_ok() {
            return Err("a fault went unseen".into());
        }
    }
    Ok(())
}

/// Bindings of other runtimes than CUDA begin at multiples of 256 bytes.
fn late(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let fronts: &[usize] = if client.name() == "cuda" { &[2, 4, 64] } else { &[64] };
    let case = Case::new([2, 3, 5, 16], Lies::PositionsFirst, 2, storage);
    for front in fronts {
        let table = upload_behind(client, *front, &case.table, Storage::F32).into();
        for pass in PASSES {
            let x = upload_behind(client, *front, &case.memory(), storage);
            let y = case.turned(client, pass, x, &table, storage)?;
            case.compare(&y, pass, storage).map_err(|error| format!("{front}: {error}"))?;
        }
    }
    Ok(())
}

/// Rows of two numbers that CUDA's runtime lays four numbers apart.
fn padded_table(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    for sizes in [[2, 3, 5, 16], [1, 1, 3, 6]] {
        let case = Case::new(sizes, Lies::PositionsFirst, 2, storage);
        let pairs: Vec<[f64; 2]> = case.table.chunks(2).map(|pair| [pair[0], pair[1]]).collect();
        let padded: Vec<f64> =
            pairs.iter().flat_map(|[cos, sin]| [*cos, *sin, f64::NAN, f64::NAN]).collect();
        let buffer = upload(client, &padded, Storage::F32);
        let table = Rows { buffer, rows: pairs.len(), columns: 2, pitch: 4 };
        for pass in PASSES {
            let x = upload(client, &case.memory(), storage);
            let y = case.turned(client, pass, x, &table, storage)?;
            case.compare(&y, pass, storage)?;
        }
    }
    Ok(())
}

/// A table whose pairs have two angles, and lengths other than one.
fn no_rotation(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let mut case = Case::new([2, 3, 5, 16], Lies::InOrder, 2, storage);
    case.table = normal(9, case.table.len(), 1.0, Storage::F32);
    Ok(case.check(client, storage)?)
}

fn held(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let case = Case::new([2, 3, 5, 16], Lies::PositionsFirst, 0, storage);
    let table = upload(client, &case.table, Storage::F32).into();
    let (before, x) = (case.memory(), upload(client, &case.memory(), storage));
    case.turned(client, Pass::Forward, x.clone(), &table, storage)?;
    if download(client, x, storage)? == before { Ok(()) } else { Err("x has changed".into()) }
}

fn nan(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let mut case = Case::new([2, 3, 5, 16], Lies::PositionsFirst, 1, storage);
    case.x[37] = f64::NAN;
    let table = upload(client, &case.table, Storage::F32).into();
    for pass in PASSES {
        let x = upload(client, &case.memory(), storage);
        let y = case.turned(client, pass, x, &table, storage)?;
        let found: Vec<usize> = (0..y.len()).filter(|at| y[*at].is_nan()).collect();
        if found != [36, 37] {
            return Err(format!("{pass}: NaN in element 37 came out at {found:?}").into());
        }
    }
    Ok(())
}

fn empty(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    for sizes in [[0, 2, 3, 4], [2, 0, 3, 4], [2, 2, 0, 4], [2, 2, 3, 0]] {
        let case = Case::new(sizes, Lies::PositionsFirst, 1, storage);
        let nothing = Buffer::empty(client, 0, dtype(storage));
        let table = match case.table.len() {
            0 => nothing.clone(),
            _ => upload(client, &case.table, Storage::F32),
        };
        let y = rotary(client, &case.problem, Pass::Forward, nothing, &table.into())?;
        if y.elements != 0 {
            return Err(format!("{} elements of {sizes:?}", y.elements).into());
        }
    }
    Ok(())
}

fn bad_arguments(client: &Client) -> Result<(), Failed> {
    let storage = Storage::F32;
    let case = Case::new([2, 3, 5, 16], Lies::PositionsFirst, 1, storage);
    let x = upload(client, &case.memory(), storage);
    let table: Rows = upload(client, &case.table, Storage::F32).into();
    let call = |problem: &RotaryProblem, x: &Buffer, table: &Rows| {
        rotary(client, problem, Pass::Forward, x.clone(), table).err()
    };
    let shorter = Buffer { elements: x.elements - 1, ..x.clone() };
    let short_table =
        Rows::from(Buffer { elements: table.buffer.elements - 2, ..table.buffer.clone() });
    let odd = RotaryProblem { head_dim: 15, ..case.problem };
    let beyond = RotaryProblem { start: 3, ..case.problem };
    let refused = [
        ("x", "at least 480", call(&case.problem, &shorter, &table)),
        ("table", "7 positions of 16 pairs", call(&case.problem, &x, &short_table)),
        ("head_dim", "an even number", call(&odd, &x, &table)),
        ("start", "at most 2", call(&beyond, &x, &table)),
    ];
    for (name, said, error) in refused {
        match error {
            Some(error @ KernelError::InvalidProblem { argument, .. })
                if argument == name && error.to_string().contains(said) => {}
            other => return Err(format!("{name}: {other:?}").into()),
        }
    }
    let integers = RotaryProblem { dtype: ElemType::Int(IntKind::I32), ..case.problem };
    let odd = HeadStrides { row: 49, ..case.problem.strides };
    for declined in [integers, RotaryProblem { strides: odd, ..case.problem }] {
        match call(&declined, &x, &table) {
            Some(KernelError::Unsupported { op: "rotary", .. }) => {}
            other => return Err(format!("{declined:?}: {other:?}").into()),
        }
    }
    Ok(())
}
