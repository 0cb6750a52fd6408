//! What a row's computation costs: operations and bytes, by its shape.

use crate::row::Row;

/// What has to be computed and moved at least: each tensor once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Additions, multiplications and what else counts as one.
    pub flops: f64,
    /// Read and written.
    pub bytes: f64,
    /// What it is.
    pub kind: Kind,
}

/// What is alike in a roofline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Matrix products.
    Product,
    /// Attention.
    Attention,
    /// Convolutions.
    Convolution,
    /// Norms and softmax, along rows.
    Rows,
}

/// Operations of an element of norms and softmax. Layer norm forward: one of the mean, three of the variance, two to
/// normalize, two for scale and shift; backward: two to normalize again, one for the scale, three for both sums of
/// the row, four for the gradient, three for those of scale and shift. Softmax forward: a comparison, a difference, an
/// exponential, an addition, a quotient; backward: two for the sum of the row, two for the gradient.
const PER_ELEMENT: [(&str, &str, f64); 6] = [
    ("layer_norm", "forward", 8.0),
    ("layer_norm", "forward_backward", 21.0),
    ("group_norm", "forward", 8.0),
    ("group_norm", "forward_backward", 21.0),
    ("softmax", "forward", 5.0),
    ("softmax", "backward", 4.0),
];

/// Of a row whose op and shape say it; bytes of norms by the row's own rate.
pub fn of(row: &Row) -> Option<Work> {
    match row.op.as_str() {
        "matmul" | "linear" => product(row),
        "attention" => attention(row),
        "conv2d" => convolution(row),
        _ => rows(row),
    }
}

/// Bytes of an element of operands and of the result.
fn sizes(dtype: &str) -> Option<(f64, f64)> {
    Some(match dtype {
        "f32" | "tf32" => (4.0, 4.0),
        "f16" | "bf16" => (2.0, 2.0),
        // Into bf16.
        "fp8" | "e4m3" => (1.0, 2.0),
        _ => return None,
    })
}

/// `MxKxN`.
fn product(row: &Row) -> Option<Work> {
    let dims = dims(&row.shape)?;
    let [m, k, n] = dims[..] else { return None };
    let (operand, result) = sizes(&row.dtype)?;
    Some(Work {
        flops: 2.0 * m * k * n,
        bytes: operand * (m * k + k * n) + result * m * n,
        kind: Kind::Product,
    })
}

/// `8192x768` as its numbers.
fn dims(shape: &str) -> Option<Vec<f64>> {
    shape.split('x').map(|size| size.parse().ok().filter(|size| *size > 0.0)).collect()
}

/// The number behind each letter or word of `names`, in `B4H16Q4096K4096D128`.
fn letters<const N: usize>(shape: &str, names: [&str; N]) -> Option<[f64; N]> {
    let mut found = [0.0; N];
    let mut rest = shape;
    for (name, found) in names.into_iter().zip(&mut found) {
        rest = rest.strip_prefix(name)?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        *found = rest[..end].parse().ok().filter(|size| *size > 0.0)?;
        rest = &rest[end..];
    }
    rest.is_empty().then_some(found)
}

/// `B4H16Q4096K4096D128 causal`: 4 B H Q K D forward, half of it when causal, 2.5 times as much backward.
fn attention(row: &Row) -> Option<Work> {
    let (sizes_of, share) = match row.shape.strip_suffix(" causal") {
        Some(sizes) => (sizes, 0.5),
        None => (row.shape.as_str(), 1.0),
    };
    let [b, h, q, k, d] = letters(sizes_of, ["B", "H", "Q", "K", "D"])?;
    // q, out and their gradients; k, v and theirs. Backward reads what forward read and wrote, and dout.
    let (passes, of_q, of_kv) = match row.pass.as_str() {
        "forward" => (1.0, 2.0, 2.0),
        "backward" => (2.5, 4.0, 4.0),
        "forward_backward" => (3.5, 6.0, 6.0),
        _ => return None,
    };
    let (size, _) = sizes(&row.dtype)?;
    Some(Work {
        flops: 4.0 * b * h * q * k * d * share * passes,
        bytes: size * b * h * d * (of_q * q + of_kv * k),
        kind: Kind::Attention,
    })
}

