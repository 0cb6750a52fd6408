use super::{
    Fp8Format, QuantizeBlueprint, QuantizeProblem,
    amax::{UNITS, quantize_amax_kernel},
    blocks::{self, BlocksBlueprint, quantize_blocks_kernel, quantize_decode_blocks_kernel},
    cast::{CastBlueprint, GROUPS, quantize_cast_kernel},
    decode::quantize_decode_kernel,
    padded_row,
    problem::{OP, scale_words},
};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, F32, is_float},
    magnitude::Magnitudes,
};
use cubecl::{
    calculate_cube_count_elemwise,
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

const WORD: ElemType = ElemType::UInt(UIntKind::U32);

/// A matrix in 8 bits.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Rows of [`padded_row`]`(columns)` codes, if asked for.
    pub codes: Option<Buffer>,
    /// Columns of [`padded_row`]`(rows)` codes, if asked for.
    pub transposed: Option<Buffer>,
    /// Two f32: what codes are multiplied by to have the values back, and the largest magnitude.
    pub scale: Buffer,
}

/// A matrix in 8 bits whose blocks have scales.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// Rows of [`padded_row`] codes.
    pub codes: Buffer,
    /// [`scale_words`] words of scales.
    pub scales: Buffer,
}

/// A matrix in 8 bits, its transpose, or both. What shares a scale in one does not in the other.
#[derive(Clone, Debug)]
pub struct QuantizedBlocks {
    /// The matrix, by blocks of its rows, if asked for.
    pub rows: Option<Blocks>,
    /// The transpose, by blocks of the matrix's columns, if asked for.
    pub transposed: Option<Blocks>,
}

/// The matrix `x` as codes and their scale.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when x is smaller than the problem says or of another dtype, or
/// the margin is larger than every number; [`KernelError::Unsupported`] for other dtypes, empty
/// matrices and those beyond 32-bit indices.
pub fn quantize(
    client: &Client,
    problem: &QuantizeProblem,
    x: &Buffer,
) -> Result<Quantized, KernelError> {
    quantize_with(client, problem, QuantizeBlueprint::plan(problem, client), x, None)
}

/// As [`quantize`], by a plan of the caller's. Where the kernel that made x left its `magnitudes`, x is read once.
///
/// # Errors
///
/// As [`quantize`], and [`KernelError::InvalidProblem`] for a plan that does not fit the problem.
pub fn quantize_with(
    client: &Client,
    problem: &QuantizeProblem,
    blueprint: QuantizeBlueprint,
    x: &Buffer,
    magnitudes: Option<&Magnitudes>,
) -> Result<Quantized, KernelError> {
    problem.check(x)?;
    let QuantizeBlueprint { vector_size, amax_cubes, cast_cubes, hardware } = blueprint;
    if !problem.columns.is_multiple_of(vector_size) || amax_cubes * cast_cubes == 0 {
        return Err(KernelError::invalid(
            OP,
            "blueprint",
            format!("vectors that divide {} columns, and some cubes", problem.columns),
            format!("{blueprint:?}"),
        ));
    }
    let scale = Buffer::empty(client, 2, F32);
    let x = Buffer { elements: problem.elements(), ..x.clone() };
    let Magnitudes { partials } = match magnitudes {
        Some(magnitudes) => magnitudes.clone(),
        None => magnitudes_of(client, &x, vector_size, amax_cubes),
    };

    let [pitch, transposed_pitch] = [problem.columns, problem.rows].map(padded_row);
    let empty = |elements| Buffer::empty(client, elements, problem.format.dtype());
    let codes = problem.layouts.rows().then(|| empty(problem.rows * pitch));
    let transposed =
        problem.layouts.transposed().then(|| empty(problem.columns * transposed_pitch));
    // The other stands in for the one that is not made, which is not compiled in.
    let Some(some) = codes.as_ref().or(transposed.as_ref()) else {
        return Err(KernelError::Unsupported { op: OP, reason: "no layout".into() });
    };
    let argument = |copy: &Option<Buffer>, width| words(copy.as_ref().unwrap_or(some)).arg(width);
    // SAFETY: as above; the copies were allocated for the problem's padded rows, and the kernel
    // stops rows and columns at their ends.
    ahead::launch(client, |client| unsafe {
        quantize_cast_kernel::launch_unchecked(
            client,
            CubeCount::Static(cast_cubes as u32, 1, 1),
            CubeDim::new_2d(GROUPS, GROUPS),
            vector_size,
            x.arg(vector_size),
            partials.arg(1),
            argument(&codes, 2),
            argument(&transposed, 4),
            scale.arg(1),
            problem.rows as u32,
            problem.columns as u32,
            pitch as u32,
            transposed_pitch as u32,
            partials.elements as u32,
            problem.target(),
            CastBlueprint { format: problem.format, layouts: problem.layouts, hardware },
            problem.input,
        )
    });
    Ok(Quantized { codes, transposed, scale })
}

