//! A queue over a guest's memory, as a virtual machine monitor has it: made on one thread, used on another, woken by the
//! monitor's own eventfd, without a copy.
//!
//! ```sh
//! cargo run --features vm-memory --example guest_memory -- disk.qcow2
//! ```

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zebu::storage::GuestBuffers;
use zebu::vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zebu::{Access, CreateOptions, Disk, Durability, OpenOptions, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`.
pub(crate) fn run(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    Disk::create(path, &CreateOptions::default().size(1 << 30))?;
    let options = OpenOptions::default().access(Access::ReadWrite);
    let disk = Disk::open(path, &options)?;

    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 16 << 20)])?);
    let guest = GuestBuffers::new(Arc::clone(&memory));
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    // The ring and its descriptors are made here, where no filter of system calls is in the way yet.
    let detached = disk.queue().depth(128).event_fd(event.try_clone()?).detached()?;

    let device = std::thread::spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let queue = detached.attach();
        memory.write_slice(b"written by the guest", GuestAddress(0x1000))?;
        // A descriptor chain of two parts.
        let parts = [(GuestAddress(0x1000), 512), (GuestAddress(0x8000), 3584)];
        let bufs = guest.buffers(parts).ok_or("not in memory")?;
        queue.submit(Request::Write { offset: 0, bufs, durability: Durability::Durable }, 1);
        wait(&queue, &event)?;
        let parts = [(GuestAddress(0x20000), 4096)];
        let bufs = guest.buffers(parts).ok_or("not in memory")?;
        queue.submit(Request::Read { offset: 0, bufs }, 2);
        wait(&queue, &event)?;
        let mut back = [0; 20];
        memory.read_slice(&mut back, GuestAddress(0x20000))?;
        println!("{}", String::from_utf8_lossy(&back));
        Ok(())
    });
    device.join().map_err(|_| "the device's thread panicked")?.map_err(|e| e.to_string())?;
    disk.close()?;
    Ok(())
}

/// Waits until all requests have ended. Starting them takes a look at the queue, as a monitor does after the guest's kick.
fn wait(queue: &zebu::Queue, event: &std::os::fd::OwnedFd) -> zebu::Result<()> {
    loop {
        while let Some(completion) = queue.next_completion() {
            completion.result?;
        }
        if queue.pending() == 0 {
            return Ok(());
        }
        let _ = rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(event, PollFlags::IN)], None));
        // As users of eventfds do.
        let _ = rustix::io::read(event, &mut [0; 8]);
    }
}
