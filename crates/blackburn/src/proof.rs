//! Which families of kernels a GPU is offered, and why.

use serde::Serialize;
use std::fmt;

#[cfg(feature = "gpu")]
use crate::{Config, machine::Machine, verdicts};
#[cfg(feature = "gpu")]
use blackburn_kernels::{DeviceProfile, family, matmul};
#[cfg(feature = "gpu")]
use std::path::{Path, PathBuf};

/// How to run an examination of the kernels.
#[cfg(feature = "gpu")]
pub(crate) const COMMAND: &str =
    "cargo run --release -p blackburn --example doctor --features cuda,doctor";

/// Why a device is offered the kernels that it is.
///
/// Kernels on tensor cores come in families, by the instructions that they use. A family is offered where it has run
/// and been found right: by the project's own tests, or by an examination on the user's machine. Elsewhere ordinary
/// kernels and Burn's own take its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "proof")]
pub enum Proof {
    /// The device has no families to choose from.
    NoChoice,
    /// All families: the project's tests have run them on this architecture.
    ByTheProject,
    /// All families, by the setting [`Config::unproven`](crate::Config::unproven).
    Unchecked,
    /// The families that an examination of this machine found right.
    Examined {
        /// What it found wrong, and what is therefore left out.
        left_out: Vec<String>,
        /// Groups of ordinary kernels that it found wrong. Nothing takes their place.
        wrong: Vec<String>,
    },
    /// No family: an examination is due.
    Due {
        /// Why, and what to do.
        reason: String,
    },
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoChoice => f.write_str("ordinary ones, which serve every device"),
            Self::ByTheProject => f.write_str("proven on this architecture"),
            Self::Unchecked => f.write_str("offered unproven, as BLACKBURN_UNPROVEN says"),
            Self::Examined { left_out, wrong } => {
                f.write_str("proven by doctor on this machine")?;
                if !left_out.is_empty() {
                    write!(f, "; left out, for they were found wrong: {}", left_out.join(", "))?;
                }
                if !wrong.is_empty() {
                    write!(f, "; found wrong, and not replaced: {}", wrong.join(", "))?;
                }
                Ok(())
            }
            Self::Due { reason } => f.write_str(reason),
        }
    }
}

/// Offers the kernels of a device what is proven there, and says why it is that.
#[cfg(feature = "gpu")]
pub(crate) fn settle(config: &Config, cube: &cubecl::Device) -> Proof {
    let client = cube.client();
    let Some(capability) = DeviceProfile::of(&client).compute_capability else {
        return Proof::NoChoice;
    };
    let path = verdicts_path(config);
    if path.exists() {
        matmul::keep_plans(verdicts::plans_of(&path, &Machine::of(&client)));
    }
    if family::is_proven(capability) {
        return Proof::ByTheProject;
    }
    if config.unproven {
        family::offer_unproven();
        return Proof::Unchecked;
    }
    let proof = by_verdicts(capability, &Machine::of(&client), &path);
    if !matches!(&proof, Proof::Examined { left_out, wrong } if left_out.is_empty() && wrong.is_empty())
    {
        tracing::warn!("kernels: {proof}");
    }
    proof
}

/// As [`settle`], on a machine of which verdicts are needed.
#[cfg(feature = "gpu")]
fn by_verdicts(capability: u32, machine: &Machine, path: &Path) -> Proof {
    match verdicts::of_machine(path, machine) {
        Ok(record) => {
            family::offer(capability, record.families());
            Proof::Examined { left_out: record.left_out(), wrong: record.wrong_everywhere() }
        }
        Err(why) => {
            let device = &machine.device;
            let reason = format!(
                "doctor is due on {device} (sm_{capability}), where the kernels on tensor cores are \
                 unproven and stay off: {why}; run `{COMMAND}`, or set BLACKBURN_UNPROVEN=1"
            );
            Proof::Due { reason }
        }
    }
}

/// The file of the verdicts: what the settings say, or one in the user's cache folder. CubeCL's own cache may lie in a
/// project's `target`, and a verdict holds for all projects.
#[cfg(feature = "gpu")]
pub(crate) fn verdicts_path(config: &Config) -> PathBuf {
    config.verdicts.clone().unwrap_or_else(|| {
        blackburn_backend::runtime::user_cache_folder().join("blackburn-verdicts.json")
    })
}

#[cfg(all(test, feature = "gpu"))]
mod tests {
    use super::*;
    use crate::{
        machine::tests::ada,
        verdicts::{Found, Kept, Record},
    };
    use blackburn_kernels::{Families, Family, FamilyOp};

    /// A capability that no other test offers anything.
    const CAPABILITY: u32 = 781;

    #[test]
    fn without_verdicts_one_line_says_that_doctor_is_due_and_how_to_run_it() {
        let folder = tempfile::tempdir().unwrap();
        let proof = by_verdicts(CAPABILITY, &ada(), &folder.path().join("none.json"));
        let Proof::Due { reason } = &proof else { panic!("{proof:?}") };
        assert_eq!(reason.lines().count(), 1);
        for part in ["RTX 4090", "sm_781", "--example doctor", "BLACKBURN_UNPROVEN"] {
            assert!(reason.contains(part), "{reason}");
        }
    }

    #[test]
    fn what_doctor_found_right_is_offered_and_what_it_found_wrong_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("verdicts.json");
        let kept = |found| Kept {
            found,
            note: String::new(),
            cases: 1,
            elements: 1,
            worst: 0.0,
            seconds: 0.0,
        };
        let verdicts = [
            ("matmul/mma/bf16".to_string(), kept(Found::Passed)),
            ("attention/mma/bf16".to_string(), kept(Found::Wrong)),
        ];
        let machine = crate::machine::Machine { compute_capability: Some(782), ..ada() };
        let record = Record {
            machine: machine.clone(),
            complete: true,
            ended: 0,
            verdicts: verdicts.into(),
            plans: Default::default(),
        };
        verdicts::keep(&path, &record).unwrap();
        let proof = by_verdicts(782, &machine, &path);
        assert!(proof.to_string().contains("attention by mma"), "{proof}");
        let offered = family::offered(782);
        assert!(offered.has(FamilyOp::Matmul, Family::Mma));
        assert!(!offered.has(FamilyOp::Attention, Family::Mma));
        assert_ne!(offered, Families::ALL);
    }
}
