use std::fmt;

/// Which instructions multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Hopper's asynchronous warpgroup products.
    Wgmma,
    /// Warp products of Ampere and later.
    Mma,
    /// Ordinary arithmetic.
    Portable,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wgmma => "wgmma",
            Self::Mma => "mma",
            Self::Portable => "portable",
        })
    }
}
