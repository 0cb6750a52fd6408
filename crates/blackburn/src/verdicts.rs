//! Verdicts on kernels, as they are kept between programs.
//!
//! An examination (`blackburn::doctor`, with the feature `doctor`) writes them, and [`init`](crate::init) reads them on
//! GPUs on which the project's own tests have never run. They lie in one file for all of a user's programs, in JSON:
//! a [`Record`] for each [`Machine`].

pub use crate::machine::{Compiler, Machine};
use blackburn_kernels::{Families, Family, FamilyOp};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// The form of the file that this version reads and writes.
const FORMAT: u32 = 1;

/// What was found of a group of cases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// How it ended.
    pub found: Found,
    /// What was seen, where it did not pass.
    pub note: String,
    /// Cases that ran.
    pub cases: usize,
    /// Elements that were compared.
    pub elements: usize,
    /// The largest error, as a share of its bound.
    pub worst: f64,
    /// How long it took.
    pub seconds: f64,
}

/// How a group of cases ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// All that ran was right.
    Passed,
    /// The device has nothing to run it by.
    NotOffered,
    /// A result was wrong, or a call failed.
    Wrong,
    /// The process crashed.
    Crashed,
    /// A case did not end.
    Hung,
    /// The process could not do its work.
    Broken,
}

impl Found {
    /// Whether nothing is wrong.
    pub fn is_well(self) -> bool {
        matches!(self, Self::Passed | Self::NotOffered)
    }
}

/// An examination of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The machine.
    pub machine: Machine,
    /// Whether every case of every group was asked for: others open no gate.
    pub complete: bool,
    /// When it ended, in seconds since 1970 in UTC.
    pub ended: u64,
    /// What was found, by group: operation, family and type, as in `matmul/mma/bf16`.
    pub verdicts: BTreeMap<String, Kept>,
    /// Plans of matrix products that were measured to be the fastest: what each is kept under, and its name.
    #[serde(default)]
    pub plans: BTreeMap<String, String>,
}

impl Record {
    /// The families that may be offered: those of which everything ran well, and something ran.
    pub(crate) fn families(&self) -> Families {
        let mut families = Families::PORTABLE;
        for (op, family) in pairs() {
            if self.of(op, family).is_some_and(|well| well) {
                families = families.with(op, family);
            }
        }
        families
    }

    /// The families that were found wrong, by name.
    pub(crate) fn left_out(&self) -> Vec<String> {
        let wrong = pairs().filter(|(op, family)| self.of(*op, *family) == Some(false));
        wrong.map(|(op, family)| format!("{op} by {family}")).collect()
    }

    /// Groups of ordinary kernels that were found wrong, by name: nothing else serves their operations.
    pub(crate) fn wrong_everywhere(&self) -> Vec<String> {
        let portable = format!("/{}/", Family::Portable);
        let wrong = self.verdicts.iter().filter(|(_, kept)| !kept.found.is_well());
        wrong.filter(|(name, _)| name.contains(&portable)).map(|(name, _)| name.clone()).collect()
    }

    /// Whether a family is well, if anything of it ran.
    fn of(&self, op: FamilyOp, family: Family) -> Option<bool> {
        let start = format!("{op}/{family}/");
        let mut found = self.verdicts.iter().filter(|(name, _)| name.starts_with(&start));
        let ran = found.clone().any(|(_, kept)| kept.found != Found::NotOffered);
        ran.then(|| found.all(|(_, kept)| kept.found.is_well()))
    }
}

/// The families on tensor cores, for each operation.
fn pairs() -> impl Iterator<Item = (FamilyOp, Family)> {
    let families = [Family::Tcgen05, Family::Wgmma, Family::Mma];
    FamilyOp::ALL.into_iter().flat_map(move |op| families.map(|family| (op, family)))
}

/// Why kept verdicts cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file or its folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file of another form.
    #[error(
        "{} has verdicts in form {found}, and this version of Blackburn reads form {FORMAT}",
        path.display()
    )]
    OtherForm {
        /// The file.
        path: PathBuf,
        /// Its form.
        found: u32,
    },
    /// A file of something else.
    #[error("{} holds no verdicts: {reason}", path.display())]
    NoVerdicts {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

#[derive(Serialize, Deserialize)]
struct File {
    format: u32,
    records: Vec<Record>,
}

/// The part of the file that every form has.
#[derive(Deserialize)]
struct Form {
    format: u32,
}

/// The records in the file; none where there is no file.
///
/// # Errors
///
/// A file that cannot be read, or has another form. It is left as it is.
pub fn read(path: &Path) -> Result<Vec<Record>, StoreError> {
    let path = path.to_path_buf();
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(StoreError::Io { path, source }),
    };
    let no_verdicts = |error: serde_json::Error| StoreError::NoVerdicts {
        path: path.clone(),
        reason: error.to_string(),
    };
    let Form { format } = serde_json::from_str(&text).map_err(no_verdicts)?;
    if format != FORMAT {
        return Err(StoreError::OtherForm { path, found: format });
    }
    let File { records, .. } = serde_json::from_str(&text).map_err(no_verdicts)?;
    Ok(records)
}

