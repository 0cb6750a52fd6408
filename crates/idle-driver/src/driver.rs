//! What programs ask the driver and go on with.

use crate::{SUCCESS, handle, tell, tell_text};
use std::{
    alloc::{Layout, alloc_zeroed},
    ffi::{c_char, c_int, c_uint, c_void},
    sync::atomic::{AtomicU64, Ordering},
};

/// Memory of the GPU.
const MEMORY: usize = 80 << 30;

/// Device memory that was given out.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// What an H100 of 132 multiprocessors says of itself, by the numbers of `CUdevice_attribute`; others are 1.
const ATTRIBUTES: [(c_int, c_int); 25] = [
    (2, 1024), // threads of a block, along x
    (3, 1024), // along y
    (4, 64),   // along z
    (1, 1024), // in all
    (5, 0x7fff_ffff),
    (6, 0xffff),
    (7, 0xffff),
    (8, 49_152), // shared memory of a block
    (10, 32),
    (12, 65_536), // registers of a block
    (13, 1_980_000),
    (16, 132),
    (36, 2_619_000),
    (37, 5120),
    (38, 50 << 20), // the cache
    (39, 2048),
    (75, 9), // compute capability 9.0
    (76, 0),
    (81, 233_472),
    (82, 65_536),
    (97, 232_448), // shared memory that a block may ask for
    (106, 32),
    (115, 1),
    (40, 1),
    (41, 1),
];

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, _: c_int) -> c_int {
    let known = ATTRIBUTES.iter().find(|(attribute, _)| *attribute == which);
    // SAFETY: the program's own result.
    unsafe { tell(value, known.map_or(1, |(_, value)| *value)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, _: c_int) -> c_int {
    // SAFETY: the program says how much room there is.
    unsafe { tell_text(name, room as usize, c"NVIDIA H100 80GB HBM3") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, room: c_int, _: c_int) -> c_int {
    // SAFETY: the program says how much room there is.
    unsafe { tell_text(id, room as usize, c"0000:01:00.0") }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    /// `CUDA_ERROR_INVALID_DEVICE`.
    const NONE: c_int = 101;
    // SAFETY: the program's own result.
    unsafe { tell(device, ordinal) };
    if ordinal == 0 { SUCCESS } else { NONE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    let taken = TAKEN.load(Ordering::Relaxed) as usize;
    // SAFETY: the program's own results.
    unsafe { tell(free, MEMORY.saturating_sub(taken)) + tell(total, MEMORY) }
}

/// The address of `bytes` more bytes.
fn taken(bytes: usize) -> u64 {
    /// Where addresses begin.
    const FIRST: u64 = 0x7f00_0000_0000;
    const PAGE: usize = 2 << 20;
    FIRST + TAKEN.fetch_add(bytes.next_multiple_of(PAGE) as u64, Ordering::Relaxed)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(address, taken(bytes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocAsync(address: *mut u64, bytes: usize) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(address, taken(bytes)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAllocHost_v2(memory: *mut *mut u8, bytes: usize) -> c_int {
    const ALIGNMENT: usize = 4096;
    let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGNMENT) else { return SUCCESS };
    // SAFETY: the layout has a size; the result is the program's own.
    unsafe { tell(memory, alloc_zeroed(layout)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(memory: *mut *mut u8, bytes: usize, _: c_uint) -> c_int {
    // SAFETY: the caller's.
    unsafe { cuMemAllocHost_v2(memory, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, _: u64, bytes: usize) -> c_int {
    // SAFETY: the program has memory for what it asks for.
    unsafe { to.write_bytes(0, bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize) -> c_int {
    // SAFETY: the caller's.
    unsafe { cuMemcpyDtoH_v2(to, from, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, which: c_int) -> c_int {
    // Threads of a block, and registers of a thread.
    let of_kernel = match which {
        0 => 1024,
        4 => 64,
        _ => 0,
    };
    // SAFETY: the program's own result.
    unsafe { tell(value, of_kernel) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, most: *mut c_int) -> c_int {
    // SAFETY: the program's own results.
    unsafe { tell(least, 0) + tell(most, -5) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphGetNodes(_: *mut c_void, _: *mut c_void, count: *mut usize) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(count, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamIsCapturing(_: *mut c_void, status: *mut c_int) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(status, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(_: *mut c_void, graph: *mut usize) -> c_int {
    // SAFETY: the program's own result.
    unsafe { tell(graph, handle()) }
}

/// Functions whose one result that matters comes first, and its value.
macro_rules! results {
    ($($name:ident: $kind:ty = $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(result: *mut $kind) -> c_int {
            // SAFETY: the program's own result.
            unsafe { tell(result, $value) }
        }
    )*};
}

results! {
    cuCtxGetCurrent: usize = 0x77;
    cuCtxGetDevice: c_int = 0;
    cuDeviceGetCount: c_int = 1;
    cuDeviceGetUuid: [u8; 16] = [7; 16];
    cuDeviceGetUuid_v2: [u8; 16] = [7; 16];
    cuDevicePrimaryCtxRetain: usize = 0x77;
    cuDeviceTotalMem_v2: usize = MEMORY;
    cuDriverGetVersion: c_int = 13_000;
    cuEventCreate: usize = handle();
    cuEventElapsedTime: f32 = 0.01;
    cuEventElapsedTime_v2: f32 = 0.01;
    cuGraphInstantiateWithFlags: usize = handle();
    cuLibraryGetKernel: usize = handle();
    cuLibraryLoadData: usize = handle();
    cuModuleGetFunction: usize = handle();
    cuModuleLoadData: usize = handle();
    cuModuleLoadDataEx: usize = handle();
    cuOccupancyMaxActiveBlocksPerMultiprocessor: c_int = 1;
    cuStreamCreate: usize = handle();
    cuStreamCreateWithPriority: usize = handle();
}

/// Functions that give the name of an error.
macro_rules! names {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(_error: c_int, text: *mut *const c_char) -> c_int {
            // SAFETY: the program's own result.
            unsafe { tell(text, c"none".as_ptr()) }
        }
    )*};
}

names! { cuGetErrorName cuGetErrorString }