/// `N64C256H14W14K256R3S3 stride1`, and `groups32` behind it.
fn convolution(row: &Row) -> Option<Work> {
    let mut words = row.shape.split(' ');
    let names = ["N", "C", "H", "W", "K", "R", "S"];
    let [n, c, h, w, k, r, s] = letters(words.next()?, names)?;
    let (mut stride, mut groups) = (1.0, 1.0);
    for word in words {
        if let Some([value]) = letters(word, ["stride"]) {
            stride = value;
        } else {
            [groups] = letters(word, ["groups"])?;
        }
    }
    // Padding keeps the size.
    let out = |size: f64, kernel: f64| {
        ((size + 2.0 * ((kernel - 1.0) / 2.0).floor() - kernel) / stride).floor() + 1.0
    };
    let (p, q) = (out(h, r), out(w, s));
    let (size, _) = sizes(&row.dtype)?;
    Some(Work {
        flops: 2.0 * n * p * q * k * c / groups * r * s,
        bytes: size * (n * c * h * w + k * c / groups * r * s + n * k * p * q),
        kind: Kind::Convolution,
    })
}

fn rows(row: &Row) -> Option<Work> {
    let (_, _, each) =
        PER_ELEMENT.iter().find(|(op, pass, _)| *op == row.op && *pass == row.pass)?;
    let dims = dims(row.shape.split(' ').next()?)?;
    let rate = row.rate().filter(|_| row.unit == "GB/s")?;
    Some(Work {
        flops: each * dims.iter().product::<f64>(),
        bytes: rate * row.median()? * 1e6,
        kind: Kind::Rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::tests::row;

    fn work(op: &str, pass: &str, dtype: &str, shape: &str) -> Option<(f64, f64)> {
        let row = row([op, pass, dtype, shape, "blackburn", "2.0", "100", "GB/s", ""]);
        of(&row).map(|work| (work.flops, work.bytes))
    }

    #[test]
    fn products_count_each_operand_once_in_its_size() {
        assert_eq!(work("matmul", "forward", "bf16", "2x3x5"), Some((60.0, 2.0 * 31.0)));
        assert_eq!(work("matmul", "forward", "e4m3", "2x3x5"), Some((60.0, 21.0 + 20.0)));
        assert_eq!(work("matmul", "forward", "bf16", "M1N50257K768"), None);
        assert_eq!(work("matmul", "forward", "e2m1", "2x3x5"), None);
    }

    #[test]
    fn attention_is_halved_when_causal_and_other_words_are_not_known() {
        let flops = 4.0 * 4.0 * 16.0 * 64.0 * 32.0 * 8.0;
        let bytes = 2.0 * 4.0 * 16.0 * 8.0 * (2.0 * 64.0 + 2.0 * 32.0);
        let shape = "B4H16Q64K32D8";
        assert_eq!(work("attention", "forward", "bf16", shape), Some((flops, bytes)));
        let causal = format!("{shape} causal");
        let both = work("attention", "forward_backward", "f16", &causal);
        assert_eq!(both, Some((flops * 0.5 * 3.5, bytes * 3.0)));
        assert_eq!(work("attention", "forward", "bf16", &format!("{shape} packed")), None);
        assert_eq!(work("attention", "decode", "bf16", shape), None);
    }

    #[test]
    fn convolutions_count_taps_strides_and_groups() {
        let dense = work("conv2d", "fprop", "bf16", "N2C4H8W8K6R3S3 stride2");
        let (pixels, taps) = (2.0 * 16.0, 9.0);
        let bytes = 2.0 * (2.0 * 4.0 * 64.0 + 6.0 * 4.0 * taps + pixels * 6.0);
        assert_eq!(dense, Some((2.0 * pixels * 6.0 * 4.0 * taps, bytes)));
        let (flops, _) = work("conv2d", "fprop", "bf16", "N2C4H8W8K6R3S3 stride2 groups2").unwrap();
        assert_eq!(flops, dense.unwrap().0 / 2.0);
        assert_eq!(work("conv2d", "fprop", "bf16", "N2C4H8W8K6R3S3 dilated"), None);
    }

    #[test]
    fn bytes_of_norms_are_those_of_their_rate() {
        // 100 GB/s for 2 ms.
        assert_eq!(work("layer_norm", "forward", "bf16", "10x20"), Some((1600.0, 2e8)));
        assert_eq!(work("sum", "forward", "bf16", "10x20"), None);
    }
}
