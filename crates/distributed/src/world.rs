//! Which of the processes this one is, as its launcher says.

use crate::error::DistributedError;
use gethostname::gethostname;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Where rank 0 listens if nobody says: `PyTorch`'s.
const DEFAULT_PORT: u16 = 29500;
/// The first port of those that are derived from a job's number, and how many there are.
const JOB_PORTS: (u16, u16) = (15000, 10000);

/// What started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// None: it is alone.
    None,
    /// `torchrun`, Kubernetes' training operator, [`launch`](crate::launch), or anything else that sets
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
    Torch,
    /// Slurm's `srun`.
    Slurm,
    /// Open MPI's `mpirun`.
    OpenMpi,
}

/// The processes that train together, and this one's place among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This process's number, from 0.
    pub rank: usize,
    /// How many processes there are.
    pub size: usize,
    /// Its number among those on this machine, if the launcher says.
    pub local_rank: Option<usize>,
    /// Where rank 0 is: a name or an address.
    pub address: String,
    /// The port that rank 0 listens on, or the first that it tries.
    pub port: u16,
    /// The same for all processes of a job, and another one for each job.
    pub job: String,
    /// What started it.
    pub launcher: Launcher,
}

impl World {
    /// This process alone.
    pub fn alone() -> Self {
        Self {
            rank: 0,
            size: 1,
            local_rank: Some(0),
            address: "127.0.0.1".into(),
            port: DEFAULT_PORT,
            job: String::new(),
            launcher: Launcher::None,
        }
    }

    /// What the launcher has put into the environment: `torchrun`'s variables first, then Slurm's, then Open
    /// MPI's. Without any the process is alone.
    ///
    /// Slurm's count within a step alone (`srun`), since a batch script is one process whatever it was granted.
    ///
    /// # Errors
    ///
    /// When a variable is missing beside others of its launcher, or makes no sense.
    pub fn from_environment() -> Result<Self, DistributedError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`from_environment`](Self::from_environment), from variables that a function gives.
    ///
    /// # Errors
    ///
    /// As `from_environment`.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, DistributedError> {
        let variables = Variables(&variable);
        let world = if variable("RANK").is_some() || variable("WORLD_SIZE").is_some() {
            variables.torch()?
        } else if variable("SLURM_STEP_NUM_TASKS").is_some() {
            variables.slurm()?
        } else if variable("OMPI_COMM_WORLD_SIZE").is_some() {
            variables.open_mpi()?
        } else {
            return Ok(Self::alone());
        };
        world.checked()
    }

    /// Whether the environment says that this process is a rank other than 0, which had better be silent. For the
    /// set-up of a program's log, before it [joins](crate::Group::join).
    pub fn is_silent() -> bool {
        Self::from_environment().is_ok_and(|world| world.rank > 0)
    }

    fn checked(self) -> Result<Self, DistributedError> {
        let refused = |variable: &str, expected, actual: String| {
            Err(DistributedError::Environment { variable: variable.into(), expected, actual })
        };
        let [rank, size] = match self.launcher {
            Launcher::None | Launcher::Torch => ["RANK", "WORLD_SIZE"],
            Launcher::Slurm => ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"],
            Launcher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        };
        if self.size == 0 {
            return refused(size, "at least 1", "0".into());
        }
        if self.rank >= self.size {
            let actual = format!("{} of {}", self.rank, self.size);
            return refused(rank, "a rank below the number of ranks", actual);
        }
        Ok(self)
    }
}

struct Variables<'a, F>(&'a F);