/// Adds a record to the file. It takes the place of an earlier one of the same machine, if that was no more
/// complete; all others stay. Measured plans of that machine go on into it. A file of another form is set aside,
/// under a name that is returned.
///
/// # Errors
///
/// A file or folder that cannot be read or written. What was kept before is left as it is.
pub fn keep(path: &Path, record: &Record) -> Result<Option<PathBuf>, StoreError> {
    let failed = |source| StoreError::Io { path: path.to_path_buf(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(failed)?;
    let (mut records, aside) = match read(path) {
        Ok(records) => (records, None),
        Err(StoreError::Io { path, source }) => return Err(StoreError::Io { path, source }),
        Err(StoreError::OtherForm { .. } | StoreError::NoVerdicts { .. }) => {
            let aside = free_name(path);
            fs::rename(path, &aside).map_err(failed)?;
            (Vec::new(), Some(aside))
        }
    };
    let replaced = |old: &Record| {
        old.machine.differences(&record.machine).is_empty() && (record.complete || !old.complete)
    };
    let measured = plans_in(&records, &record.machine);
    records.retain(|old| !replaced(old));
    let mut record = record.clone();
    for (kept_under, plan) in measured {
        record.plans.entry(kept_under).or_insert(plan);
    }
    records.push(record);
    let file = File { format: FORMAT, records };
    let write = || -> io::Result<()> {
        // In one step, so that no other program reads half of it.
        let mut whole = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer_pretty(&mut whole, &file)?;
        whole.persist(path)?;
        Ok(())
    };
    write().map_err(failed)?;
    Ok(aside)
}

/// A name beside `path` that no file has.
fn free_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let named = |number: u32| path.with_file_name(format!("{name}.aside-{number}"));
    (1..).map(named).find(|candidate| !candidate.exists()).unwrap_or_else(|| named(0))
}

/// Plans that were measured on a machine; none where there are none, or the file cannot be read.
pub(crate) fn plans_of(path: &Path, machine: &Machine) -> BTreeMap<String, String> {
    plans_in(&read(path).unwrap_or_default(), machine)
}

/// Later records come behind, and take precedence.
fn plans_in(records: &[Record], machine: &Machine) -> BTreeMap<String, String> {
    let of_machine =
        records.iter().filter(|record| machine.differences(&record.machine).is_empty());
    of_machine.flat_map(|record| record.plans.clone()).collect()
}

/// The record that holds for a machine, or the words that say why there is none.
pub(crate) fn of_machine(path: &Path, machine: &Machine) -> Result<Record, String> {
    let records = read(path).map_err(|error| error.to_string())?;
    let complete = || records.iter().filter(|record| record.complete);
    let holds = |record: &&Record| machine.differences(&record.machine).is_empty();
    if let Some(record) = complete().find(holds) {
        return Ok(record.clone());
    }
    // Of those that do not hold, the one that comes nearest.
    let nearest = complete().min_by_key(|record| machine.differences(&record.machine).len());
    Err(match nearest.filter(|record| record.machine.device == machine.device) {
        Some(record) => {
            let differences = machine.differences(&record.machine).join(", ");
            format!("it last examined another set-up ({differences})")
        }
        None => "it has never examined this device".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tests::ada;

    fn kept(found: Found) -> Kept {
        Kept { found, note: String::new(), cases: 1, elements: 9, worst: 0.5, seconds: 1.0 }
    }

    fn record(verdicts: &[(&str, Found)]) -> Record {
        let verdicts = verdicts.iter().map(|(name, found)| (name.to_string(), kept(*found)));
        Record {
            machine: ada(),
            complete: true,
            ended: 1,
            verdicts: verdicts.collect(),
            plans: BTreeMap::new(),
        }
    }

    #[test]
    fn a_family_is_offered_where_all_of_it_that_ran_is_well_and_something_ran() {
        use Found::{Crashed, Hung, NotOffered, Passed, Wrong};
        let record = record(&[
            ("matmul/mma/f32", Passed),
            ("matmul/mma/bf16", Passed),
            ("matmul/wgmma/bf16", NotOffered),
            ("conv/mma/f32", Passed),
            ("conv/mma/bf16", Wrong),
            ("attention/mma/f32", NotOffered),
            ("attention/mma/bf16", Passed),
            ("fp8_matmul/mma/bf16", Hung),
            ("norm/portable/f32", Crashed),
        ]);
        let offered: Vec<_> =
            pairs().filter(|(op, family)| record.families().has(*op, *family)).collect();
        assert_eq!(offered, [(FamilyOp::Matmul, Family::Mma), (FamilyOp::Attention, Family::Mma)]);
        assert_eq!(record.left_out(), ["fp8_matmul by mma", "conv by mma"]);
        assert_eq!(record.wrong_everywhere(), ["norm/portable/f32"]);
    }

    #[test]
    fn records_are_kept_by_machine_and_complete_ones_are_not_replaced_by_parts() {
        let folder = tempfile::tempdir().unwrap();
        // A folder that is not there yet.
        let path = folder.path().join("cache").join("verdicts.json");
        assert!(read(&path).unwrap().is_empty());
        let whole = record(&[("matmul/mma/f32", Found::Passed)]);
        assert_eq!(keep(&path, &whole).unwrap(), None);
        let other = Record { machine: Machine { driver: None, ..ada() }, ..whole.clone() };
        keep(&path, &other).unwrap();
        let part = Record { complete: false, verdicts: BTreeMap::new(), ..whole.clone() };
        keep(&path, &part).unwrap();
        assert_eq!(read(&path).unwrap(), [whole.clone(), other.clone(), part.clone()]);
        let newer = Record { ended: 2, ..whole };
        keep(&path, &newer).unwrap();
        assert_eq!(read(&path).unwrap(), [other, newer.clone()]);
        assert_eq!(of_machine(&path, &ada()), Ok(newer));
    }

    #[test]
    fn measured_plans_outlive_later_examinations_of_their_machine_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verdicts.json");
        let plan = |name: &str| BTreeMap::from([("m1".to_owned(), name.to_owned())]);
        let tuned = Record { complete: false, plans: plan("wide"), ..record(&[]) };
        keep(&path, &tuned).unwrap();
        keep(&path, &record(&[("matmul/mma/f32", Found::Passed)])).unwrap();
        assert_eq!(plans_of(&path, &ada()), plan("wide"));
        let again = Record { plans: plan("narrow"), ..tuned };
        keep(&path, &again).unwrap();
        assert_eq!(plans_of(&path, &ada()), plan("narrow"));
        let other = Machine { driver: None, ..ada() };
        assert!(plans_of(&path, &other).is_empty());
        assert!(plans_of(&folder.path().join("none.json"), &ada()).is_empty());
    }

    #[test]
    fn why_no_record_holds_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verdicts.json");
        assert!(of_machine(&path, &ada()).unwrap_err().contains("never examined this device"));
        keep(&path, &record(&[])).unwrap();
        let newer = Machine { driver: Some("580.65.06".into()), ..ada() };
        let reason = of_machine(&path, &newer).unwrap_err();
        assert!(reason.contains("driver 570.86.15, now 580.65.06"), "{reason}");
        let of_part = Record { complete: false, ..record(&[]) };
        fs::remove_file(&path).unwrap();
        keep(&path, &of_part).unwrap();
        assert!(of_machine(&path, &ada()).is_err());
    }

    #[test]
    fn a_file_of_another_form_is_told_and_set_aside_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verdicts.json");
        for (text, expected) in [
            (r#"{"format": 7, "verdicts": "of a later version"}"#, "form 7"),
            ("not even JSON", "holds no verdicts"),
        ] {
            fs::write(&path, text).unwrap();
            let reason = of_machine(&path, &ada()).unwrap_err();
            assert!(reason.contains(expected) && reason.contains("verdicts.json"), "{reason}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            let aside = keep(&path, &record(&[])).unwrap().unwrap();
            assert_eq!(fs::read_to_string(aside).unwrap(), text);
            assert_eq!(read(&path).unwrap().len(), 1);
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = keep(&file.join("verdicts.json"), &record(&[])).unwrap_err();
        assert!(error.to_string().contains("verdicts.json"), "{error}");
    }
}
