//! How far off the elements of a product may be.

use crate::{
    random_signs::{largest_partial_sum, typical_partial_sum},
    storage::Storage,
    tolerance::{compare, compare_rms},
};
use std::error::Error;

/// What a device multiplies, adds and stores in.
///
/// # The bound
///
/// With `y` the exact element, `M` the same element of `|A| |B|` and `K` the terms of the sum:
///
/// `2 (u_out |y| + K u_acc M) + (2 e + e^2) M + underflow`
///
/// - `K u_acc M`: a sum of `K` products errs by at most that, in whatever order it is added (Higham,
///   "Accuracy and Stability of Numerical Algorithms", sections 3.5 and 4.2). So the bound holds for
///   every tiling, and for partial sums over parts of `K` that are kept in the accumulator's type.
/// - `u_out |y|`: rounding the sum to storage.
/// - `(2 e + e^2) M`: both operands were changed by a relative `e` before they were multiplied.
/// - `underflow`: what flushing subnormal numbers loses, once for each step and once in storage.
///
/// The factor 2 is not a reserve but stands for smaller terms: the products of the errors above; the
/// rounding of a sum to f32 before it is rounded to storage, and the additions of partial sums; and
/// on tensor cores, which add `N` products and the accumulator at once, the accumulator's own
/// alignment and the last normalization, together `2 K / N` more roundings, where `N` is 4 or more.
///
/// A `y` that is NaN or infinite may not be off at all: terms that are not numbers make it, in every order of
/// the sum, and no rounding does. So its bound is zero, and what is computed of it may still have a bound, such
/// as the zero that `ReLU` makes of minus infinity.
///
/// # Operands with random signs
///
/// `M` is what a partial sum may be in the worst case. Where the signs of the terms are random, it is far
/// less, and so are the roundings: [`check_random`](Self::check_random) takes
/// [`random_signs`](crate::random_signs) in the place of `M`.
///
/// It does not cover partial sums that are rounded to a storage type: each such sum errs by
/// `u_out M`, and no kernel should do that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatmulPrecision {
    /// Type of the output.
    pub out: Storage,
    /// Relative error with which operands enter the multiplication: `e`.
    pub operand_error: f64,
    /// Relative error of an addition: `u_acc`.
    pub accumulation: f64,
    /// Terms after which the sum is moved to an accumulator in f32, where a device does that.
    pub promote_every: Option<usize>,
}

impl MatmulPrecision {
    /// Operands taken as they are, products and sums in f32, rounded to nearest: fused
    /// multiply-adds on the ordinary arithmetic units.
    pub fn exact(out: Storage) -> Self {
        let accumulation = Storage::F32.unit_roundoff();
        Self { out, operand_error: 0.0, accumulation, promote_every: None }
    }

    /// Tensor cores on f16 or bf16 operands, whose products are exact. Sums are in f32, but they are
    /// truncated, not rounded (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021):
    /// twice the error.
    pub fn tensor_core(out: Storage) -> Self {
        let accumulation = 2.0 * Storage::F32.unit_roundoff();
        Self { accumulation, ..Self::exact(out) }
    }

    /// Tensor cores on f32 operands, of which they take 10 explicit bits of mantissa. An operand
    /// that nobody rounded is truncated, so it errs by up to 2^-10.
    pub fn tf32() -> Self {
        Self { operand_error: 2f64.powi(-10), ..Self::tensor_core(Storage::F32) }
    }

    /// Hopper's tensor cores on FP8 operands, which are exact as dequantized. Products are aligned
    /// to 14 bits and truncated (DeepSeek-V3 technical report, 2024, section 3.3.2), unless the
    /// kernel moves the sum to f32 accumulators every `promote_every` terms, which that section
    /// does every 128.
    ///
    /// Without promotion, the bound is as large as `M` itself at a `K` of 4096. It then finds only
    /// gross faults, so judge the result by [`sqnr_db`](crate::tolerance::sqnr_db) as well.
    pub fn fp8(out: Storage, promote_every: Option<usize>) -> Self {
        Self { out, operand_error: 0.0, accumulation: 2f64.powi(-13), promote_every }
    }

    /// The same with another type of output.
    pub fn with_out(self, out: Storage) -> Self {
        Self { out, ..self }
    }

