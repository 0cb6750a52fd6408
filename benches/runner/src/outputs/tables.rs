//! Tables of sweeps and of PyTorch's scripts: fields between tabs, with a header or with columns that are known.

use crate::row::{OURS, Row};

/// The lines of a table with a header, as far as each goes.
struct Lines<'a> {
    header: Vec<&'a str>,
    lines: Vec<Vec<&'a str>>,
    /// Of PyTorch, which stands in a comment.
    version: &'a str,
}

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Self {
        let comment = text.lines().find_map(|line| line.strip_prefix("# torch "));
        let version = comment.and_then(|rest| rest.split(',').next()).unwrap_or("PyTorch");
        let mut lines = text
            .lines()
            .filter(|line| !line.starts_with('#') && line.contains('\t'))
            .map(|line| line.split('\t').collect::<Vec<_>>());
        let header = lines.next().unwrap_or_default();
        Self { header, lines: lines.collect(), version }
    }

    fn field(&self, line: &[&'a str], column: &str) -> &'a str {
        let place = self.header.iter().position(|name| *name == column);
        place.and_then(|place| line.get(place).copied()).unwrap_or_default()
    }

    /// Times and TFLOP/s of a line that has them all; otherwise its last field is the reason why not.
    fn fill(&self, line: &[&str], row: &mut Row) {
        let fields =
            ["median_ms", "min_ms", "max_ms", "TFLOP/s"].map(|name| self.field(line, name));
        row.unit = "TFLOP/s".into();
        if fields.iter().all(|field| field.parse::<f64>().is_ok()) {
            [row.median_ms, row.min_ms, row.max_ms, row.metric] = fields.map(str::to_owned);
        } else {
            row.add_note(&format!("failed: {}", line.last().unwrap_or(&"")));
        }
    }
}

pub(super) fn matmul(text: &str) -> Vec<Row> {
    products(text, OURS)
}

pub(super) fn torch_matmul(text: &str) -> Vec<Row> {
    products(text, "torch")
}

fn products(text: &str, subject: &str) -> Vec<Row> {
    let table = Lines::of(text);
    let row = |line: &Vec<&str>| {
        let field = |column| table.field(line, column);
        let dtype = field("dtype").to_lowercase();
        let mut row = Row::blank("matmul", "forward", &dtype, field("shape"), subject);
        row.note = format!("{}; {}", field("name"), field("layout"));
        row.add_note(if subject == OURS { field("plan") } else { table.version });
        table.fill(line, &mut row);
        row
    };
    // A line that was cut off in its name has nothing to tell.
    table.lines.iter().filter(|line| line.len() > 4).map(row).collect()
}

pub(super) fn attention(text: &str) -> Vec<Row> {
    let table = Lines::of(text);
    let row = |line: &Vec<&str>| {
        let field = |column| table.field(line, column);
        let [pass, dtype] = ["pass", "dtype"].map(|column| field(column).to_lowercase());
        let mut row = Row::blank("attention", &pass, &dtype, field("shape"), OURS);
        row.note = field("plan").into();
        table.fill(line, &mut row);
        row
    };
    table.lines.iter().filter(|line| line.len() > 6).map(row).collect()
}

pub(super) fn torch_attention(text: &str) -> Vec<Row> {
    let table = Lines::of(text);
    let mut rows: Vec<Row> = Vec::new();
    for line in table.lines.iter().filter(|line| line.len() == table.header.len()) {
        let field = |column| table.field(line, column);
        let pass = match field("pass") {
            "Both" => "forward_backward".to_owned(),
            other => other.to_lowercase(),
        };
        let mut row = Row::blank("attention", &pass, field("dtype"), field("shape"), "torch");
        row.note = format!("{}; {}", table.version, field("backend"));
        table.fill(line, &mut row);
        match rows.iter_mut().find(|other| other.key() == row.key()) {
            None => rows.push(row),
            Some(other) if row.median() < other.median() => *other = row,
            Some(_) => {}
        }
    }
    rows
}

/// Op, pass, shape, subject, three times and GB/s. All are in bf16, unless the shape ends in a type of PyTorch's.
pub(super) fn memory(text: &str) -> Vec<Row> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [op, pass, shape, subject, median, least, most, rate] = fields[..] else {
            return None;
        };
        let (shape, dtype) = match shape.rsplit_once(' ') {
            Some((shape, "float32")) => (shape, "f32"),
            Some((shape, "bfloat16")) => (shape, "bf16"),
            _ if op == "adamw" || op == "sgd" => (shape, "f32"),
            _ => (shape, "bf16"),
        };
        let mut row = Row::blank(op, pass, dtype, shape, subject);
        [row.median_ms, row.min_ms, row.max_ms, row.metric] =
            [median, least, most, rate].map(str::to_owned);
        row.unit = "GB/s".into();
        row.note = "torch_memory.py".into();
        Some(row)
    };
    text.lines().filter(|line| !line.starts_with('#')).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rows: &[Row]) -> Vec<String> {
        rows.iter().map(|row| row.line().replace('\t', "|")).collect()
    }

    #[test]
    fn products_have_their_layout_and_plan_in_the_note() {
        let text = "dtype\tname\tshape\tlayout\tpicked\tplan\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tworst_error_in_bounds\n\
            Bf16\tsquare 512, NN\t512x512x512\tNN\t*\tWgmma 128x64\t0.0100\t0.0090\t0.0110\t26.8\t0.120\n\
            Bf16\tsquare 513, NT\t513x513x513\tNT\t*\tMma 64x64\tWRONG: element 7 is NaN\n\
            Bf16\todd\t1x1x1\tNT\t-\tno kernel takes it\n\
            Bf16\tsquare 1024, ";
        assert_eq!(
            lines(&matmul(text)),
            [
                "-|-|matmul|forward|bf16|512x512x512|blackburn|0.0100|0.0090|0.0110|26.8|TFLOP/s|square 512, NN; NN; Wgmma 128x64",
                "-|-|matmul|forward|bf16|513x513x513|blackburn|-|-|-|-|TFLOP/s|square 513, NT; NT; Mma 64x64; failed: WRONG: element 7 is NaN",
                "-|-|matmul|forward|bf16|1x1x1|blackburn|-|-|-|-|TFLOP/s|odd; NT; no kernel takes it; failed: no kernel takes it",
            ]
        );
        let text = "# torch 2.11.0+cu130, CUDA 13.0, NVIDIA H100\ndtype\tname\tshape\tlayout\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\n\
            bf16\tsquare 512, NN\t512x512x512\tNN\t0.0100\t0.0090\t0.0110\t26.8\n";
        assert_eq!(
            lines(&torch_matmul(text)),
            [
                "-|-|matmul|forward|bf16|512x512x512|torch|0.0100|0.0090|0.0110|26.8|TFLOP/s|square 512, NN; NN; 2.11.0+cu130"
            ]
        );
    }

    #[test]
    fn attention_is_compared_with_the_fastest_backend() {
        let text = "dtype\tname\tshape\tpass\tpicked\tplan\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tdistance\n\
            Bf16\t4096, heads of 64\tB4H16Q4096K4096D64\tBackward\t*\tWgmma 128x128\t2.0\t1.9\t2.1\t550.0\t0.0021\n";
        assert_eq!(
            lines(&attention(text)),
            [
                "-|-|attention|backward|bf16|B4H16Q4096K4096D64|blackburn|2.0|1.9|2.1|550.0|TFLOP/s|Wgmma 128x128"
            ]
        );
        let text = "# torch 2.11.0+cu130, CUDA 13.0, NVIDIA H100\n\
            dtype\tname\tshape\tpass\tbackend\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tpeak_MiB\n\
            bf16\tx\tQ1\tBoth\tcudnn\t3.0\t2.9\t3.1\t400.0\t5\n\
            bf16\tx\tQ1\tBoth\tflash\t2.0\t1.9\t2.1\t600.0\t5\n\
            bf16\tx\tQ1\tBoth\tefficient\t4.0\t3.9\t4.1\t300.0\t5\n\
            bf16\tx\tQ1\tForw";
        assert_eq!(
            lines(&torch_attention(text)),
            [
                "-|-|attention|forward_backward|bf16|Q1|torch|2.0|1.9|2.1|600.0|TFLOP/s|2.11.0+cu130; flash"
            ]
        );
    }

    #[test]
    fn what_memory_bounds_has_its_type_in_the_shape_or_none() {
        let text = "softmax\tforward\t8x8\ttorch-compile\t0.1\t0.1\t0.2\t900\n\
            pool\tforward\tmax2x2by2 8x8 float32\ttorch\t0.1\t0.1\t0.2\t900\n# peak\nsgd\tst";
        assert_eq!(
            lines(&memory(text)),
            [
                "-|-|softmax|forward|bf16|8x8|torch-compile|0.1|0.1|0.2|900|GB/s|torch_memory.py",
                "-|-|pool|forward|f32|max2x2by2 8x8|torch|0.1|0.1|0.2|900|GB/s|torch_memory.py",
            ]
        );
    }
}
