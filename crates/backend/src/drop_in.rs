//! How visitors tell a module of Blackburn's that stands in for one of Burn's from that one.

/// What such a module says it is, by entering and leaving a container of this kind before it hands a visitor on to
/// Burn's module, whose types and paths are then the same. The container's name is the module's type.
pub const CONTAINER: &str = "DropIn";