    /// How far off an element `y` may be that is a sum of `k` products whose magnitudes add up to
    /// `magnitude`.
    pub fn bound(&self, y: f64, magnitude: f64, k: usize) -> f64 {
        if !y.is_finite() {
            return 0.0;
        }
        let (terms, u) = (k as f64, self.accumulation);
        let growth = match self.promote_every.filter(|every| *every > 0 && *every < k) {
            None => terms * u,
            // Each part errs by its own length; then the parts are added in f32.
            Some(every) => {
                every as f64 * u + k.div_ceil(every) as f64 * Storage::F32.unit_roundoff()
            }
        };
        let rounding = 2.0 * (self.out.unit_roundoff() * y.abs() + growth * magnitude);
        let operands = (2.0 + self.operand_error) * self.operand_error * magnitude;
        rounding + operands + terms * Storage::F32.underflow() + self.out.underflow()
    }

    /// The bounds of all elements.
    ///
    /// # Panics
    ///
    /// When the lengths differ.
    pub fn bounds(&self, values: &[f64], magnitudes: &[f64], k: usize) -> Vec<f64> {
        assert_eq!(values.len(), magnitudes.len(), "values and magnitudes differ in length");
        values.iter().zip(magnitudes).map(|(y, m)| self.bound(*y, *m, k)).collect()
    }
}

/// Elements of a product whose terms have random signs, in f64.
#[derive(Clone, Copy, Debug)]
pub struct Sums<'a> {
    /// The elements.
    pub values: &'a [f64],
    /// The same ones of the product of absolute values.
    pub magnitudes: &'a [f64],
    /// The same ones of the product of squares.
    pub squares: &'a [f64],
    /// Terms of each.
    pub k: usize,
}

impl MatmulPrecision {
    /// Whether `actual` is `expected`: each element to within what its largest partial sum allows, and all
    /// taken together to within what their typical ones do. The second finds what the first has room for: of
    /// 14336 terms in bf16, it finds 64 that are lost everywhere, and the first those that are lost in a tile.
    ///
    /// Operands have to have random signs: where all terms are positive, right results may not pass.
    ///
    /// # Errors
    ///
    /// The worst element, or the errors in the root mean square.
    ///
    /// # Panics
    ///
    /// When the lengths differ.
    pub fn check_random(
        &self,
        actual: &[f64],
        expected: &Sums<'_>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let &Sums { values, magnitudes, squares, k } = expected;
        assert_eq!(magnitudes.len(), squares.len(), "magnitudes and squares differ in length");
        let count = values.len();
        let partial_sums: Vec<f64> = magnitudes
            .iter()
            .zip(squares)
            .map(|(magnitude, squares)| largest_partial_sum(*magnitude, *squares, k, count))
            .collect();
        compare(actual, values, &self.bounds(values, &partial_sums, k))?;
        let partial_sums: Vec<f64> =
            squares.iter().map(|squares| typical_partial_sum(*squares, count)).collect();
        compare_rms(actual, values, &self.bounds(values, &partial_sums, k))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fp8::Fp8,
        matmul::{Element, Layout, MatmulCase, element, magnitudes, matmul, squares},
        random::normal,
        tolerance::Mismatch,
    };

    const CASE: MatmulCase = MatmulCase {
        name: "test",
        batch: 2,
        m: 24,
        n: 20,
        k: 24,
        lhs: Layout::RowMajor,
        rhs: Layout::RowMajor,
    };

    /// As the layers of Llama 3 sum.
    const LONG: MatmulCase = MatmulCase { batch: 1, m: 8, n: 8, k: 14_336, ..CASE };

    const DEEP: MatmulCase = MatmulCase { batch: 1, m: 8, n: 8, k: 1024, ..CASE };

    fn operands(case: &MatmulCase, storage: Storage) -> (Vec<f64>, Vec<f64>) {
        let (lhs, rhs) = (case.lhs_len(), case.rhs_len());
        (normal(1, lhs, 1.0, storage), normal(2, rhs, 1.0, storage))
    }

    /// `x` with that many explicit bits of mantissa, the others cut off.
    fn truncated(x: f64, bits: u32) -> f64 {
        f64::from_bits(x.to_bits() & (u64::MAX << (52 - bits)))
    }

    /// What a device computes that adds one term after the other, `add` being its rounding.
    fn device(
        case: &MatmulCase,
        (lhs, rhs): (&[f64], &[f64]),
        add: impl Fn(usize, f64, f64) -> f64,
        out: Storage,
    ) -> Vec<f64> {
        let [lhs_batch, lhs_row, lhs_step] = case.lhs_strides();
        let [rhs_batch, rhs_step, rhs_column] = case.rhs_strides();
        let element = |index: usize| {
            let (row, j) = (index / case.n, index % case.n);
            let (b, i) = (row / case.m, row % case.m);
            let sum = (0..case.k).fold(0.0, |sum, p| {
                let x = lhs[b * lhs_batch + i * lhs_row + p * lhs_step];
                let w = rhs[b * rhs_batch + j * rhs_column + p * rhs_step];
                add(p, sum, x * w)
            });
            out.round(sum)
        };
        (0..case.out_len()).map(element).collect()
    }

