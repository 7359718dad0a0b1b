//! Control commands of the driver ublk, each of which is waited for. They go through a ring of their own, since they are larger than
//! requests of others.

use super::uapi::{self, COMMAND, ControlCommand, Disk, INFO, Info, PARAMETERS, control, feature};
use io_uring::register::Restriction;
use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

const DEVICE: &str = "/dev/ublk-control";
/// Entries of the ring: a command, and what cancels it.
const ENTRIES: u32 = 4;
const THE_COMMAND: u64 = 1;
const ITS_CANCELLATION: u64 = 2;
/// How often is looked whether a command is to be given up.
const LOOK: Duration = Duration::from_millis(50);

/// The driver's control device.
pub(super) struct Control {
    ring: IoUring<Entry128, cqueue::Entry>,
    device: File,
    features: u64,
}

fn because(kind: io::ErrorKind, why: &str) -> io::Error {
    io::Error::new(kind, why)
}

impl Control {
    /// Opens the device.
    ///
    /// # Errors
    /// The kernel has no ublk, or an older one than is needed, or the process may not use it; the message says which.
    pub(super) fn open() -> io::Result<Self> {
        let device = File::options().read(true).write(true).open(DEVICE).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => because(
                error.kind(),
                "there is no /dev/ublk-control: load the kernel's module (modprobe ublk_drv; Linux 6.5 or newer has it)",
            ),
            io::ErrorKind::PermissionDenied => {
                because(error.kind(), "/dev/ublk-control: only root may use it")
            }
            kind => because(kind, &format!("{DEVICE}: {error}")),
        })?;
        let ring = ring()
            .map_err(|error| because(error.kind(), &format!("there is no io_uring for it: {error}")))?;
        let mut opened = Self { ring, device, features: 0 };
        let mut features = [0; 8];
        let old = "the kernel's ublk is too old: Linux 6.5 or newer is needed";
        let asked = opened.call(control::GET_FEATURES, u32::MAX, &mut features, 0);
        asked.map_err(|errno| because(io::Error::from(errno).kind(), old))?;
        opened.features = u64::from_ne_bytes(features);
        let needed = feature::CMD_IOCTL_ENCODE | feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;
        if opened.features & needed != needed {
            return Err(because(io::ErrorKind::Unsupported, old));
        }
        Ok(opened)
    }

    /// Whether the size of a device can change.
    pub(super) fn can_resize(&self) -> bool {
        self.features & feature::UPDATE_SIZE != 0
    }

    /// Adds a device; with `u32::MAX` as its number, the kernel chooses one. What the kernel has made of it.
    pub(super) fn add(&mut self, wanted: &Info) -> Result<Info, Errno> {
        let mut bytes = wanted.encode();
        self.call(control::ADD_DEV, wanted.id, &mut bytes, 0)?;
        Ok(Info::decode(&bytes))
    }

    pub(super) fn info(&mut self, id: u32) -> Result<Info, Errno> {
        let mut bytes = [0; INFO];
        self.call(control::GET_DEV_INFO, id, &mut bytes, 0)?;
        Ok(Info::decode(&bytes))
    }

    pub(super) fn set_parameters(&mut self, id: u32, disk: &Disk) -> Result<(), Errno> {
        self.call(control::SET_PARAMS, id, &mut disk.encode(), 0)
    }

    /// Sectors of a device, and whether it is read-only.
    pub(super) fn size(&mut self, id: u32) -> Result<(u64, bool), Errno> {
        let mut bytes: [u8; PARAMETERS] = uapi::asked();
        self.call(control::GET_PARAMS, id, &mut bytes, 0)?;
        Ok(uapi::size_of(&bytes))
    }

    pub(super) fn set_size(&mut self, id: u32, sectors: u64) -> Result<(), Errno> {
        self.call(control::UPDATE_SIZE, id, &mut [], sectors)
    }

    /// Makes the disk of a device, once its requests are waited for. `is_hopeless` is asked now and then.
    pub(super) fn start(&mut self, id: u32, is_hopeless: impl Fn() -> bool) -> Result<(), Errno> {
        self.call_unless(control::START_DEV, id, &mut [], own_number(), is_hopeless)
    }

    /// Removes the disk of a device.
    pub(super) fn stop(&mut self, id: u32) -> Result<(), Errno> {
        self.call(control::STOP_DEV, id, &mut [], 0)
    }

    /// Removes a device, as soon as nobody has it open.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), Errno> {
        match self.call(control::DEL_DEV_ASYNC, id, &mut [], 0) {
            // Linux before 6.9.
            Err(Errno::OPNOTSUPP | Errno::INVAL) => self.call(control::DEL_DEV, id, &mut [], 0),
            result => result,
        }
    }

    /// Prepares a device for another server.
    pub(super) fn begin_recovery(&mut self, id: u32) -> Result<(), Errno> {
        self.call(control::START_USER_RECOVERY, id, &mut [], 0)
    }

    /// Has the requests come again, once they are waited for.
    pub(super) fn end_recovery(&mut self, id: u32, is_hopeless: impl Fn() -> bool) -> Result<(), Errno> {
        self.call_unless(control::END_USER_RECOVERY, id, &mut [], own_number(), is_hopeless)
    }

    fn call(&mut self, code: u32, device: u32, buffer: &mut [u8], data: u64) -> Result<(), Errno> {
        self.call_unless(code, device, buffer, data, || false)
    }

    fn call_unless(
        &mut self,
        code: u32,
        device: u32,
        buffer: &mut [u8],
        data: u64,
        is_hopeless: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        let bytes: [u8; COMMAND] = ControlCommand { device, buffer, data }.encode();
        let fd = Fd(self.device.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, code).cmd(bytes).build().user_data(THE_COMMAND);
        // SAFETY: the kernel reads and writes `buffer` at most, which is borrowed until the completion: this call returns with it
        // only.
        unsafe { self.ring.submission().push(&entry) }.map_err(|_| Errno::BUSY)?;
        let mut is_given_up = false;
        loop {
            let time = Timespec::from(LOOK);
            match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
                Ok(_) => {}
                Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::TIME | Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                    _ => panic!("io_uring_enter: {error}"),
                },
            }
            while let Some(completion) = self.ring.completion().next() {
                if completion.user_data() == THE_COMMAND {
                    let result = completion.result();
                    return if result < 0 { Err(Errno::from_raw_os_error(-result)) } else { Ok(()) };
                }
            }
            if !is_given_up && is_hopeless() {
                is_given_up = true;
                let cancel = opcode::AsyncCancel::new(THE_COMMAND).build().user_data(ITS_CANCELLATION);
                // SAFETY: it has no pointers.
                let _ = unsafe { self.ring.submission().push(&Entry128::from(cancel)) };
            }
        }
    }
}

fn own_number() -> u64 {
    u64::from(std::process::id())
}

/// A ring that does nothing but this.
fn ring() -> io::Result<IoUring<Entry128, cqueue::Entry>> {
    let ring = IoUring::builder().setup_r_disabled().build(ENTRIES)?;
    let operations = [opcode::UringCmd80::CODE, opcode::AsyncCancel::CODE];
    let submitter = ring.submitter();
    submitter.register_restrictions(&mut operations.map(Restriction::sqe_op))?;
    submitter.register_enable_rings()?;
    Ok(ring)
}
