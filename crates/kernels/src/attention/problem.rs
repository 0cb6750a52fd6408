use super::dropout::DIGITS;
use crate::KernelError;
use cubecl::ir::{ElemType, FloatKind};

pub(super) const OP: &str = "attention";

/// The widest heads that any kernel holds.
const MOST_HEAD_DIM: usize = 256;
/// A window as wide as any sequence: what is beyond it is not told apart.
pub(super) const UNBOUNDED: usize = 1 << 30;

/// Where rows of `head_dim` contiguous elements lie. Strides count elements; that of a dimension of
/// size 1 has no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadStrides {
    /// From one sequence to the next; 0 where sequences are packed.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one position to the next.
    pub row: usize,
}

/// How a contiguous tensor of heads is ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// Batch, head, position: what `[batch, heads, seq, head_dim]` says.
    #[default]
    HeadsFirst,
    /// Batch, position, head: the heads of a position side by side, as a linear layer before or
    /// behind attention has them.
    PositionsFirst,
}

impl Order {
    /// Strides of such a tensor.
    pub fn strides(self, heads: usize, seq: usize, head_dim: usize) -> HeadStrides {
        let batch = heads * seq * head_dim;
        match self {
            Self::HeadsFirst => HeadStrides { batch, head: seq * head_dim, row: head_dim },
            Self::PositionsFirst => HeadStrides { batch, head: head_dim, row: heads * head_dim },
        }
    }
}

/// Where the elements of a tensor of pairs lie, `[batch, heads_q, seq_q, seq_kv]`; a stride is 0
/// where one element serves a whole dimension.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pairs {
    /// From one sequence to the next.
    pub batch: usize,
    /// From one head to the next.
    pub head: usize,
    /// From one query to the next.
    pub row: usize,
    /// From one key to the next.
    pub column: usize,
}

/// Which keys a query sees, by its distance from the diagonal. Query i of `seq_q` stands at key
/// `i + seq_kv - seq_q`: the last query at the last key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Window {
    /// Keys before the query's own; `None` for all.
    pub left: Option<usize>,
    /// Keys behind it; `None` for all, 0 for causal attention.
    pub right: Option<usize>,
}

/// How many draws there are.
const DRAWS: f64 = (1u32 << DIGITS) as f64;

/// Weights are dropped with probability `rate`, rounded to a multiple of 2^-16, by a generator that backward runs again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// At least 0, below 1.
    pub rate: f64,
    /// The same seed drops the same weights.
    pub seed: u64,
}

impl Dropout {
    /// Nothing is dropped.
    pub(super) const NONE: Self = Self { rate: 0.0, seed: 0 };

    /// A draw below this is a weight dropped. A rate below 1 drops some, but never all.
    pub(super) fn threshold(self) -> u32 {
        ((self.rate * DRAWS).round() as u32).min(DRAWS as u32 - 1)
    }

    /// The share of weights that are kept. They are divided by it, so that their mean stays.
    pub(super) fn share_kept(self) -> f64 {
        (DRAWS - f64::from(self.threshold())) / DRAWS
    }
}

/// What attention is asked for. See the [module](super) for what it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Heads of keys and values; each serves `heads_q / heads_kv` neighbors among those of queries.
    pub heads_kv: usize,
    /// Queries of a sequence; of the longest, where they are packed.
    pub seq_q: usize,
    /// Keys of a sequence; of the longest, where they are packed.
    pub seq_kv: usize,
    /// Elements of a row of q, k, v and of the output.
    pub head_dim: usize,
    /// Element type of all four: f32, f16 or bf16.
    pub dtype: ElemType,
    /// Where the queries lie.
    pub q: HeadStrides,
    /// Where the keys lie.
    pub k: HeadStrides,
    /// Where the values lie.
    pub v: HeadStrides,
    /// How the output and the gradient of q are ordered.
    pub order_q: Order,
    /// How the gradients of k and v are ordered.
    pub order_kv: Order,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// Which keys a query sees.
    pub window: Window,
    /// Scores are bounded to plus and minus this, by a tanh.
    pub softcap: Option<f32>,
    /// Weights that are left out at random.
    pub dropout: Option<Dropout>,
    /// Where the mask lies, if there is one.
    pub mask: Option<Pairs>,
    /// Where the bias lies, if there is one.
    pub bias: Option<Pairs>,
    /// Sequences of different lengths follow each other in one: rows of q and of k and v in all.
    pub packed: Option<[usize; 2]>,
    /// Whether the same input has to give the same bits each time. Else plans may add up the gradient of q in
    /// any order ([`AttentionBlueprint::atomic`](super::AttentionBlueprint::atomic)).
    pub deterministic: bool,
    /// Whether products of f32 keep all bits. Else tensor cores may round their operands to TF32, which keeps 11 of 24.
    pub full_f32: bool,
}

