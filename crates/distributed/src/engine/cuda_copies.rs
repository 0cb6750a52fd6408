//! The functions of CUDA's driver by which processes copy into each other's memory.

use super::{
    cuda_library::{Event, bound, checked},
    library::{CallFailed, Status, Stream, functions},
};
use std::ffi::{CStr, c_char, c_uint, c_void};

/// `CUdeviceptr`.
pub(super) type Address = u64;
/// `CUfunction`.
pub(super) type Function = *mut c_void;
type Module = *mut c_void;

/// `CUipcMemHandle`: by what another process finds memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedMemory(pub(super) [u8; 64]);

/// `CU_STREAM_WAIT_VALUE_GEQ`: up to the value or past it, modulo 2^32.
const AT_LEAST: c_uint = 0;
/// `CU_MEMHOSTREGISTER_PORTABLE` and `CU_MEMHOSTREGISTER_DEVICEMAP`.
const FOR_DEVICES: c_uint = 1 | 2;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const WITH_PEER_ACCESS: c_uint = 1;

functions! {
    /// What copies between processes take of CUDA's driver. Old ones have not all of it.
    CudaCopies {
        release = "cuMemFree_v2": fn(Address) -> Status;
        copy_to_device = "cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, Stream) -> Status;
        allocate = "cuMemAlloc_v2": fn(*mut Address, usize) -> Status;
        set_bytes = "cuMemsetD8_v2": fn(Address, u8, usize) -> Status;
        copy = "cuMemcpy": fn(Address, Address, usize) -> Status;
        register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint) -> Status;
        device_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut Address, *mut c_void, c_uint) -> Status;
        copy_behind = "cuMemcpyAsync": fn(Address, Address, usize, Stream) -> Status;
        shared = "cuIpcGetMemHandle": fn(*mut SharedMemory, Address) -> Status;
        open = "cuIpcOpenMemHandle_v2": fn(*mut Address, SharedMemory, c_uint) -> Status;
        close = "cuIpcCloseMemHandle": fn(Address) -> Status;
        write_value = "cuStreamWriteValue32_v2": fn(Stream, Address, u32, c_uint) -> Status;
        wait_value = "cuStreamWaitValue32_v2": fn(Stream, Address, u32, c_uint) -> Status;
        stream_wait = "cuStreamWaitEvent": fn(Stream, Event, c_uint) -> Status;
        module_load = "cuModuleLoadData": fn(*mut Module, *const c_void) -> Status;
        module_function = "cuModuleGetFunction": fn(*mut Function, Module, *const c_char) -> Status;
        launch = "cuLaunchKernel": fn(
            Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream, *mut *mut c_void,
            *mut *mut c_void
        ) -> Status;
        error_string = "cuGetErrorString": fn(Status, *mut *const c_char) -> Status;
    }
}

impl CudaCopies {
    pub(super) fn load() -> Result<Self, String> {
        bound(Self::bind)
    }

    fn check(&self, function: &'static str, status: Status) -> Result<(), CallFailed> {
        checked(self.error_string, function, status)
    }

    /// Memory of the current context that other processes may open, of zeros. It is kept as long as the process lives:
    /// nobody knows how long others use it.
    pub(super) fn memory(&self, bytes: usize) -> Result<(Address, SharedMemory), CallFailed> {
        let (mut address, mut shared) = (0, SharedMemory([0; 64]));
        // SAFETY: each call writes to what it is given, and the memory has so many bytes.
        unsafe {
            self.check("cuMemAlloc", (self.allocate)(&raw mut address, bytes))?;
            self.check("cuMemsetD8", (self.set_bytes)(address, 0, bytes))?;
            self.check("cuIpcGetMemHandle", (self.shared)(&raw mut shared, address))?;
        }
        Ok((address, shared))
    }

    /// Memory of the current context, with anything in it.
    pub(super) fn own_memory(&self, bytes: usize) -> Result<Address, CallFailed> {
        let mut address = 0;
        // SAFETY: it writes to the address.
        let status = unsafe { (self.allocate)(&raw mut address, bytes) };
        self.check("cuMemAlloc", status).map(|()| address)
    }

    /// Where memory of the host is for the current context.
    ///
    /// # Safety
    ///
    /// It has so many bytes, and stays as long as the process lives.
    pub(super) unsafe fn mapped(
        &self,
        place: *mut c_void,
        bytes: usize,
    ) -> Result<Address, CallFailed> {
        let mut address = 0;
        // SAFETY: the caller's; the second call writes to the address.
        unsafe {
            self.check("cuMemHostRegister", (self.register)(place, bytes, FOR_DEVICES))?;
            let status = (self.device_pointer)(&raw mut address, place, 0);
            self.check("cuMemHostGetDevicePointer", status)?;
        }
        Ok(address)
    }

