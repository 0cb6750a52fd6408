//! Integer and bit instructions of a thread (PTX ISA, "Integer Arithmetic" and "Logic and Shift").
//!
//! Operands and results are bits in the low part of a word.

use crate::ptx::Ty;

/// What an instruction makes of up to three operands.
pub(crate) type Alu = fn(u64, u64, u64) -> u64;

/// An integer type of the host that does what one of PTX does.
trait Int: Copy {
    fn cut(bits: u64) -> Self;
    fn out(self) -> u64;
    fn wide(self) -> i128;
    fn narrow(value: i128) -> Self;
}

macro_rules! int {
    ($($ty:ty, $unsigned:ty);+) => {$(
        impl Int for $ty {
            fn cut(bits: u64) -> Self {
                bits as Self
            }
            fn out(self) -> u64 {
                u64::from(self as $unsigned)
            }
            fn wide(self) -> i128 {
                i128::from(self)
            }
            fn narrow(value: i128) -> Self {
                value as Self
            }
        }
    )+};
}

int!(u8, u8; i8, u8; u16, u16; i16, u16; u32, u32; i32, u32; u64, u64; i64, u64);

fn add<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut(a.wrapping_add(b)).out()
}

fn sub<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut(a.wrapping_sub(b)).out()
}

fn mul_lo<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::cut(a.wrapping_mul(b)).out()
}

fn mul_hi<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    // The product of two unsigned words of 64 bits does not fit, so it is taken in halves there.
    let bits = 8 * size_of::<T>() as u32;
    let (a, b) = (T::cut(a).wide(), T::cut(b).wide());
    let product = if a < 0 || b < 0 { a * b } else { (a as u128 * b as u128) as i128 };
    T::narrow(product >> bits).out()
}

fn mul_wide<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let product = (T::cut(a).wide() * T::cut(b).wide()) as u64;
    if size_of::<T>() == 2 { product & 0xffff_ffff } else { product }
}

fn mad_lo<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    T::cut(a.wrapping_mul(b).wrapping_add(c)).out()
}

fn mad_hi<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    add::<T>(mul_hi::<T>(a, b, 0), c, 0)
}

fn mad_wide<T: Int>(a: u64, b: u64, c: u64) -> u64 {
    let sum = mul_wide::<T>(a, b, 0).wrapping_add(c);
    if size_of::<T>() == 2 { sum & 0xffff_ffff } else { sum }
}

/// Division by zero is unspecified in PTX; the hardware gives ones.
fn div<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (T::cut(a).wide(), T::cut(b).wide());
    if b == 0 { T::narrow(-1).out() } else { T::narrow(a / b).out() }
}

fn rem<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let (a, b) = (T::cut(a).wide(), T::cut(b).wide());
    if b == 0 { T::narrow(a).out() } else { T::narrow(a % b).out() }
}

fn min<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::narrow(T::cut(a).wide().min(T::cut(b).wide())).out()
}

fn max<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    T::narrow(T::cut(a).wide().max(T::cut(b).wide())).out()
}

fn abs<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    T::narrow(T::cut(a).wide().abs()).out()
}

fn neg<T: Int>(a: u64, _: u64, _: u64) -> u64 {
    T::narrow(-T::cut(a).wide()).out()
}

/// A shift by more than the width gives zero, or the sign.
fn shl<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let bits = 8 * size_of::<T>() as u64;
    let b = b & 0xffff_ffff;
    if b >= bits { 0 } else { T::cut(a << b).out() }
}

fn shr<T: Int>(a: u64, b: u64, _: u64) -> u64 {
    let b = (b & 0xffff_ffff).min(127);
    T::narrow(T::cut(a).wide() >> b).out()
}

fn and(a: u64, b: u64, _: u64) -> u64 {
    a & b
}

fn or(a: u64, b: u64, _: u64) -> u64 {
    a | b
}

fn xor(a: u64, b: u64, _: u64) -> u64 {
    a ^ b
}

fn not(a: u64, _: u64, _: u64) -> u64 {
    !a
}

fn popc(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a.count_ones())
}

fn clz32(a: u64, _: u64, _: u64) -> u64 {
    u64::from((a as u32).leading_zeros())
}

fn clz64(a: u64, _: u64, _: u64) -> u64 {
    u64::from(a.leading_zeros())
}