impl AttentionProblem {
    /// Attention without options over contiguous tensors.
    pub fn dense(
        [batch, heads, seq_q, head_dim]: [usize; 4],
        seq_kv: usize,
        dtype: ElemType,
    ) -> Self {
        let rows = |seq| Order::HeadsFirst.strides(heads, seq, head_dim);
        Self {
            batch,
            heads_q: heads,
            heads_kv: heads,
            seq_q,
            seq_kv,
            head_dim,
            dtype,
            q: rows(seq_q),
            k: rows(seq_kv),
            v: rows(seq_kv),
            order_q: Order::default(),
            order_kv: Order::default(),
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: Window::default(),
            softcap: None,
            dropout: None,
            mask: None,
            bias: None,
            packed: None,
            deterministic: false,
            full_f32: true,
        }
    }

    /// Whether products may be those of TF32.
    pub fn is_tf32(&self) -> bool {
        self.dtype == ElemType::Float(FloatKind::F32) && !self.full_f32
    }

    /// Rows of q of one head, over all sequences if they are packed.
    pub fn rows_q(&self) -> usize {
        self.packed.map_or(self.seq_q, |[rows, _]| rows)
    }

    /// As [`rows_q`](Self::rows_q), of k and v.
    pub fn rows_kv(&self) -> usize {
        self.packed.map_or(self.seq_kv, |[_, rows]| rows)
    }

    /// Batches of the tensors: 1 where sequences are packed.
    pub fn tensor_batch(&self) -> usize {
        if self.packed.is_some() { 1 } else { self.batch }
    }

    /// Elements of the output.
    pub fn out_elements(&self) -> usize {
        self.tensor_batch() * self.heads_q * self.rows_q() * self.head_dim
    }

    /// Elements of the gradient of k, and of v.
    pub fn kv_elements(&self) -> usize {
        self.tensor_batch() * self.heads_kv * self.rows_kv() * self.head_dim
    }

    /// Queries of all heads: elements of a tensor of one number for each.
    pub fn query_elements(&self) -> usize {
        self.tensor_batch() * self.heads_q * self.rows_q()
    }

    /// Elements of the logarithms of the sums, which are kept in two parts.
    pub fn lse_elements(&self) -> usize {
        2 * self.query_elements()
    }

    /// Pairs of all sequences and heads.
    pub fn pair_elements(&self) -> usize {
        self.batch * self.pairs_of_sequence()
    }

    /// Pairs of all heads of a sequence.
    pub(super) fn pairs_of_sequence(&self) -> usize {
        self.heads_q * self.seq_q * self.seq_kv
    }

    /// Sequences that the gradient of the bias is apart for: 1 where all share the bias.
    pub fn bias_batches(&self) -> usize {
        match self.bias {
            Some(Pairs { batch: 0, .. }) => 1,
            _ => self.batch,
        }
    }

    /// Where the output lies.
    pub fn out(&self) -> HeadStrides {
        self.ordered(self.order_q, self.heads_q, self.rows_q())
    }

    /// Where the gradients of k and v lie.
    pub fn kv_gradients(&self) -> HeadStrides {
        self.ordered(self.order_kv, self.heads_kv, self.rows_kv())
    }

    fn ordered(&self, order: Order, heads: usize, seq: usize) -> HeadStrides {
        let rows = order.strides(heads, seq, self.head_dim);
        if self.packed.is_some() { HeadStrides { batch: 0, ..rows } } else { rows }
    }

