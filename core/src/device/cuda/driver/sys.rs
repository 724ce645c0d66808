//! The calls into the driver and the runtime compiler that cudarc leaves unsafe, each wrapped once.
//! Kernels are launched in the `launch` modules of the families and nowhere else.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char};
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, mem_pool};
use cudarc::driver::sys::{CUdevice_attribute, CUmemPool_attribute};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, CudaView, DevicePtr, DevicePtrMut, DeviceRepr,
    DriverError, PinnedHostSlice,
};
use cudarc::nvrtc;

use crate::error::{Error, Result};

/// The error that made CUDA unusable for the rest of the process.
static LOST: OnceLock<String> = OnceLock::new();

/// Turns a driver error into ours, naming the call.
pub(in crate::device::cuda) fn failed(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| {
        if !is_sticky(source) {
            return Error::Cuda { call, source };
        }
        LOST.get_or_init(|| {
            format!(
                "{call} failed earlier in this process ({source}), which cannot use CUDA any more"
            )
        });
        Error::DeviceLost { call, source }
    }
}

/// The reason why CUDA cannot be used any more, if that is so.
pub(in crate::device::cuda) fn why_lost() -> Option<String> {
    LOST.get().cloned()
}

/// Whether every later call will fail as well: the context is gone, or its memory is corrupt.
fn is_sticky(error: DriverError) -> bool {
    use cudarc::driver::sys::CUresult as Code;
    matches!(
        error.0,
        Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// Whether the driver's library can be loaded; without it every other call would panic.
pub(in crate::device::cuda) fn has_driver() -> bool {
    // SAFETY: loads the library, whose initialisers are the vendor's, and looks at nothing in it.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// Whether the runtime compiler's library can be loaded.
pub(in crate::device::cuda) fn has_compiler() -> bool {
    // SAFETY: loads the library, whose initialisers are the vendor's, and looks at nothing in it.
    unsafe { nvrtc::sys::is_culib_present() }
}

/// The properties of a device that the driver reports without initialising it.
pub(in crate::device::cuda) struct Properties {
    pub(in crate::device::cuda) name: String,
    pub(in crate::device::cuda) capability: (i32, i32),
    pub(in crate::device::cuda) memory: u64,
}

/// The properties of a device. The driver must be initialised.
pub(in crate::device::cuda) fn properties(ordinal: usize) -> Result<Properties, DriverError> {
    let device = result::device::get(ordinal as i32)?;
    let name = result::device::get_name(device)?;
    let [major, minor] = [
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    ]
    // SAFETY: `device` comes from `get`.
    .map(|attribute| unsafe { result::device::get_attribute(device, attribute) });
    // SAFETY: `device` comes from `get`.
    let memory = unsafe { result::device::total_mem(device) }? as u64;
    Ok(Properties { name, capability: (major?, minor?), memory })
}

/// The device's primary context. cudarc's own tracking of reads and writes is off: events in `upload`
/// and `memory` keep the order between the two streams.
pub(in crate::device::cuda) fn context(ordinal: usize) -> Result<Arc<CudaContext>, DriverError> {
    let context = CudaContext::new(ordinal)?;
    // SAFETY: no buffer was allocated yet. Every buffer used on a second stream waits for the event
    // of the first, and is freed only after an event of its last use (`Memory::retire`).
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

/// Lets the device's pool keep this much unused memory instead of returning it at every
/// synchronisation.
pub(in crate::device::cuda) fn keep_in_pool(
    context: &CudaContext,
    mut bytes: u64,
) -> Result<(), DriverError> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    // SAFETY: the device is the context's; the attribute's value is a u64, which outlives the call.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        mem_pool::set_attribute(pool, attribute, (&raw mut bytes).cast())
    }
}

/// Free bytes, including unused memory that the pool keeps.
pub(in crate::device::cuda) fn free_memory(context: &CudaContext) -> Result<u64, DriverError> {
    let free = context.mem_get_info()?.0 as u64;
    if !context.has_async_alloc() {
        return Ok(free);
    }
    let mut pool_bytes = [0u64; 2];
    // SAFETY: the device is the context's; both attributes are u64 and outlive the calls.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let [reserved, used] = &mut pool_bytes;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        mem_pool::get_attribute(pool, attribute, (reserved as *mut u64).cast())?;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
        mem_pool::get_attribute(pool, attribute, (used as *mut u64).cast())?;
    }
    Ok(free + pool_bytes[0].saturating_sub(pool_bytes[1]))
}

/// Allocates device memory in the order of a stream. Its contents are undefined.
pub(in crate::device::cuda) fn allocate(
    stream: &Arc<CudaStream>,
    bytes: usize,
) -> Result<CudaSlice<u8>, DriverError> {
    // SAFETY: every bit pattern is a u8, and no host code reads device memory that no kernel or
    // copy has written before.
    unsafe { stream.alloc::<u8>(bytes) }
}

/// Allocates page-locked host memory, zeroed; not write-combined, so that the host can also read it
/// fast.
pub(in crate::device::cuda) fn allocate_pinned(
    context: &Arc<CudaContext>,
    bytes: usize,
) -> Result<PinnedHostSlice<u8>, DriverError> {
    // SAFETY: filled below, before it is read.
    let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }?;
    pinned.as_mut_slice()?.fill(0);
    Ok(pinned)
}