impl<F: Fn(&str) -> Option<String>> Variables<'_, F> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// A number that has to be there.
    fn number(&self, name: &str) -> Result<usize, DistributedError> {
        self.number_if_set(name)?.ok_or_else(|| DistributedError::Environment {
            variable: name.into(),
            expected: "a number, as the launcher's other variables are set",
            actual: "nothing".into(),
        })
    }

    fn number_if_set(&self, name: &str) -> Result<Option<usize>, DistributedError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let wrong = |_| DistributedError::Environment {
            variable: name.into(),
            expected: "a number of at least 0",
            actual: text.clone(),
        };
        text.parse().map(Some).map_err(wrong)
    }

    fn port(&self) -> Result<Option<u16>, DistributedError> {
        let Some(number) = self.number_if_set("MASTER_PORT")? else { return Ok(None) };
        match u16::try_from(number) {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(DistributedError::Environment {
                variable: "MASTER_PORT".into(),
                expected: "a port from 1 to 65535",
                actual: number.to_string(),
            }),
        }
    }

    fn torch(&self) -> Result<World, DistributedError> {
        let (rank, size) = (self.number("RANK")?, self.number("WORLD_SIZE")?);
        let address = match self.text("MASTER_ADDR") {
            Some(address) => address,
            None if size == 1 => "127.0.0.1".into(),
            None => {
                return Err(DistributedError::Environment {
                    variable: "MASTER_ADDR".into(),
                    expected: "the machine of rank 0",
                    actual: "nothing".into(),
                });
            }
        };
        // torchrun's agent keeps a store on the port itself.
        let is_taken = self.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let port = self.port()?.unwrap_or(DEFAULT_PORT).saturating_add(u16::from(is_taken));
        Ok(World {
            rank,
            size,
            local_rank: self.number_if_set("LOCAL_RANK")?,
            address,
            port,
            job: self.text("TORCHELASTIC_RUN_ID").unwrap_or_default(),
            launcher: Launcher::Torch,
        })
    }

    fn slurm(&self) -> Result<World, DistributedError> {
        let job = format!(
            "slurm {}.{}",
            self.text("SLURM_JOB_ID").unwrap_or_default(),
            self.text("SLURM_STEP_ID").unwrap_or_default()
        );
        let nodes = self.text("SLURM_STEP_NODELIST").or_else(|| self.text("SLURM_JOB_NODELIST"));
        let size = self.number("SLURM_STEP_NUM_TASKS")?;
        let first = nodes.as_deref().and_then(first_node);
        let address = match self.text("MASTER_ADDR").or(first) {
            Some(address) => address,
            None if size == 1 => "127.0.0.1".into(),
            None => {
                return Err(DistributedError::Environment {
                    variable: "SLURM_STEP_NODELIST".into(),
                    expected: "a list of nodes, or MASTER_ADDR",
                    actual: nodes.unwrap_or_else(|| "nothing".into()),
                });
            }
        };
        Ok(World {
            rank: self.number("SLURM_PROCID")?,
            size,
            local_rank: self.number_if_set("SLURM_LOCALID")?,
            address,
            port: self.port()?.unwrap_or_else(|| port_of(&job)),
            job,
            launcher: Launcher::Slurm,
        })
    }

    fn open_mpi(&self) -> Result<World, DistributedError> {
        let job = self.text("PMIX_NAMESPACE").or_else(|| self.text("OMPI_MCA_ess_base_jobid"));
        let job = format!("mpirun {}", job.unwrap_or_default());
        let size = self.number("OMPI_COMM_WORLD_SIZE")?;
        let is_on_one_machine = self.number_if_set("OMPI_COMM_WORLD_LOCAL_SIZE")? == Some(size);
        let address = match self.text("MASTER_ADDR") {
            Some(address) => address,
            None if is_on_one_machine => "127.0.0.1".into(),
            None => {
                return Err(DistributedError::Environment {
                    variable: "MASTER_ADDR".into(),
                    expected: "the machine of rank 0, since ranks are on several: pass it by \
                               `mpirun -x MASTER_ADDR=...`",
                    actual: format!("nothing (this is {})", gethostname().to_string_lossy()),
                });
            }
        };
        Ok(World {
            rank: self.number("OMPI_COMM_WORLD_RANK")?,
            size,
            local_rank: self.number_if_set("OMPI_COMM_WORLD_LOCAL_RANK")?,
            address,
            port: self.port()?.unwrap_or_else(|| port_of(&job)),
            job,
            launcher: Launcher::OpenMpi,
        })
    }
}

/// A port that jobs on one machine seldom have in common.
fn port_of(job: &str) -> u16 {
    let mut hasher = DefaultHasher::new();
    job.hash(&mut hasher);
    let (first, count) = JOB_PORTS;
    first + (hasher.finish() % u64::from(count)) as u16
}