/// The largest magnitudes of x, whole vectors, by so many cubes.
fn magnitudes_of(client: &Client, x: &Buffer, vector_size: usize, cubes: usize) -> Magnitudes {
    let magnitudes = Magnitudes::of_cubes(client, cubes);
    // SAFETY: x holds whole vectors, whose indices and one step beyond fit 32 bits; the kernel stops at the last one.
    // Each cube writes its one partial result.
    ahead::launch(client, |client| unsafe {
        quantize_amax_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            vector_size,
            x.arg(vector_size),
            magnitudes.partials.arg(1),
            (x.elements / vector_size) as u32,
            x.dtype,
        )
    });
    magnitudes
}

/// The matrix `x` as codes, each 32 of which along a row share a scale.
///
/// # Errors
///
/// As [`quantize`]; the margin has to be 0.
pub fn quantize_blocks(
    client: &Client,
    problem: &QuantizeProblem,
    x: &Buffer,
) -> Result<QuantizedBlocks, KernelError> {
    problem.check(x)?;
    if problem.margin != 0 {
        return Err(KernelError::invalid(OP, "margin", "0 for scales of blocks", problem.margin));
    }
    /// Cubes of a launch on every device.
    const MOST_CUBES: usize = 65_535;
    let QuantizeBlueprint { vector_size, hardware, .. } = QuantizeBlueprint::plan(problem, client);
    let QuantizeProblem { rows, columns, format, layouts, .. } = *problem;
    let copy = |rows: usize, columns: usize| Blocks {
        codes: Buffer::empty(client, rows * padded_row(columns), format.dtype()),
        scales: Buffer::empty(client, scale_words(rows, columns), WORD),
    };
    let of_rows = layouts.rows().then(|| copy(rows, columns));
    let transposed = layouts.transposed().then(|| copy(columns, rows));
    // The other stands in for the one that is not made, which is not compiled in.
    let Some(some) = of_rows.as_ref().or(transposed.as_ref()) else {
        return Err(KernelError::Unsupported { op: OP, reason: "no layout".into() });
    };
    let codes = |copy: &Option<Blocks>| words(&copy.as_ref().unwrap_or(some).codes).arg(4);
    let scales = |copy: &Option<Blocks>| copy.as_ref().unwrap_or(some).scales.arg(1);
    let tiles = rows.div_ceil(blocks::TILE as usize) * columns.div_ceil(blocks::TILE as usize);
    let x = Buffer { elements: problem.elements(), ..x.clone() };
    // SAFETY: x holds the problem's elements, rows of whole vectors; the copies were allocated for the padded rows, and
    // for scales of whole tiles; the kernel stops rows and columns at their ends, and indices were checked.
    ahead::launch(client, |client| unsafe {
        quantize_blocks_kernel::launch_unchecked(
            client,
            CubeCount::Static(tiles.min(MOST_CUBES) as u32, 1, 1),
            CubeDim::new_1d(blocks::UNITS),
            vector_size,
            x.arg(vector_size),
            codes(&of_rows),
            codes(&transposed),
            scales(&of_rows),
            scales(&transposed),
            rows as u32,
            columns as u32,
            (padded_row(columns) / 16) as u32,
            (padded_row(rows) / 16) as u32,
            BlocksBlueprint { format, layouts, hardware },
            problem.input,
        )
    });
    Ok(QuantizedBlocks { rows: of_rows, transposed })
}