    /// Keys that query `row` sees through the window: the first, and the one after the last.
    pub fn visible(&self, row: usize) -> (usize, usize) {
        let diagonal = row as i64 + self.seq_kv as i64 - self.seq_q as i64;
        let bound = |at: i64| at.clamp(0, self.seq_kv as i64) as usize;
        let first = self.window.left.map_or(0, |left| bound(diagonal - clamped(left)));
        let end =
            self.window.right.map_or(self.seq_kv, |right| bound(diagonal + clamped(right) + 1));
        (first, end)
    }

    /// Multiplications and additions of the forward pass: two products over all pairs that the
    /// window leaves, of sequences of the full length.
    pub fn forward_flops(&self) -> f64 {
        let pairs: usize = (0..self.seq_q)
            .map(|row| {
                let (first, end) = self.visible(row);
                end.saturating_sub(first)
            })
            .sum();
        4.0 * (self.batch * self.heads_q * self.head_dim) as f64 * pairs as f64
    }

    /// As [`forward_flops`](Self::forward_flops), of the backward pass: five products.
    pub fn backward_flops(&self) -> f64 {
        2.5 * self.forward_flops()
    }

    /// Bytes that the forward pass has to move: q, k and v in; the output, the largest scores and the
    /// logarithms out.
    pub fn forward_bytes(&self) -> usize {
        let elements = 2 * self.out_elements() + 2 * self.kv_elements();
        elements * self.dtype.size() + 4 * self.lse_elements()
    }

    /// Whether the numbers make sense on their own.
    ///
    /// # Errors
    ///
    /// [`KernelError::InvalidProblem`] for those that do not; [`KernelError::Unsupported`] for types
    /// and sizes that no kernel takes.
    pub fn validate(&self) -> Result<(), KernelError> {
        for (argument, size) in [
            ("batch", self.batch),
            ("seq_q", self.seq_q),
            ("seq_kv", self.seq_kv),
            ("heads_q", self.heads_q),
            ("heads_kv", self.heads_kv),
            ("head_dim", self.head_dim),
        ] {
            if size == 0 {
                return Err(invalid(argument, "at least 1".into(), size));
            }
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            let expected = format!("a multiple of the {} heads of k and v", self.heads_kv);
            return Err(invalid("heads_q", expected, self.heads_q));
        }
        if !self.scale.is_finite() {
            return Err(invalid("scale", "a finite number".into(), self.scale));
        }
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(invalid("softcap", "a positive number".into(), cap));
        }
        if let Some(Dropout { rate, .. }) = self.dropout
            && !(0.0..1.0).contains(&rate)
        {
            return Err(invalid("dropout", "a rate of at least 0 and below 1".into(), rate));
        }
        if self.packed.is_some() && (self.mask.is_some() || self.bias.is_some()) {
            let expected = "no mask and no bias with packed sequences".into();
            return Err(invalid("mask", expected, "one of them"));
        }
        let float = |kind: FloatKind| self.dtype == ElemType::Float(kind);
        if !(float(FloatKind::F32) || float(FloatKind::F16) || float(FloatKind::BF16)) {
            return Err(unsupported(format!("{:?}", self.dtype)));
        }
        if self.head_dim > MOST_HEAD_DIM {
            return Err(unsupported(format!("head_dim {}, above {MOST_HEAD_DIM}", self.head_dim)));
        }
        self.check_sizes()
    }

    /// Kernels index with 32 bits.
    fn check_sizes(&self) -> Result<(), KernelError> {
        for (name, elements) in [
            ("q", self.span(self.q, self.heads_q, self.rows_q())),
            ("k", self.span(self.k, self.heads_kv, self.rows_kv())),
            ("v", self.span(self.v, self.heads_kv, self.rows_kv())),
            ("out", self.out_elements()),
            ("mask", self.mask.map_or(0, |pairs| self.pair_span(pairs))),
            ("bias", self.bias.map_or(0, |pairs| self.pair_span(pairs))),
        ] {
            if u32::try_from(elements).is_err() {
                return Err(unsupported(format!("{name} spans {elements} elements, 2^32 or more")));
            }
        }
        match self.seq_q.max(self.seq_kv) {
            longest if longest < UNBOUNDED => Ok(()),
            longest => Err(unsupported(format!("sequences of {longest}"))),
        }
    }

    /// Elements of the memory of rows that are reached; 0 of an empty tensor.
    pub(super) fn span(&self, rows: HeadStrides, heads: usize, seq: usize) -> usize {
        let sizes = [self.tensor_batch(), heads, seq];
        if sizes.contains(&0) {
            return 0;
        }
        let [batch, head, row] = sizes.map(|size| size - 1);
        batch * rows.batch + head * rows.head + row * rows.row + self.head_dim
    }

    /// As [`span`](Self::span), of pairs.
    pub(super) fn pair_span(&self, pairs: Pairs) -> usize {
        let sizes = [self.batch, self.heads_q, self.seq_q, self.seq_kv];
        if sizes.contains(&0) {
            return 0;
        }
        let [batch, head, row, column] = sizes.map(|size| size - 1);
        batch * pairs.batch + head * pairs.head + row * pairs.row + column * pairs.column + 1
    }
}

