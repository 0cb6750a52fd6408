//! What was found, as people read it.

use super::{Examination, Tuned};
use crate::verdicts::{Found, Kept};
use std::{collections::BTreeMap, fmt};

/// What was seen of a group that is not well, in a line or a few.
pub(super) fn finding(kept: &Kept) -> String {
    let how = match kept.found {
        Found::Passed => "passed",
        Found::NotOffered => "not offered",
        Found::Wrong => "WRONG",
        Found::Crashed => "CRASHED",
        Found::Hung => "HUNG",
        Found::Broken => "BROKEN",
    };
    match kept.note.as_str() {
        "" => how.into(),
        note => format!("{how}: {note}"),
    }
}

/// A row for each operation and family, a column for each type.
struct Table<'a>(&'a BTreeMap<String, Kept>);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const TYPES: [&str; 3] = ["f32", "f16", "bf16"];
        let mut rows: Vec<(&str, BTreeMap<&str, &Kept>)> = Vec::new();
        for (name, kept) in self.0 {
            let Some((row, dtype)) = name.rsplit_once('/') else { continue };
            match rows.iter_mut().find(|(known, _)| *known == row) {
                Some((_, columns)) => drop(columns.insert(dtype, kept)),
                None => rows.push((row, [(dtype, kept)].into())),
            }
        }
        writeln!(f, "| kernels | {} |", TYPES.join(" | "))?;
        writeln!(f, "|---|---|---|---|")?;
        for (row, columns) in rows {
            // A family that the device lacks is no news.
            if columns.values().all(|kept| kept.found == Found::NotOffered) {
                continue;
            }
            write!(f, "| {row} |")?;
            for dtype in TYPES {
                let told = columns.get(dtype).map_or("", |kept| match kept.found {
                    Found::Passed => "passed",
                    Found::NotOffered => "-",
                    Found::Wrong => "**wrong**",
                    Found::Crashed => "**crashed**",
                    Found::Hung => "**hung**",
                    Found::Broken => "**broken**",
                });
                write!(f, " {told} |")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// What measured plans of products gained over those that the model would have chosen.
struct Gains<'a>(&'a [Tuned]);

impl fmt::Display for Gains<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        let changed: Vec<_> = self.0.iter().filter(|it| it.us < it.model_us).collect();
        let sum = |time: fn(&Tuned) -> f64| -> f64 { self.0.iter().map(time).sum() };
        let gain = 100.0 * (1.0 - sum(|it| it.us) / sum(|it| it.model_us));
        writeln!(
            f,
            "\n{} plans of products are kept; {} are not the model's; all products together take {gain:.1} % less",
            self.0.len(),
            changed.len()
        )?;
        for it in changed {
            let Tuned { kept_under, plan, us, model_us } = it;
            writeln!(f, "{kept_under}: {plan}, {us:.1} us instead of {model_us:.1}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Examination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdicts = &self.record.verdicts;
        let count = |found| verdicts.values().filter(|kept| kept.found == found).count();
        let [passed, lacking] = [Found::Passed, Found::NotOffered].map(count);
        let wrong = verdicts.len() - passed - lacking;
        let cases: usize = verdicts.values().map(|kept| kept.cases).sum();
        let elements: usize = verdicts.values().map(|kept| kept.elements).sum();
        let extent = if self.record.complete { "all cases" } else { "a part of the cases" };
        writeln!(f, "doctor on {}, {extent}, {:.0} s", self.device, self.took.as_secs_f64())?;
        writeln!(f, "{}", self.record.machine)?;
        writeln!(
            f,
            "{:<10} {passed} groups passed, {wrong} did not, {lacking} are not offered here; \
             {cases} cases, {elements} numbers compared\n",
            "result"
        )?;
        write!(f, "{}", Table(verdicts))?;
        write!(f, "{}", Gains(&self.products))?;
        for (name, kept) in verdicts.iter().filter(|(_, kept)| !kept.found.is_well()) {
            write!(f, "\n{name}: {}", finding(kept))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{machine::tests::ada, verdicts::Record};
    use std::time::Duration;

    #[test]
    fn the_block_has_the_machine_the_counts_a_table_and_what_is_wrong() {
        let kept = |found, note: &str| Kept {
            found,
            note: note.into(),
            cases: 3,
            elements: 50,
            worst: 0.25,
            seconds: 1.0,
        };
        let verdicts = [
            ("matmul/mma/bf16", kept(Found::Passed, "")),
            ("matmul/mma/f32", kept(Found::Hung, "case 2 began, and nothing came for 9 s")),
            ("matmul/wgmma/bf16", kept(Found::NotOffered, "no plan")),
            ("norm/portable/f16", kept(Found::Crashed, "signal: 6")),
        ];
        let verdicts = verdicts.map(|(name, kept)| (name.to_owned(), kept)).into();
        let plans = BTreeMap::new();
        let record = Record { machine: ada(), complete: false, ended: 0, verdicts, plans };
        let tuned = |us, model_us| Tuned {
            kept_under: "sm_89 m1 n2 k3".into(),
            plan: "mma 64x128".into(),
            us,
            model_us,
        };
        let products = vec![tuned(30.0, 40.0), tuned(60.0, 60.0)];
        let took = Duration::from_secs(61);
        let examination = Examination { device: "cuda:0".into(), record, products, took };
        assert!(!examination.is_well());
        let told = examination.to_string();
        for part in [
            "doctor on cuda:0, a part of the cases, 61 s",
            "RTX 4090, sm_89",
            "1 groups passed, 2 did not, 1 are not offered",
            "| matmul/mma | **hung** |  | passed |",
            "| norm/portable |  | **crashed** |  |",
            "matmul/mma/f32: HUNG: case 2 began",
            "2 plans of products are kept; 1 are not the model's; all products together take 10.0 % less",
            "sm_89 m1 n2 k3: mma 64x128, 30.0 us instead of 40.0",
        ] {
            assert!(told.contains(part), "{part}\n{told}");
        }
        assert!(!told.contains("wgmma"), "{told}");
    }
}
