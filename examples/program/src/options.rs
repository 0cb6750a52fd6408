//! Options of a run by name.

/// Those that were given and are not what the checkpoint `saved`, each with both values.
pub fn differences(given: &[(&str, Option<String>)], saved: &[(&str, String)]) -> Vec<String> {
    let differs = |(option, given): &(&str, Option<String>)| {
        let given = given.as_ref()?;
        let (_, saved) = saved.iter().find(|(name, saved)| name == option && saved != given)?;
        Some(format!("{option} {given} (the checkpoint has {saved})"))
    };
    given.iter().filter_map(differs).collect()
}

/// The value of an option that need not be given.
pub fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "none".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_is_compared_with_the_option_of_its_name() {
        let given = [("--a", None), ("--b", Some("2".into())), ("--c", Some("3".into()))];
        let saved = [("--c", "4".into()), ("--b", "2".into()), ("--a", "1".into())];
        assert_eq!(differences(&given, &saved), ["--c 3 (the checkpoint has 4)"]);
    }
}