    /// Whether `actual` is within bounds; the worst ratio if it is.
    fn judge(
        case: &MatmulCase,
        (lhs, rhs): (&[f64], &[f64]),
        precision: MatmulPrecision,
        actual: &[f64],
    ) -> Result<f64, Mismatch> {
        let expected = matmul(case, lhs, rhs);
        let bounds = precision.bounds(&expected, &magnitudes(case, lhs, rhs), case.k);
        compare(actual, &expected, &bounds).map(|agreement| agreement.worst_ratio)
    }

    /// Whether `actual` is within what random signs allow.
    fn judge_random(
        case: &MatmulCase,
        (lhs, rhs): (&[f64], &[f64]),
        precision: MatmulPrecision,
        actual: &[f64],
    ) -> Result<(), String> {
        let (values, magnitudes) = (matmul(case, lhs, rhs), magnitudes(case, lhs, rhs));
        let squares = squares(case, lhs, rhs);
        let sums = Sums { values: &values, magnitudes: &magnitudes, squares: &squares, k: case.k };
        precision.check_random(actual, &sums).map_err(|error| error.to_string())
    }

    fn f32_add(_: usize, sum: f64, term: f64) -> f64 {
        Storage::F32.round(sum + term)
    }

    #[test]
    fn f32_arithmetic_is_within_bounds() {
        for case in [CASE, DEEP] {
            for storage in Storage::ALL {
                let (lhs, rhs) = operands(&case, storage);
                let actual = device(&case, (&lhs, &rhs), f32_add, storage);
                let precision = MatmulPrecision::exact(storage);
                judge(&case, (&lhs, &rhs), precision, &actual).unwrap();
            }
        }
    }

    #[test]
    fn truncating_accumulators_are_within_the_bounds_of_tensor_cores() {
        let precision = MatmulPrecision::tensor_core(Storage::F32);
        for case in [CASE, DEEP] {
            let (lhs, rhs) = operands(&case, Storage::Bf16);
            let add = |_, sum, term| truncated(sum + term, 23);
            let actual = device(&case, (&lhs, &rhs), add, Storage::F32);
            judge(&case, (&lhs, &rhs), precision, &actual).unwrap();
        }
        // A sum that passed through bf16 half way is not, as long as there are few terms: over the
        // 1024 of `DEEP`, the bound grows as large as that rounding.
        let (lhs, rhs) = operands(&CASE, Storage::Bf16);
        let add = |p, sum, term| {
            let sum = truncated(sum + term, 23);
            if p == CASE.k / 2 { Storage::Bf16.round(sum) } else { sum }
        };
        let actual = device(&CASE, (&lhs, &rhs), add, Storage::F32);
        assert!(judge(&CASE, (&lhs, &rhs), precision, &actual).is_err());
    }

    #[test]
    fn truncated_operands_are_within_the_bounds_of_tf32_and_of_nothing_finer() {
        let (lhs, rhs) = operands(&CASE, Storage::F32);
        let cut = |x: &[f64]| x.iter().map(|x| truncated(*x, 10)).collect::<Vec<_>>();
        let actual = device(&CASE, (&cut(&lhs), &cut(&rhs)), f32_add, Storage::F32);
        let inputs = (&lhs[..], &rhs[..]);
        judge(&CASE, inputs, MatmulPrecision::tf32(), &actual).unwrap();
        assert!(judge(&CASE, inputs, MatmulPrecision::tensor_core(Storage::F32), &actual).is_err());
    }

    #[test]
    fn narrow_accumulators_are_within_the_bounds_of_fp8_and_promotion_tightens_them() {
        let quantized = |seed, count| {
            let values = normal(seed, count, 1.0, Storage::F32);
            let (codes, scale) = Fp8::E4m3.quantize(&values);
            Fp8::E4m3.decode(&codes).iter().map(|v| v * scale).collect::<Vec<_>>()
        };
        let (lhs, rhs) = (quantized(1, DEEP.lhs_len()), quantized(2, DEEP.rhs_len()));
        let inputs = (&lhs[..], &rhs[..]);
        let narrow = |_, sum, term| truncated(sum + term, 13);
        let actual = device(&DEEP, inputs, narrow, Storage::Bf16);
        let precision = |every| MatmulPrecision::fp8(Storage::Bf16, every);
        judge(&DEEP, inputs, precision(None), &actual).unwrap();

        let Element { value: y, magnitude, .. } = element(&DEEP, &lhs, &rhs, 0);
        let bound = |every| precision(every).bound(y, magnitude, DEEP.k);
        assert!(bound(Some(128)) < bound(None) / 4.0);
        // Promotion after the last term changes nothing.
        assert_eq!(bound(Some(DEEP.k)), bound(None));
        assert!(judge(&DEEP, inputs, MatmulPrecision::tensor_core(Storage::F32), &actual).is_err());
    }

