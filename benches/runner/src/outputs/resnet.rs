//! The sentences of `resnet speed`.

use crate::row::{OURS, Row};

/// One row, if the program came to its end.
pub(super) fn read(stdout: &str) -> Vec<Row> {
    let Some(mut row) = stdout.lines().find_map(sentence) else { return Vec::new() };
    let told = |name: &str| stdout.lines().find_map(|line| line.strip_prefix(name));
    if let Some(passes) = told("passes: ") {
        row.add_note(&format!("passes {passes}"));
    }
    if let Some(memory) = told("memory: ") {
        row.add_note(memory);
    }
    vec![row]
}

/// `ResNet-50 in bf16, 64 images of 224 pixels: 15.32 ms a step (15.24 to 15.40), 4180 images/s`, where `, modules
/// unmodified` may stand behind the type.
fn sentence(line: &str) -> Option<Row> {
    let (network, rest) = line.strip_prefix("ResNet-")?.split_once(" in ")?;
    let (how, figures) = rest.split_once(": ")?;
    let (dtype, how) = how.split_once(", ")?;
    let how_many = how.strip_prefix("modules unmodified, ");
    let is_unmodified = how_many.is_some();
    let (images, _) = how_many.unwrap_or(how).split_once(" images of ")?;
    let (median, rest) = figures.split_once(" ms a step (")?;
    let (least, rest) = rest.split_once(" to ")?;
    let (most, rest) = rest.split_once("), ")?;
    let rate = rest.strip_suffix(" images/s")?;
    let suffix = if is_unmodified { " unmodified" } else { "" };
    let nn = if is_unmodified { "burn::nn" } else { "blackburn::nn::vision" };
    let shape = format!("B{images}{suffix}");
    let mut row = Row::blank(&format!("resnet{network}"), "step", dtype, &shape, OURS);
    [row.median_ms, row.min_ms, row.max_ms, row.metric] =
        [median, least, most, rate].map(str::to_owned);
    row.unit = "images/s".into();
    row.note = format!("{nn}, SGD with f32 masters, random images");
    Some(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_one_row_with_passes_and_memory_in_its_note() {
        let text = "ResNet-50 in bf16, 64 images of 224 pixels: 15.32 ms a step (15.24 to 15.40), 4180 images/s\n\
            passes: recorded\nmemory: 3.22 GiB reserved\n";
        let row = &read(text)[0];
        assert_eq!(
            row.line().replace('\t', "|"),
            "-|-|resnet50|step|bf16|B64|blackburn|15.32|15.24|15.40|4180|images/s|blackburn::nn::vision, SGD with f32 \
             masters, random images; passes recorded; 3.22 GiB reserved"
        );
        let unmodified = text.replace("bf16, 64", "bf16, modules unmodified, 64");
        assert_eq!(read(&unmodified)[0].shape, "B64 unmodified");
    }

    #[test]
    fn a_run_that_was_cut_off_is_no_row() {
        assert_eq!(read("ResNet-50 in bf16, 64 images of 224 pixels: 15.3"), []);
        assert_eq!(read(""), []);
    }
}
