use super::stack::{WalkLaunch, stack_frames_kernel};
use crate::{
    KernelError, ahead,
    buffer::{Buffer, check_float},
    device::widest_vector,
    divisor::{DIVIDEND_LIMIT, divisor},
};
use cubecl::{CubeDim, calculate_cube_count_elemwise, client::Client, ir::ElemType};

const OP: &str = "stack_frames";
const UNITS: u32 = 256;

/// How frames and taps of the output walk those of x, as the [module](super) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameWalk {
    /// Frames side by side.
    pub taps: usize,
    /// Frames of x, times `stride`, from one of the output to the next.
    pub scale: usize,
    /// The same from the first one to the first tap of the output's first one.
    pub shift: isize,
    /// The same from tap to tap.
    pub step: isize,
    /// Of so many places between frames one is a frame.
    pub stride: usize,
}

impl FrameWalk {
    /// That of a convolution, whose x is read.
    pub fn of_output(taps: usize, stride: usize, padding: usize, dilation: usize) -> Self {
        let (shift, step) = (-(padding as isize), dilation as isize);
        Self { taps, scale: stride, shift, step, stride: 1 }
    }

    /// That of its gradient, for which the output's is read.
    pub fn of_input(taps: usize, stride: usize, padding: usize, dilation: usize) -> Self {
        let (shift, step) = (padding as isize, -(dilation as isize));
        Self { taps, scale: 1, shift, step, stride }
    }

    /// Whether each frame of the output is the same one of x.
    pub fn is_identity(&self) -> bool {
        *self == Self { taps: 1, scale: 1, shift: 0, step: self.step, stride: 1 }
    }
}

/// Volumes and what is made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameProblem {
    /// Volumes.
    pub volumes: usize,
    /// Frames of a volume of x.
    pub frames: usize,
    /// Frames of one of the output.
    pub out_frames: usize,
    /// Pixels of a frame.
    pub pixels: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Channels of a group.
    pub channels: usize,
    /// Which frames of x are side by side.
    pub walk: FrameWalk,
    /// Type of x and the output.
    pub dtype: ElemType,
}

impl FrameProblem {
    /// Elements of x.
    pub fn elements(&self) -> usize {
        self.volumes * self.frames * self.pixels * self.groups * self.channels
    }

    /// Elements of the output.
    pub fn out_elements(&self) -> usize {
        let images = self.volumes * self.out_frames * self.pixels;
        images * self.groups * self.walk.taps * self.channels
    }
}

/// The frames of x side by side.
///
/// # Errors
///
/// [`KernelError::InvalidProblem`] where x has another size or type; [`KernelError::Unsupported`] for a dtype other than
/// f32, f16 and bf16, and for 2^31 vectors or places of frames and more.
pub fn stack_frames(
    client: &Client,
    problem: &FrameProblem,
    x: &Buffer,
) -> Result<Buffer, KernelError> {
    let FrameProblem { frames, out_frames, pixels, groups, channels, walk, dtype, .. } = *problem;
    check_float(OP, "x", dtype)?;
    x.check(OP, "x", problem.elements(), dtype)?;
    let out = Buffer::empty(client, problem.out_elements(), dtype);
    if out.elements == 0 {
        return Ok(out);
    }
    let width = widest_vector(client, dtype.size(), |size| {
        channels.is_multiple_of(size)
            && x.offset_bytes().is_multiple_of((size * dtype.size()) as u64)
    });
    let vectors = out.elements / width;
    let farthest = out_frames * walk.scale + walk.shift.unsigned_abs();
    let reach = farthest + walk.taps * walk.step.unsigned_abs();
    if [vectors, x.elements / width, reach, walk.stride].iter().any(|size| *size >= DIVIDEND_LIMIT)
    {
        let reason = format!("{vectors} vectors, {reach} places of frames");
        return Err(KernelError::unsupported(OP, reason));
    }
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let cube_dim = CubeDim::new_1d(units);
    let cubes = calculate_cube_count_elemwise(client, vectors, cube_dim);
    // SAFETY: x and the output have the elements of the problem; units stop at the last vector, and read frames of x
    // alone, counted in 31 bits.
    ahead::launch(client, |client| unsafe {
        stack_frames_kernel::launch_unchecked(
            client,
            cubes.clone(),
            cube_dim,
            width,
            x.arg(width),
            out.arg(width),
            WalkLaunch::new(
                vectors as u32,
                divisor(channels / width),
                divisor(walk.taps),
                divisor(groups),
                divisor(pixels),
                divisor(out_frames),
                frames as u32,
                walk.scale as i32,
                walk.shift as i32,
                walk.step as i32,
                divisor(walk.stride),
            ),
            dtype,
        );
    });
    Ok(out)
}
