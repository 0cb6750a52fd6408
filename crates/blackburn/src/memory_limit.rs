use crate::Error;
use serde::Serialize;
use std::{fmt, str::FromStr};

/// How much of a device's memory the program may take: [`Config::memory_limit`](crate::Config::memory_limit).
///
/// As text: `40GiB`, `512 MiB`, `1.5GB`, a plain number of bytes, or a share of the device's memory, `75%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MemoryLimit {
    /// So many bytes, at least 1.
    Bytes(u64),
    /// So many percent of the memory that the device has, from 1 to 100.
    Percent(u8),
}

/// The units that a limit may be written in. Powers of 1000 and of 1024 have names of their own.
const UNITS: [(&str, u64); 9] = [
    ("b", 1),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
];

impl MemoryLimit {
    /// The limit on a device of so many bytes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if it is a share, and the device does not tell what it has; and if it is not more than
    /// 0, or more than all.
    pub fn bytes_of(self, device_bytes: Option<u64>) -> Result<u64, Error> {
        let refused = |reason: &str| {
            Err(Error::InvalidSetting {
                setting: format!("memory_limit={self}"),
                reason: reason.into(),
            })
        };
        match (self, device_bytes) {
            (Self::Bytes(0), _) => refused("expected at least 1 byte"),
            (Self::Bytes(bytes), _) => Ok(bytes),
            (Self::Percent(0 | 101..), _) => refused("expected 1 to 100 percent"),
            (Self::Percent(percent), Some(all)) => {
                // In 128 bits, since the product of a large number may not fit 64.
                Ok((u128::from(all) * u128::from(percent) / 100) as u64)
            }
            (Self::Percent(_), None) => refused(
                "this device does not tell how much memory it has; expected bytes, such as 40GiB",
            ),
        }
    }
}

impl From<u64> for MemoryLimit {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl FromStr for MemoryLimit {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self, Error> {
        parse(given.trim()).ok_or_else(|| Error::InvalidSetting {
            setting: format!("memory_limit={given}"),
            reason: "expected bytes, such as 40GiB, 1.5 GB or 42949672960, or a share of the device's memory from 1% to \
                     100%"
                .into(),
        })
    }
}

fn parse(given: &str) -> Option<MemoryLimit> {
    if let Some(percent) = given.strip_suffix('%') {
        let percent = percent.trim_end().parse().ok()?;
        return (1..=100).contains(&percent).then_some(MemoryLimit::Percent(percent));
    }
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    let (number, unit) = match given.find(|c| !is_of_number(c)) {
        Some(end) => given.split_at(end),
        None => (given, "b"),
    };
    let unit = unit.trim_start().to_ascii_lowercase();
    let (_, unit) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit)?,
        // Half a byte is a slip; half a GiB is not. Out of range, the cast gives the largest number.
        Err(_) if unit > 1 => (number.parse::<f64>().ok()? * unit as f64) as u64,
        Err(_) => return None,
    };
    (bytes > 0 && bytes < u64::MAX).then_some(MemoryLimit::Bytes(bytes))
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => {
                let whole = UNITS.into_iter().filter(|(name, _)| name.ends_with("ib")).rev();
                match whole.into_iter().find(|(_, unit)| bytes > 0 && bytes % unit == 0) {
                    // As they are written: `kib` is KiB.
                    Some((name, unit)) => {
                        write!(f, "{}{}iB", bytes / unit, name[..1].to_ascii_uppercase())
                    }
                    None => write!(f, "{bytes}B"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(given: &str) -> Option<u64> {
        match given.parse().ok()? {
            MemoryLimit::Bytes(bytes) => Some(bytes),
            MemoryLimit::Percent(_) => None,
        }
    }

    #[test]
    fn bytes_are_read_in_every_unit() {
        assert_eq!(bytes("42949672960"), Some(40 << 30));
        assert_eq!(bytes("40GiB"), Some(40 << 30));
        assert_eq!(bytes(" 40 gib "), Some(40 << 30));
        assert_eq!(bytes("40GB"), Some(40_000_000_000));
        assert_eq!(bytes("1.5KiB"), Some(1536));
        assert_eq!(bytes("7B"), Some(7));
    }

    #[test]
    fn what_means_nothing_is_refused_with_what_would() {
        let wrong = [
            "",
            "lots",
            "-1GiB",
            "0",
            "0GiB",
            "1.5",
            "1.5B",
            "40 Gi",
            "40GiBs",
            "1..5GiB",
            "0%",
            "101%",
            "256%",
            "7.5%",
            "%",
            "99999999999999999999",
            "99999999TiB",
        ];
        for given in wrong {
            let error = given.parse::<MemoryLimit>().expect_err(given).to_string();
            assert!(error.starts_with(&format!("memory_limit={given}: expected bytes")), "{error}");
        }
    }

    #[test]
    fn a_limit_is_written_as_it_is_read() {
        for given in ["75%", "40GiB", "512MiB", "3KiB", "1000B"] {
            assert_eq!(given.parse::<MemoryLimit>().unwrap().to_string(), given);
        }
    }

    #[test]
    fn a_share_is_of_the_device() {
        let share = MemoryLimit::Percent(75);
        assert_eq!(share.bytes_of(Some(80 << 30)).unwrap(), 60 << 30);
        assert_eq!(MemoryLimit::Bytes(5).bytes_of(None).unwrap(), 5);
        let error = share.bytes_of(None).unwrap_err().to_string();
        assert!(error.contains("memory_limit=75%") && error.contains("40GiB"), "{error}");
        for wrong in [MemoryLimit::Percent(0), MemoryLimit::Percent(101), MemoryLimit::Bytes(0)] {
            assert!(wrong.bytes_of(Some(1)).is_err(), "{wrong}");
        }
    }
}
