//! What ran in 8 bits so far, and what did not.

use serde::Serialize;
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

static PRODUCTS: AtomicU64 = AtomicU64::new(0);
static FLOPS: AtomicU64 = AtomicU64::new(0);
static OTHER_FLOPS: AtomicU64 = AtomicU64::new(0);
static WIDENED: AtomicU64 = AtomicU64::new(0);
static DECLINED: AtomicU64 = AtomicU64::new(0);
static CASTS: AtomicU64 = AtomicU64::new(0);
static READ_ONCE: AtomicU64 = AtomicU64::new(0);
static UNMET: AtomicU64 = AtomicU64::new(0);

/// Products of two matrices that the process has asked GPUs for through Blackburn: those of unmodified modules, and
/// those of [`linear`](super::linear). A replay of a recording asks for none. Batches of products, which attention
/// has, do not count, nor do those of losses in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Tally {
    /// Products in 8 bits.
    pub products: u64,
    /// Those of them whose numbers were widened again, since no tensor core takes them: slower than 16 bits alone.
    pub widened: u64,
    /// The arithmetic of products in 8 bits, where a multiplication and an addition are two.
    pub flops: u64,
    /// The arithmetic of products in wider types.
    pub other_flops: u64,
    /// Products of marked weights among the latter. A warning gives each reason once.
    pub declined: u64,
    /// Matrices that were cast to 8 bits, in one layout or in two.
    pub casts: u64,
    /// Those of them that read their matrix once: the kernel that made it told its largest magnitude.
    pub read_once: u64,
    /// Marked weights that were let go of, or marked anew, before a product of Blackburn's read them: nothing was
    /// multiplied by them, or Burn did so itself. They are counted when the next weight is marked or read.
    pub unmet: u64,
}

impl Tally {
    /// That of the process so far.
    pub fn now() -> Self {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Self {
            products: read(&PRODUCTS),
            widened: read(&WIDENED),
            flops: read(&FLOPS),
            other_flops: read(&OTHER_FLOPS),
            declined: read(&DECLINED),
            casts: read(&CASTS),
            read_once: read(&READ_ONCE),
            unmet: read(&UNMET),
        }
    }

    /// What was added since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            products: self.products - earlier.products,
            widened: self.widened - earlier.widened,
            flops: self.flops - earlier.flops,
            other_flops: self.other_flops - earlier.other_flops,
            declined: self.declined - earlier.declined,
            casts: self.casts - earlier.casts,
            read_once: self.read_once - earlier.read_once,
            unmet: self.unmet - earlier.unmet,
        }
    }

    /// The share of the arithmetic that ran in 8 bits, from 0 to 1; 0 where there were no products.
    pub fn share(self) -> f64 {
        match self.flops + self.other_flops {
            0 => 0.0,
            all => self.flops as f64 / all as f64,
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.share();
        write!(f, "{percent:.1} % of products' arithmetic in fp8")?;
        if self.widened > 0 {
            let (widened, all) = (self.widened, self.products);
            write!(
                f,
                ", {widened} of {all} products widened to 16 bits or f32, which is slower than those alone"
            )?;
        }
        if self.declined > 0 {
            write!(f, ", {} products declined", self.declined)?;
        }
        if self.unmet > 0 {
            write!(f, ", {} marked weights that none of them read", self.unmet)?;
        }
        Ok(())
    }
}

#[cfg(feature = "gpu")]
pub(super) fn count_cast(read_once: bool) {
    CASTS.fetch_add(1, Ordering::Relaxed);
    READ_ONCE.fetch_add(u64::from(read_once), Ordering::Relaxed);
}

#[cfg(feature = "gpu")]
pub(super) fn count_unmet(weights: u64) {
    UNMET.fetch_add(weights, Ordering::Relaxed);
}

#[cfg(feature = "gpu")]
pub(super) fn count_product(flops: f64, widened: bool) {
    PRODUCTS.fetch_add(1, Ordering::Relaxed);
    WIDENED.fetch_add(u64::from(widened), Ordering::Relaxed);
    FLOPS.fetch_add(flops as u64, Ordering::Relaxed);
}

/// Counts a product in a wider type, which may have been `declined` in 8 bits.
#[cfg(feature = "gpu")]
pub(crate) fn count_other(flops: f64, declined: bool) {
    OTHER_FLOPS.fetch_add(flops as u64, Ordering::Relaxed);
    DECLINED.fetch_add(u64::from(declined), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_all_arithmetic() {
        let tally = Tally { flops: 30, other_flops: 10, ..Tally::default() };
        assert_eq!(tally.share(), 0.75);
        assert_eq!(tally.to_string(), "75.0 % of products' arithmetic in fp8");
        assert_eq!(Tally::default().share(), 0.0);
    }

    #[test]
    fn what_was_counted_before_does_not_count() {
        let earlier = Tally {
            products: 1,
            widened: 1,
            flops: 5,
            other_flops: 7,
            declined: 1,
            casts: 2,
            read_once: 1,
            unmet: 1,
        };
        let later = Tally {
            products: 4,
            widened: 3,
            flops: 9,
            other_flops: 7,
            declined: 3,
            casts: 8,
            read_once: 4,
            unmet: 6,
        };
        let since = later.since(earlier);
        assert_eq!(
            since,
            Tally {
                products: 3,
                widened: 2,
                flops: 4,
                other_flops: 0,
                declined: 2,
                casts: 6,
                read_once: 3,
                unmet: 5,
            }
        );
        assert_eq!(
            since.to_string(),
            "100.0 % of products' arithmetic in fp8, 2 of 3 products widened to 16 bits or f32, which is slower than \
             those alone, 2 products declined, 5 marked weights that none of them read"
        );
    }
}
