//! Launches of recorded kernels by the CUDA driver.

use crate::launch::{Launch, Memory, Parameter, Places, Recorded, Taken, Tensor};
use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::{result, sys};
use std::{
    ffi::{CString, c_void},
    mem::MaybeUninit,
    ptr,
};

/// The first CUDA device, with its primary context.
pub(crate) struct Gpu {
    device: sys::CUdevice,
    stream: sys::CUstream,
}

/// Memory of the device, given back at its end.
struct Buffer {
    /// Where the simulator has it.
    simulated: u64,
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Buffer {
    fn new(simulated: u64, data: &[u8]) -> Result<Self> {
        // SAFETY: The context of `Gpu` is current. A length of 0 is no allocation for CUDA.
        let address = unsafe { result::malloc_sync(data.len().max(1)) }?;
        let buffer = Self { simulated, address, bytes: data.len() };
        // SAFETY: The allocation has the length of `data`.
        unsafe { result::memcpy_htod_sync(address, data) }?;
        Ok(buffer)
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut data = vec![0; self.bytes];
        // SAFETY: The allocation has that length.
        unsafe { result::memcpy_dtoh_sync(&mut data, self.address) }?;
        Ok(data)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it, and nothing runs any more. An error has no one to go to.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// The bytes of a parameter, aligned as a tensor map has to be.
#[repr(C, align(64))]
struct Slot([u8; 4096]);

impl Gpu {
    pub(crate) fn first() -> Result<Self> {
        // SAFETY: Only asks whether the driver's library can be loaded.
        ensure!(unsafe { sys::is_culib_present() }, "there is no CUDA driver");
        result::init()?;
        let device = result::device::get(0)?;
        // SAFETY: The device exists. The context stays current and alive until the program's end.
        unsafe {
            let context = result::primary_ctx::retain(device)?;
            result::ctx::set_current(context)?;
        }
        Ok(Self { device, stream: ptr::null_mut() })
    }

    pub(crate) fn name(&self) -> Result<String> {
        Ok(result::device::get_name(self.device)?)
    }

    /// The compute capability, as `90`.
    pub(crate) fn capability(&self) -> Result<u32> {
        use sys::CUdevice_attribute_enum::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        // SAFETY: The device exists.
        let [major, minor] = [MAJOR, MINOR]
            .map(|which| unsafe { result::device::get_attribute(self.device, which) });
        Ok(u32::try_from(10 * major? + minor?)?)
    }

    /// Runs a launch, and reads all memory after it.
    pub(crate) fn run(&self, recorded: &Recorded) -> Result<Memory> {
        let buffers: Vec<Buffer> = recorded
            .before
            .iter()
            .map(|(address, data)| Buffer::new(*address, data))
            .collect::<Result<_>>()?;
        let mut places = Places::default();
        for buffer in &buffers {
            places.add(buffer.simulated, buffer.bytes, buffer.address);
        }
        let launch = &recorded.launch;
        let mut slots: Vec<Slot> = Vec::new();
        for parameter in &launch.parameters {
            let mut slot = Slot([0; 4096]);
            let bytes = match parameter {
                Parameter::Bytes(digits) => places.bytes(digits)?,
                Parameter::Tensor(tensor) => encode(tensor, &places)?,
            };
            let room = slot.0.get_mut(..bytes.len()).context("a parameter is too long")?;
            room.copy_from_slice(&bytes);
            slots.push(slot);
        }
        let mut pointers: Vec<*mut c_void> =
            slots.iter_mut().map(|slot| slot.0.as_mut_ptr().cast()).collect();

        self.launch(&recorded.ptx, launch, &mut pointers)?;
        buffers.iter().map(|buffer| Ok((buffer.simulated, buffer.read()?))).collect()
    }

    /// The results of an instruction of one f32, bits of arguments in and bits of results out.
    pub(crate) fn compute(&self, opcode: &str, arguments: &[u32]) -> Result<Vec<u32>> {
        const THREADS: u32 = 128;
        let bytes: Vec<u8> = arguments.iter().flat_map(|argument| argument.to_le_bytes()).collect();
        let buffer = Buffer::new(0, &bytes)?;
        let ptx = format!(
            "{HEADER}
.visible .entry compute(.param .u64 at, .param .u32 count) {{
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
    ld.param.u64 %rd1, [at];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r2, {THREADS}, %r3;
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 ret;
    mul.wide.u32 %rd2, %r4, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.f32 %f1, [%rd3];
    {opcode} %f2, %f1;
    st.global.f32 [%rd3], %f2;
    ret;
}}"
        );
        let mut address = buffer.address;
        let mut count = u32::try_from(arguments.len())?;
        let mut pointers = [(&raw mut address).cast(), (&raw mut count).cast()];
        let launch = Launch {
            entry: "compute".into(),
            grid: [count.div_ceil(THREADS).max(1), 1, 1],
            block: [THREADS, 1, 1],
            dynamic_shared: 0,
            schedules: 0,
            parameters: Vec::new(),
        };
        self.launch(&ptx, &launch, &mut pointers)?;
        let words = buffer.read()?;
        Ok(words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    /// Runs a kernel to its end. Parameters live until then.
    fn launch(&self, ptx: &str, launch: &Launch, pointers: &mut [*mut c_void]) -> Result<()> {
        let image = CString::new(ptx)?;
        // SAFETY: The image is PTX that ends with a zero.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }?;
        // SAFETY: The module was loaded above and is unloaded below. Of recorded launches the simulator found no
        // access outside of the buffers; `compute` stays within its count.
        unsafe {
            let kernel =
                result::module::get_function(module, CString::new(launch.entry.as_str())?)?;
            let most =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(kernel, most, launch.dynamic_shared as i32)?;
            let [grid, block] = [launch.grid, launch.block].map(|[x, y, z]| (x, y, z));
            let (shared, stream) = (launch.dynamic_shared, self.stream);
            result::launch_kernel(kernel, grid, block, shared, stream, pointers)?;
            result::stream::synchronize(self.stream)?;
            result::module::unload(module)?;
        }
        Ok(())
    }
}

/// The first lines of a module that every GPU from Ampere on runs.
const HEADER: &str = ".version 7.8
.target sm_80
.address_size 64";

/// The map of a tensor, for the copy engine. Only bits are copied, so the type says no more than its size.
fn encode(tensor: &Tensor, places: &Places) -> Result<Vec<u8>> {
    use sys::{
        CUtensorMapDataType_enum as DataType, CUtensorMapFloatOOBfill_enum as Fill,
        CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
        CUtensorMapSwizzle_enum as Swizzle,
    };
    let data_type = match tensor.element_bytes {
        1 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        other => bail!("elements of {other} bytes"),
    };
    let swizzle = match tensor.swizzle_bytes {
        0 => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        other => bail!("a swizzle of {other} bytes"),
    };
    let interleave = Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE;
    let promotion = Promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE;
    let fill = Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    let base = places.address(tensor.address).context("a tensor lies in no buffer")?;
    let base = base as *mut c_void;
    let rank = tensor.shape.len() as u32;
    let mut map = MaybeUninit::uninit();
    let status = match &tensor.taken {
        Taken::Tile(tile) => {
            let steps = vec![1_u32; tile.len()];
            // SAFETY: All lists have as many elements as the rank says, strides one less.
            unsafe {
                sys::cuTensorMapEncodeTiled(
                    map.as_mut_ptr(),
                    data_type,
                    rank,
                    base,
                    tensor.shape.as_ptr(),
                    tensor.strides.as_ptr(),
                    tile.as_ptr(),
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
        Taken::Pixels { lower, upper, steps, channels, pixels } => {
            let steps = [&[1], steps.as_slice(), &[1]].concat();
            // SAFETY: As above; corners have two elements less than the rank.
            unsafe {
                sys::cuTensorMapEncodeIm2col(
                    map.as_mut_ptr(),
                    data_type,
                    rank,
                    base,
                    tensor.shape.as_ptr(),
                    tensor.strides.as_ptr(),
                    lower.as_ptr(),
                    upper.as_ptr(),
                    *channels,
                    *pixels,
                    steps.as_ptr(),
                    interleave,
                    swizzle,
                    promotion,
                    fill,
                )
            }
        }
    };
    status.result().context("a tensor map")?;
    // SAFETY: The driver has filled it.
    let map = unsafe { map.assume_init() };
    Ok(map.opaque.iter().flat_map(|word| word.to_le_bytes()).collect())
}