    #[test]
    fn what_devices_compute_is_within_what_random_signs_allow() {
        for case in [CASE, DEEP, LONG] {
            for storage in Storage::ALL {
                let (lhs, rhs) = operands(&case, storage);
                let inputs = (&lhs[..], &rhs[..]);
                let actual = device(&case, inputs, f32_add, storage);
                judge_random(&case, inputs, MatmulPrecision::exact(storage), &actual).unwrap();
                let add = |_, sum, term| truncated(sum + term, 23);
                let actual = device(&case, inputs, add, storage);
                let precision = MatmulPrecision::tensor_core(storage);
                judge_random(&case, inputs, precision, &actual).unwrap();
            }
            let (lhs, rhs) = operands(&case, Storage::F32);
            let cut = |x: &[f64]| x.iter().map(|x| truncated(*x, 10)).collect::<Vec<_>>();
            let actual = device(&case, (&cut(&lhs), &cut(&rhs)), f32_add, Storage::F32);
            judge_random(&case, (&lhs, &rhs), MatmulPrecision::tf32(), &actual).unwrap();
        }
    }

    #[test]
    fn a_lost_block_of_a_long_sum_is_found_by_random_signs_and_by_nothing_else() {
        let (lhs, rhs) = operands(&LONG, Storage::Bf16);
        let inputs = (&lhs[..], &rhs[..]);
        let precision = MatmulPrecision::tensor_core(Storage::Bf16);
        let without = |p: usize, sum, term| {
            let is_lost = (4096..4096 + 64).contains(&p);
            if is_lost { sum } else { truncated(sum + term, 23) }
        };
        let short = device(&LONG, inputs, without, Storage::Bf16);
        assert!(judge(&LONG, inputs, precision, &short).is_ok());
        let error = judge_random(&LONG, inputs, precision, &short).unwrap_err();
        assert!(error.contains("out of bounds"), "{error}");
        // In every second element of a row of tiles.
        let add = |_, sum, term| truncated(sum + term, 23);
        let mut patched = device(&LONG, inputs, add, Storage::Bf16);
        judge_random(&LONG, inputs, precision, &patched).unwrap();
        for i in (0..16).step_by(2) {
            patched[i] = short[i];
        }
        judge_random(&LONG, inputs, precision, &patched).unwrap_err();
    }

    #[test]
    fn a_lost_term_of_a_long_sum_shows_in_all_elements_together() {
        for storage in [Storage::F32, Storage::F16] {
            let (lhs, rhs) = operands(&LONG, storage);
            let inputs = (&lhs[..], &rhs[..]);
            let without = |p: usize, sum, term| if p == 77 { sum } else { f32_add(p, sum, term) };
            let short = device(&LONG, inputs, without, storage);
            judge_random(&LONG, inputs, MatmulPrecision::exact(storage), &short).unwrap_err();
        }
    }

    #[test]
    fn a_dropped_last_term_is_out_of_bounds() {
        for storage in Storage::ALL {
            for case in [CASE, DEEP] {
                let (lhs, rhs) = operands(&case, storage);
                let add = |p, sum, term| if p + 1 == case.k { sum } else { f32_add(p, sum, term) };
                let actual = device(&case, (&lhs, &rhs), add, storage);
                for precision in [
                    MatmulPrecision::exact(storage),
                    MatmulPrecision::tensor_core(storage),
                    MatmulPrecision::tf32().with_out(storage),
                ] {
                    let judged = judge(&case, (&lhs, &rhs), precision, &actual);
                    assert!(judged.is_err(), "{case} {precision:?}");
                }
            }
        }
    }

    #[test]
    fn a_transposed_operand_is_out_of_bounds() {
        let (lhs, rhs) = operands(&CASE, Storage::Bf16);
        let misread = MatmulCase { lhs: Layout::ColumnMajor, ..CASE };
        let actual = device(&misread, (&lhs, &rhs), f32_add, Storage::Bf16);
        let precision = MatmulPrecision::tensor_core(Storage::Bf16);
        assert!(judge(&CASE, (&lhs, &rhs), precision, &actual).is_err());
    }
}