/// The first of Slurm's list of nodes: `gpu[03-07,9],login` begins with `gpu03`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let node = match rest.strip_prefix('[') {
        None => name.to_owned(),
        Some(ranges) => {
            let digits = ranges.split(|c: char| !c.is_ascii_digit()).next()?;
            if digits.is_empty() {
                return None;
            }
            // What follows the brackets belongs to the name, and may have brackets of its own.
            let suffix = ranges.split_once(']')?.1;
            let suffix = match suffix.starts_with(',') {
                true => String::new(),
                false => first_node(suffix).unwrap_or_default(),
            };
            format!("{name}{digits}{suffix}")
        }
    };
    (!node.is_empty()).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn world(variables: &[(&str, &str)]) -> Result<World, DistributedError> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        World::from_variables(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn without_a_launcher_a_process_is_alone() {
        assert_eq!(world(&[]).expect("nothing is wrong"), World::alone());
        // A batch script of Slurm's is one process.
        let batch = [("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
        assert_eq!(world(&batch).expect("nothing is wrong").size, 1);
    }

    #[test]
    fn torchruns_agent_keeps_its_port() {
        let variables = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node-a"),
            ("MASTER_PORT", "29511"),
            ("TORCHELASTIC_RUN_ID", "none"),
        ];
        let plain = world(&variables).expect("all are there");
        assert_eq!((plain.rank, plain.size, plain.local_rank), (3, 4, Some(1)));
        assert_eq!((plain.address.as_str(), plain.port), ("node-a", 29511));
        let mut agent = variables.to_vec();
        agent.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert_eq!(world(&agent).expect("all are there").port, 29512);
    }

    #[test]
    fn kubernetes_says_nothing_of_local_ranks() {
        let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "job-master-0")];
        let world = world(&variables).expect("enough is there");
        assert_eq!((world.local_rank, world.port), (None, DEFAULT_PORT));
    }

    #[test]
    fn slurms_first_node_has_rank_0() {
        let variables = [
            ("SLURM_PROCID", "5"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[03-04,09]"),
        ];
        let five = world(&variables).expect("all are there");
        assert_eq!((five.address.as_str(), five.rank), ("gpu03", 5));
        let (first, count) = JOB_PORTS;
        assert!((first..first + count).contains(&five.port));
    }

    #[test]
    fn lists_of_nodes_are_read() {
        for (list, first) in [
            ("n1", Some("n1")),
            ("n1,n2", Some("n1")),
            ("gpu[3,5-7]", Some("gpu3")),
            ("a[001-100]-ib,b", Some("a001-ib")),
            ("r[1-2]n[3-4],x", Some("r1n3")),
            ("[1-2]", Some("1")),
            ("gpu[", None),
            ("", None),
        ] {
            assert_eq!(first_node(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn mpirun_on_one_machine_needs_no_address() {
        let mut variables = vec![
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "12"),
        ];
        assert_eq!(world(&variables).expect("one machine").address, "127.0.0.1");
        variables[3].1 = "1";
        let message = world(&variables).expect_err("two machines").to_string();
        assert!(message.contains("MASTER_ADDR"), "{message}");
        variables.push(("MASTER_ADDR", "10.0.0.1"));
        assert_eq!(world(&variables).expect("the address is given").address, "10.0.0.1");
    }

    #[test]
    fn variables_that_make_no_sense_are_named() {
        let torch = |rank, size, port| {
            let variables = [
                ("RANK", rank),
                ("WORLD_SIZE", size),
                ("MASTER_ADDR", "localhost"),
                ("MASTER_PORT", port),
            ];
            world(&variables).expect_err("one is wrong").to_string()
        };
        for (message, expected) in [
            (torch("2", "2", "1"), "RANK: expected a rank below the number of ranks, got 2 of 2"),
            (torch("0", "0", "1"), "WORLD_SIZE: expected at least 1, got 0"),
            (torch("-1", "2", "1"), "RANK: expected a number of at least 0, got -1"),
            (torch("0", "2", "70000"), "MASTER_PORT: expected a port from 1 to 65535, got 70000"),
            (torch("0", "", "1"), "WORLD_SIZE: expected a number"),
        ] {
            assert!(message.contains(expected), "{message}");
        }
        let message = world(&[("RANK", "1"), ("WORLD_SIZE", "2")]).expect_err("no address");
        assert!(message.to_string().contains("MASTER_ADDR: expected the machine of rank 0"));
    }
}