fn brev32(a: u64, _: u64, _: u64) -> u64 {
    u64::from((a as u32).reverse_bits())
}

fn brev64(a: u64, _: u64, _: u64) -> u64 {
    a.reverse_bits()
}

/// The place of the highest bit that is not the sign; ones if there is none.
fn bfind(value: u32) -> u64 {
    if value == 0 { 0xffff_ffff } else { u64::from(31 - value.leading_zeros()) }
}

fn bfind_unsigned(a: u64, _: u64, _: u64) -> u64 {
    bfind(a as u32)
}

fn bfind_signed(a: u64, _: u64, _: u64) -> u64 {
    let a = a as u32;
    bfind(if (a as i32) < 0 { !a } else { a })
}

fn field(b: u64, c: u64) -> (u32, u32) {
    ((b & 0xff) as u32, (c & 0xff) as u32)
}

fn bfe_unsigned(a: u64, b: u64, c: u64) -> u64 {
    let (position, length) = field(b, c);
    if position >= 32 {
        return 0;
    }
    let kept = if length >= 32 { u32::MAX } else { (1 << length) - 1 };
    u64::from((a as u32) >> position & kept)
}

fn bfe_signed(a: u64, b: u64, c: u64) -> u64 {
    let (position, length) = field(b, c);
    if length == 0 {
        return 0;
    }
    let value = i64::from(a as i32) >> position.min(31);
    let unused = 64 - length.min(32);
    u64::from((value << unused >> unused) as u32)
}

/// The low words of two registers, seen as one of 64 bits, shifted by at most 32.
fn shf_left_wrap(a: u64, b: u64, c: u64) -> u64 {
    let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    (both << (c & 31)) >> 32
}

fn shf_right_wrap(a: u64, b: u64, c: u64) -> u64 {
    let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    (both >> (c & 31)) & 0xffff_ffff
}

fn shf_left_clamp(a: u64, b: u64, c: u64) -> u64 {
    let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    (both << (c & 0xffff_ffff).min(32)) >> 32
}

fn shf_right_clamp(a: u64, b: u64, c: u64) -> u64 {
    let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    (both >> (c & 0xffff_ffff).min(32)) & 0xffff_ffff
}

/// Bytes of two registers, chosen by the low three bits of four half bytes; the fourth bit spreads a
/// byte's sign.
fn prmt(a: u64, b: u64, c: u64) -> u64 {
    let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
    (0..4).fold(0, |result, place| {
        let choice = c >> (4 * place) & 0xf;
        let byte = (both >> (8 * (choice & 7)) & 0xff) as u8;
        let byte = if choice & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        result | u64::from(byte) << (8 * place)
    })
}

/// Four products of bytes, added to the third operand.
fn dp4a<const SIGNED_A: bool, const SIGNED_B: bool>(a: u64, b: u64, c: u64) -> u64 {
    let byte = |bits: u64, place: u32, signed: bool| {
        let byte = (bits >> (8 * place)) as u8;
        if signed { i32::from(byte as i8) } else { i32::from(byte) }
    };
    let product = |place| byte(a, place, SIGNED_A).wrapping_mul(byte(b, place, SIGNED_B));
    let sum = (0..4).fold(c as i32, |sum, place| sum.wrapping_add(product(place)));
    u64::from(sum as u32)
}

macro_rules! typed {
    ($ty:expr, $function:ident) => {
        match $ty {
            Ty::U8 | Ty::B8 => $function::<u8> as Alu,
            Ty::S8 => $function::<i8>,
            Ty::U16 | Ty::B16 => $function::<u16>,
            Ty::S16 => $function::<i16>,
            Ty::U32 | Ty::B32 => $function::<u32>,
            Ty::S32 => $function::<i32>,
            Ty::U64 | Ty::B64 => $function::<u64>,
            Ty::S64 => $function::<i64>,
            _ => return None,
        }
    };
}