/// Starts copying the first `bytes` of a pinned buffer to the beginning of device memory. `sent`
/// completes when the buffer may be written again: wait for it first.
///
/// # Panics
/// If either side is shorter than `bytes`.
pub(in crate::device::cuda) fn copy_to_device(
    stream: &Arc<CudaStream>,
    from: &mut PinnedHostSlice<u8>,
    sent: &CudaEvent,
    to: &mut CudaSlice<u8>,
    bytes: usize,
) -> Result<()> {
    assert!(bytes <= to.len());
    let source = from.as_mut_slice().map_err(failed("cuEventSynchronize"))?;
    let source = &source[..bytes];
    stream.context().bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
    let (pointer, _guard) = to.device_ptr_mut(stream);
    // SAFETY: both sides hold `bytes` bytes (checked above) and belong to this context. `to` is used
    // on this stream only. `from` is pinned memory that lives as long as the device's registry entry,
    // and is written only after `sent`, recorded below, has passed.
    unsafe { result::memcpy_htod_async(pointer, source, stream.cu_stream()) }
        .map_err(failed("cuMemcpyHtoDAsync"))?;
    sent.record(stream).map_err(failed("cuEventRecord"))
}

/// Starts copying device memory to the beginning of a pinned buffer, in the order of a stream.
/// `arrived` completes when the copy is done: wait for it before reading the buffer.
///
/// # Panics
/// If the buffer is shorter.
pub(in crate::device::cuda) fn copy_to_host(
    stream: &Arc<CudaStream>,
    from: &CudaView<'_, u8>,
    to: &mut PinnedHostSlice<u8>,
    arrived: &CudaEvent,
) -> Result<()> {
    let target = to.as_mut_slice().map_err(failed("cuEventSynchronize"))?;
    let target = &mut target[..from.len()];
    stream.context().bind_to_thread().map_err(failed("cuCtxSetCurrent"))?;
    // An earlier copy that was abandoned may still be in flight.
    arrived.synchronize().map_err(failed("cuEventSynchronize"))?;
    let (pointer, _guard) = from.device_ptr(stream);
    // SAFETY: both sides hold as many bytes and belong to this context. `to` is pinned memory that
    // lives as long as the device's registry entry, and is read, or written by another copy, only after
    // `arrived`, recorded below, has passed.
    unsafe { result::memcpy_dtoh_async(target, pointer, stream.cu_stream()) }
        .map_err(failed("cuMemcpyDtoHAsync"))?;
    arrived.record(stream).map_err(failed("cuEventRecord"))
}

/// Numbers, or structs of numbers without padding, as bytes.
pub(in crate::device::cuda) fn bytes_of<T: DeviceRepr>(numbers: &[T]) -> &[u8] {
    // SAFETY: `DeviceRepr` types used here (numbers, and structs whose layouts are asserted) have
    // no padding, u8 has no alignment, and the slice borrows `numbers` for as long as it lives.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Copies values to the beginning of a device buffer, in the order of a stream.
///
/// # Panics
/// If they do not fit.
pub(in crate::device::cuda) fn write<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    to: &mut CudaSlice<u8>,
    values: &[T],
) -> Result<()> {
    let bytes = bytes_of(values);
    let mut place = to.slice_mut(..bytes.len());
    stream.memcpy_htod(bytes, &mut place).map_err(failed("cuMemcpyHtoDAsync"))
}

/// Sets all bytes of a device buffer, in the order of a stream.
pub(in crate::device::cuda) fn fill(
    stream: &Arc<CudaStream>,
    buffer: &mut CudaSlice<u8>,
    byte: u8,
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    let bytes = buffer.len();
    let (pointer, _guard) = buffer.device_ptr_mut(stream);
    // SAFETY: the buffer has as many bytes, and every byte is a u8.
    unsafe { result::memset_d8_async(pointer, byte, bytes, stream.cu_stream()) }
}

/// The first `count` values of a device buffer, or of a part of one, after all earlier work in the stream.
///
/// # Panics
/// If the buffer is shorter.
pub(in crate::device::cuda) fn read<T: DeviceRepr + Clone + Default>(
    stream: &Arc<CudaStream>,
    from: &impl DevicePtr<u8>,
    count: usize,
) -> Result<Vec<T>, DriverError> {
    assert!(count * size_of::<T>() <= from.len());
    let mut values = vec![T::default(); count];
    stream.context().bind_to_thread()?;
    let (pointer, _guard) = from.device_ptr(stream);
    // SAFETY: both sides hold `count` values of T, which is plain numbers, and the copy is over
    // before `values` can be seen or freed.
    unsafe { result::memcpy_dtoh_async(&mut values, pointer, stream.cu_stream()) }?;
    stream.synchronize()?;
    Ok(values)
}

