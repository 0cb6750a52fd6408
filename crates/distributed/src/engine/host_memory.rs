//! Memory of the host that two processes of one machine share.

use std::{ffi::c_void, io};

/// Memory that both see. It is kept as long as the process lives, as whatever uses it by its address may.
pub(super) struct HostMemory {
    pub(super) place: *mut c_void,
    /// By what another process finds it, while this one lives.
    pub(super) name: String,
}

/// What only Linux has.
#[cfg(not(target_os = "linux"))]
impl HostMemory {
    pub(super) fn new(_bytes: usize) -> io::Result<Self> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    pub(super) fn open(_name: &str, _bytes: usize) -> io::Result<Self> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }
}

#[cfg(target_os = "linux")]
impl HostMemory {
    /// So much memory, of zeros.
    pub(super) fn new(bytes: usize) -> io::Result<Self> {
        use std::{
            fs::File,
            os::fd::{AsRawFd, FromRawFd},
        };

        // SAFETY: the name ends with a zero.
        let descriptor = unsafe { libc::memfd_create(c"blackburn".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was opened just now, and is nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(bytes as u64)?;
        let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let place = mapped(&file, bytes)?;
        // The name goes with the descriptor.
        std::mem::forget(file);
        Ok(Self { place, name })
    }

    /// That of another process.
    pub(super) fn open(name: &str, bytes: usize) -> io::Result<Self> {
        let file = std::fs::File::options().read(true).write(true).open(name)?;
        if file.metadata()?.len() != bytes as u64 {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        Ok(Self { place: mapped(&file, bytes)?, name: name.to_owned() })
    }
}

#[cfg(target_os = "linux")]
fn mapped(file: &std::fs::File, bytes: usize) -> io::Result<*mut c_void> {
    use std::os::fd::AsRawFd;

    let (uses, descriptor) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
    // SAFETY: it is mapped where nothing else is, and the file has so many bytes.
    let place =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, uses, libc::MAP_SHARED, descriptor, 0) };
    match place {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        place => Ok(place),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_other_reads() {
        const BYTES: usize = 1 << 20;
        let own = HostMemory::new(BYTES).expect("there is memory");
        let other = HostMemory::open(&own.name, BYTES).expect("it is there");
        assert_ne!(own.place, other.place);
        // SAFETY: both have so many bytes, and one thread alone uses them.
        let last = unsafe {
            own.place.cast::<u8>().add(BYTES - 1).write_volatile(7);
            other.place.cast::<u8>().add(BYTES - 1).read_volatile()
        };
        assert_eq!(last, 7);
        assert!(HostMemory::open(&own.name, 2 * BYTES).is_err(), "of another size");
        assert!(HostMemory::open("/proc/self/fd/99999", BYTES).is_err());
    }
}