/// The numbers that a matrix of so many `rows` and `columns` stands for, in rows of [`padded_row`] elements, as `dtype`:
/// exact in f32 and bf16, and in f16 where its range allows.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when the codes or scales are not those of such a matrix;
/// [`KernelError::Unsupported`] for other dtypes.
pub fn decode_blocks(
    client: &Client,
    matrix: &Blocks,
    [rows, columns]: [usize; 2],
    dtype: ElemType,
) -> Result<Buffer, KernelError> {
    let pitch = padded_row(columns);
    let Some(format) = Fp8Format::of(matrix.codes.dtype) else {
        return Err(matrix.codes.mismatch(OP, "codes", "elements of e4m3 or e5m2"));
    };
    matrix.codes.check(OP, "codes", rows * pitch, format.dtype())?;
    matrix.scales.check(OP, "scales", scale_words(rows, columns), WORD)?;
    let Some(count) = u32::try_from(rows * pitch / 4).ok().filter(|_| is_float(dtype)) else {
        let reason = format!("{} codes as {dtype:?}", rows * pitch);
        return Err(KernelError::Unsupported { op: OP, reason });
    };
    let values = Buffer::empty(client, rows * pitch, dtype);
    if count == 0 {
        return Ok(values);
    }
    let dim = CubeDim::new_1d(UNITS);
    // SAFETY: codes and values hold `count` times four elements, and the scales are those of their rows; the kernel
    // stops units past the end.
    ahead::launch(client, |client| unsafe {
        quantize_decode_blocks_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, count as usize, dim),
            dim,
            words(&matrix.codes).arg(1),
            matrix.scales.arg(1),
            values.arg(4),
            count,
            (pitch / 4) as u32,
            columns.div_ceil(blocks::TILE as usize) as u32,
            format,
            dtype,
        )
    });
    Ok(values)
}

/// The numbers that `codes` stand for, without their scale, as `dtype`: exact in f32, f16 and bf16.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] when the codes are not a multiple of four 8-bit floats;
/// [`KernelError::Unsupported`] for other dtypes.
pub fn decode(client: &Client, codes: &Buffer, dtype: ElemType) -> Result<Buffer, KernelError> {
    let Some(format) = Fp8Format::of(codes.dtype).filter(|_| codes.elements.is_multiple_of(4))
    else {
        return Err(codes.mismatch(OP, "codes", "a multiple of four elements of e4m3 or e5m2"));
    };
    let Some(count) = u32::try_from(codes.elements / 4).ok().filter(|_| is_float(dtype)) else {
        let reason = format!("{} codes as {dtype:?}", codes.elements);
        return Err(KernelError::Unsupported { op: OP, reason });
    };
    let values = Buffer::empty(client, codes.elements, dtype);
    if count == 0 {
        return Ok(values);
    }
    let dim = CubeDim::new_1d(UNITS);
    // SAFETY: both hold `count` times four elements; the kernel stops units past the end.
    ahead::launch(client, |client| unsafe {
        quantize_decode_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, count as usize, dim),
            dim,
            words(codes).arg(1),
            values.arg(4),
            count,
            format,
            dtype,
        )
    });
    Ok(values)
}

/// Codes, four at a time.
fn words(codes: &Buffer) -> Buffer {
    Buffer { handle: codes.handle.clone(), elements: codes.elements / 4, dtype: WORD }
}