/// Major and minor version of the runtime compiler.
pub(in crate::device::cuda) fn nvrtc_version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers.
    let code = unsafe { nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    code.result().map_err(|e| nvrtc_failed("nvrtcVersion", "", e, String::new()))?;
    Ok((major, minor))
}

/// The build of the runtime compiler: its version, and the size and modification time of its file;
/// or else the PTX of an empty program, which begins with the build number but takes some 20 ms.
/// Updates of a release have the same version.
pub(in crate::device::cuda) fn nvrtc_build() -> Result<&'static str> {
    static BUILD: OnceLock<String> = OnceLock::new();
    if let Some(build) = BUILD.get() {
        return Ok(build);
    }
    let (major, minor) = nvrtc_version()?;
    // If the build is unknown, the version remains.
    let build = file_of_nvrtc().or_else(|| nvrtc_ptx(c"").ok()).unwrap_or_default();
    Ok(BUILD.get_or_init(|| format!("nvrtc {major}.{minor}\n{build}")))
}

/// The size and modification time of the file from which the runtime compiler was loaded, if the
/// system tells.
fn file_of_nvrtc() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps.lines().filter_map(|line| {
        let path = &line[line.find('/')?..];
        path.rsplit('/').next()?.starts_with("libnvrtc.so").then_some(path)
    });
    // Of two compilers in the process, which one is used does not show here.
    let path = paths.next().filter(|path| paths.all(|other| other == *path))?;
    let file = std::fs::metadata(path).ok()?;
    let time = file.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(format!("{} {}", file.len(), time.as_nanos()))
}

/// Compiles a program to PTX with the compiler's default options.
fn nvrtc_ptx(source: &CStr) -> Result<String> {
    let (file, name) = ("empty.cu", "an empty program");
    let program = NvrtcProgram::new(file, name, source)?;
    // SAFETY: the program is live until dropped.
    unsafe { nvrtc::result::compile_program::<&str>(program.handle, &[]) }
        .map_err(|e| nvrtc_failed("nvrtcCompileProgram", name, e, program.log()))?;
    // SAFETY: the program is live, and compiled.
    let ptx = unsafe { nvrtc::result::get_ptx(program.handle) }
        .map_err(|e| nvrtc_failed("nvrtcGetPTX", name, e, program.log()))?;
    Ok(text_of(&ptx))
}

/// The text before the first NUL.
fn text_of(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    String::from_utf8_lossy(&bytes).trim().to_string()
}

/// Compiles a program to a cubin; `file` and `name` are for messages.
pub(in crate::device::cuda) fn nvrtc_compile(
    file: &str,
    name: &str,
    source: &str,
    options: &[String],
) -> Result<Vec<u8>> {
    let source = CString::new(source).expect("kernel sources have no NUL");
    let program = NvrtcProgram::new(file, name, &source)?;
    // SAFETY: the handle is of a program that `new` created, and is destroyed only when `program` is dropped.
    unsafe { nvrtc::result::compile_program(program.handle, options) }
        .map_err(|e| nvrtc_failed("nvrtcCompileProgram", name, e, program.log()))?;
    program.cubin(name)
}

/// A program of the runtime compiler; borrows its source, which the compiler may refer to.
struct NvrtcProgram<'a> {
    handle: nvrtc::sys::nvrtcProgram,
    _source: &'a CStr,
}

impl<'a> NvrtcProgram<'a> {
    fn new(file: &str, name: &str, source: &'a CStr) -> Result<Self> {
        let file = CString::new(file).expect("file names have no NUL");
        let handle = nvrtc::result::create_program(source, Some(file.as_c_str()))
            .map_err(|e| nvrtc_failed("nvrtcCreateProgram", name, e, String::new()))?;
        Ok(Self { handle, _source: source })
    }

    fn log(&self) -> String {
        // SAFETY: the handle is of a program that `new` created, and is destroyed only when `self` is dropped.
        let log = unsafe { nvrtc::result::get_program_log(self.handle) }.unwrap_or_default();
        text_of(&log)
    }

    fn cubin(&self, name: &str) -> Result<Vec<u8>> {
        let mut size = 0usize;
        // SAFETY: the program is live and `size` is a live integer.
        unsafe { nvrtc::sys::nvrtcGetCUBINSize(self.handle, &raw mut size) }
            .result()
            .map_err(|e| nvrtc_failed("nvrtcGetCUBINSize", name, e, self.log()))?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the compiler writes `size` bytes, which `cubin` holds.
        unsafe { nvrtc::sys::nvrtcGetCUBIN(self.handle, cubin.as_mut_ptr().cast::<c_char>()) }
            .result()
            .map_err(|e| nvrtc_failed("nvrtcGetCUBIN", name, e, self.log()))?;
        Ok(cubin)
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. An error would leave nothing to do.
        let _ = unsafe { nvrtc::result::destroy_program(self.handle) };
    }
}

fn nvrtc_failed(
    call: &'static str,
    kernel: &str,
    error: nvrtc::result::NvrtcError,
    log: String,
) -> Error {
    Error::Nvrtc { call, kernel: kernel.to_string(), code: format!("{:?}", error.0), log }
}