/// A side of the window for 32-bit arithmetic.
pub(super) fn clamped(side: usize) -> i64 {
    side.min(UNBOUNDED) as i64
}

pub(super) fn invalid(
    argument: &'static str,
    expected: String,
    actual: impl ToString,
) -> KernelError {
    KernelError::invalid(OP, argument, expected, actual)
}

pub(super) fn unsupported(reason: String) -> KernelError {
    KernelError::Unsupported { op: OP, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem() -> AttentionProblem {
        AttentionProblem::dense([2, 4, 8, 16], 12, ElemType::Float(FloatKind::F32))
    }

    #[test]
    fn the_last_query_stands_at_the_last_key() {
        let causal =
            AttentionProblem { window: Window { left: None, right: Some(0) }, ..problem() };
        assert_eq!(causal.visible(7), (0, 12));
        assert_eq!(causal.visible(0), (0, 5));
        let few_keys = AttentionProblem { seq_q: 12, seq_kv: 8, ..causal };
        assert_eq!(few_keys.visible(3), (0, 0));
        assert_eq!(few_keys.visible(4), (0, 1));
        let band =
            AttentionProblem { window: Window { left: Some(2), right: Some(1) }, ..problem() };
        assert_eq!(band.visible(0), (2, 6));
        let wide = Window { left: Some(usize::MAX), right: Some(usize::MAX) };
        assert_eq!(AttentionProblem { window: wide, ..problem() }.visible(3), (0, 12));
    }

    #[test]
    fn causal_attention_costs_about_half() {
        let full = AttentionProblem::dense([4, 16, 1024, 64], 1024, problem().dtype);
        let causal = AttentionProblem { window: Window { left: None, right: Some(0) }, ..full };
        assert_eq!(full.forward_flops(), 4.0 * 64.0 * 1024.0 * 1024.0 * 64.0);
        let share = causal.forward_flops() / full.forward_flops();
        assert!((share - 0.5).abs() < 1e-3, "{share}");
    }

    #[test]
    fn heads_side_by_side_are_one_row() {
        let rows = Order::PositionsFirst.strides(4, 8, 16);
        assert_eq!(rows, HeadStrides { batch: 512, head: 16, row: 64 });
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let refused = |problem: AttentionProblem| problem.validate().unwrap_err().to_string();
        for (problem, argument) in [
            (AttentionProblem { heads_kv: 3, ..problem() }, "heads_q"),
            (AttentionProblem { heads_kv: 0, ..problem() }, "heads_kv"),
            (AttentionProblem { seq_kv: 0, ..problem() }, "seq_kv"),
            (AttentionProblem { head_dim: 0, ..problem() }, "head_dim"),
            (AttentionProblem { scale: f32::NAN, ..problem() }, "scale"),
            (AttentionProblem { softcap: Some(0.0), ..problem() }, "softcap"),
            (
                AttentionProblem { dropout: Some(Dropout { rate: 1.0, seed: 0 }), ..problem() },
                "dropout",
            ),
            (
                AttentionProblem {
                    packed: Some([8, 12]),
                    mask: Some(Pairs::default()),
                    ..problem()
                },
                "mask",
            ),
        ] {
            let message = refused(problem);
            assert!(message.contains(&format!("`{argument}`")), "{message}");
        }
        let wide = AttentionProblem { head_dim: 257, ..problem() };
        assert!(refused(wide).contains("head_dim 257"));
        assert!(problem().validate().is_ok());
    }
}
