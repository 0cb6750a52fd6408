//! How a number is written.

/// How a number is written: `410k`, `1,541`, `0.32`.
pub struct Form {
    decimals: usize,
    is_thousands: bool,
    has_commas: bool,
}

impl Form {
    /// That of a number that somebody wrote.
    pub fn of(shown: &str) -> Option<Self> {
        let digits = shown.strip_suffix('k').unwrap_or(shown);
        let number: f64 = digits.replace(',', "").parse().ok()?;
        Some(Self {
            decimals: digits.split_once('.').map_or(0, |(_, decimals)| decimals.len()),
            is_thousands: digits.len() < shown.len(),
            has_commas: digits.contains(',') || number < 1000.0,
        })
    }

    /// Whether `shown` is `number`, rounded to the digits that it has.
    pub fn fits(&self, shown: &str, number: f64) -> bool {
        let digits = shown.trim_end_matches('k').replace(',', "");
        let Ok(shown) = digits.parse::<f64>() else { return false };
        let unit = 10f64.powi(-(self.decimals as i32));
        let number = if self.is_thousands { number / 1e3 } else { number };
        // A half may be rounded either way.
        (shown - number).abs() <= 0.5 * unit + 1e-9 * number.abs()
    }

    /// `number` in this form.
    pub fn write(&self, number: f64) -> String {
        let number = if self.is_thousands { number / 1e3 } else { number };
        let mut written = format!("{number:.*}", self.decimals);
        if self.has_commas {
            let whole = written.find('.').unwrap_or(written.len());
            for at in (1..whole).rev().filter(|at| (whole - at) % 3 == 0) {
                written.insert(at, ',');
            }
        }
        written + if self.is_thousands { "k" } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_form() {
        for (shown, number, written) in [
            ("410k", 427_499.0, "427k"),
            ("1,541", 2_036.6, "2,037"),
            ("1541", 2_036.6, "2037"),
            ("0.32", 1.0 / 3.0, "0.33"),
            ("900", 1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(Form::of(shown).unwrap().write(number), written);
        }
        assert!(Form::of("0.5").unwrap().fits("0.5", 0.45));
        assert!(!Form::of("0.50").unwrap().fits("0.50", 0.49));
    }
}