/// The function of an instruction: its name, its type and the modifiers in between.
pub(crate) fn integer(name: &str, modifiers: &[&str], ty: Ty) -> Option<Alu> {
    let alu = match (name, modifiers) {
        ("add", []) => typed!(ty, add),
        ("sub", []) => typed!(ty, sub),
        ("mul" | "mul24", ["lo"]) => typed!(ty, mul_lo),
        ("mul", ["hi"]) => typed!(ty, mul_hi),
        ("mul", ["wide"]) => typed!(ty, mul_wide),
        ("mad", ["lo"]) => typed!(ty, mad_lo),
        ("mad", ["hi"]) => typed!(ty, mad_hi),
        ("mad", ["wide"]) => typed!(ty, mad_wide),
        ("div", []) => typed!(ty, div),
        ("rem", []) => typed!(ty, rem),
        ("min", []) => typed!(ty, min),
        ("max", []) => typed!(ty, max),
        ("abs", []) => typed!(ty, abs),
        ("neg", []) => typed!(ty, neg),
        ("shl", []) => typed!(ty, shl),
        ("shr", []) => typed!(ty, shr),
        ("and", []) => and,
        ("or", []) => or,
        ("xor", []) => xor,
        ("not", []) => not,
        ("popc", []) => popc,
        ("clz", []) if ty.bits() == 32 => clz32,
        ("clz", []) if ty.bits() == 64 => clz64,
        ("brev", []) if ty.bits() == 32 => brev32,
        ("brev", []) if ty.bits() == 64 => brev64,
        ("bfind", []) if ty == Ty::U32 => bfind_unsigned,
        ("bfind", []) if ty == Ty::S32 => bfind_signed,
        ("bfe", []) if ty == Ty::U32 => bfe_unsigned,
        ("bfe", []) if ty == Ty::S32 => bfe_signed,
        ("shf", ["l", "wrap"]) => shf_left_wrap,
        ("shf", ["r", "wrap"]) => shf_right_wrap,
        ("shf", ["l", "clamp"]) => shf_left_clamp,
        ("shf", ["r", "clamp"]) => shf_right_clamp,
        ("prmt", []) => prmt,
        ("dp4a", ["u32"]) if ty == Ty::U32 => dp4a::<false, false>,
        ("dp4a", ["s32"]) if ty == Ty::S32 => dp4a::<true, true>,
        ("dp4a", ["s32"]) if ty == Ty::U32 => dp4a::<true, false>,
        ("dp4a", ["u32"]) if ty == Ty::S32 => dp4a::<false, true>,
        _ => return None,
    };
    Some(alu)
}

/// Whether a comparison of that name holds between two operands.
pub(crate) type Comparison = fn(u64, u64) -> bool;

fn eq<T: Int>(a: u64, b: u64) -> bool {
    T::cut(a).wide() == T::cut(b).wide()
}

fn ne<T: Int>(a: u64, b: u64) -> bool {
    T::cut(a).wide() != T::cut(b).wide()
}

fn lt<T: Int>(a: u64, b: u64) -> bool {
    T::cut(a).wide() < T::cut(b).wide()
}

fn le<T: Int>(a: u64, b: u64) -> bool {
    T::cut(a).wide() <= T::cut(b).wide()
}

macro_rules! compared {
    ($ty:expr, $function:ident) => {
        match $ty {
            Ty::U16 | Ty::B16 => $function::<u16> as Comparison,
            Ty::S16 => $function::<i16>,
            Ty::U32 | Ty::B32 => $function::<u32>,
            Ty::S32 => $function::<i32>,
            Ty::U64 | Ty::B64 => $function::<u64>,
            Ty::S64 => $function::<i64>,
            _ => return None,
        }
    };
}

/// The comparison, and whether its operands change places.
pub(crate) fn compare(name: &str, ty: Ty) -> Option<(Comparison, bool)> {
    Some(match name {
        "eq" => (compared!(ty, eq), false),
        "ne" => (compared!(ty, ne), false),
        "lt" | "lo" => (compared!(ty, lt), false),
        "le" | "ls" => (compared!(ty, le), false),
        "gt" | "hi" => (compared!(ty, lt), true),
        "ge" | "hs" => (compared!(ty, le), true),
        _ => return None,
    })
}

/// `bfi`: bits of `a` put into `b`.
pub(crate) fn insert(a: u64, b: u64, position: u64, length: u64, bits: u32) -> u64 {
    let (position, length) = field(position, length);
    if position >= bits || length == 0 {
        return b;
    }
    let kept = if length >= 64 { u64::MAX } else { (1 << length) - 1 } << position;
    b & !kept | a << position & kept
}