    /// Gives it back, when the device is done with all that uses it.
    ///
    /// # Safety
    ///
    /// It was given by [`own_memory`](Self::own_memory).
    pub(super) unsafe fn free(&self, address: Address) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuMemFree", unsafe { (self.release)(address) })
    }

    /// Has `stream` write `data`, which may change as soon as this returns.
    ///
    /// # Safety
    ///
    /// There is as much memory at the address, which nothing else uses when the stream comes to it.
    pub(super) unsafe fn copy_from_host<T: Copy>(
        &self,
        stream: Stream,
        data: &[T],
        to: Address,
    ) -> Result<(), CallFailed> {
        let bytes = size_of_val(data);
        // SAFETY: the caller's; of memory that is not pinned the driver takes a copy at once.
        let status = unsafe { (self.copy_to_device)(to, data.as_ptr().cast(), bytes, stream) };
        self.check("cuMemcpyHtoDAsync", status)
    }

    /// Where another process's memory is for this one.
    pub(super) fn opened(&self, shared: SharedMemory) -> Result<Address, CallFailed> {
        let mut address = 0;
        // SAFETY: it writes to the address, and refuses what is no memory of a process that lives.
        let status = unsafe { (self.open)(&raw mut address, shared, WITH_PEER_ACCESS) };
        self.check("cuIpcOpenMemHandle", status).map(|()| address)
    }

    /// Closes it.
    ///
    /// # Safety
    ///
    /// It was given by [`opened`](Self::opened), and nothing uses it any more.
    pub(super) unsafe fn close(&self, address: Address) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuIpcCloseMemHandle", unsafe { (self.close)(address) })
    }

    /// Copies and waits for it.
    ///
    /// # Safety
    ///
    /// Both have so many bytes.
    pub(super) unsafe fn copy_now(
        &self,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuMemcpy", unsafe { (self.copy)(to, from, bytes) })
    }

    /// The number at an address.
    ///
    /// # Safety
    ///
    /// There are four bytes.
    pub(super) unsafe fn number_at(&self, address: Address) -> Result<u32, CallFailed> {
        let mut number = 0u32;
        // SAFETY: the caller's; the number has four bytes.
        unsafe { self.copy_now(address, (&raw mut number).expose_provenance() as Address, 4) }?;
        Ok(number)
    }

    /// Has `stream` copy.
    ///
    /// # Safety
    ///
    /// Both have so many bytes, and nothing else uses them when the stream comes to it.
    pub(super) unsafe fn copy(
        &self,
        stream: Stream,
        from: Address,
        to: Address,
        bytes: usize,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuMemcpyAsync", unsafe { (self.copy_behind)(to, from, bytes, stream) })
    }

    /// Has `stream` write a number, which others see behind all that it did before.
    ///
    /// # Safety
    ///
    /// There are four bytes at the address.
    pub(super) unsafe fn write(
        &self,
        stream: Stream,
        address: Address,
        number: u32,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        let status = unsafe { (self.write_value)(stream, address, number, 0) };
        self.check("cuStreamWriteValue32", status)
    }

    /// Has `stream` wait until the number at the address is at least `number`, modulo 2^32.
    ///
    /// # Safety
    ///
    /// There are four bytes at the address.
    pub(super) unsafe fn wait_for_number(
        &self,
        stream: Stream,
        address: Address,
        number: u32,
    ) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        let status = unsafe { (self.wait_value)(stream, address, number, AT_LEAST) };
        self.check("cuStreamWaitValue32", status)
    }

    /// Has `stream` wait for `event`.
    ///
    /// # Safety
    ///
    /// Both live and belong to one context.
    pub(super) unsafe fn wait(&self, stream: Stream, event: Event) -> Result<(), CallFailed> {
        // SAFETY: the caller's.
        self.check("cuStreamWaitEvent", unsafe { (self.stream_wait)(stream, event, 0) })
    }

    /// Functions of `ptx`, which are kept as long as the process lives.
    pub(super) fn functions<const N: usize>(
        &self,
        ptx: &CStr,
        names: [&CStr; N],
    ) -> Result<[Function; N], CallFailed> {
        let mut module = std::ptr::null_mut();
        // SAFETY: it writes to the pointer, and reads up to the zero.
        let status = unsafe { (self.module_load)(&raw mut module, ptx.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        let mut functions = [std::ptr::null_mut(); N];
        for (function, name) in functions.iter_mut().zip(names) {
            // SAFETY: as above.
            let status =
                unsafe { (self.module_function)(&raw mut *function, module, name.as_ptr()) };
            self.check("cuModuleGetFunction", status)?;
        }
        Ok(functions)
    }

    /// Has `stream` run `function` in so many blocks of so many threads.
    ///
    /// # Safety
    ///
    /// The function takes these parameters, and what they point to has the elements that it uses.
    pub(super) unsafe fn launch<const N: usize>(
        &self,
        stream: Stream,
        function: Function,
        [blocks, threads]: [u32; 2],
        mut parameters: [u64; N],
    ) -> Result<(), CallFailed> {
        let mut pointers = parameters.each_mut().map(|parameter| (&raw mut *parameter).cast());
        let (parameters, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the caller's; parameters are read before it returns.
        let status = unsafe {
            (self.launch)(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none)
        };
        self.check("cuLaunchKernel", status)
    }
}
