//! An event loop (epoll) with a queue beside its other descriptors.
//!
//! ```sh
//! cargo run --example event_loop -- disk.qcow2
//! ```

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use zebu::storage::IoBuf;
use zebu::{CreateOptions, Disk, Durability, OpenOptions, Request};

/// The number of the queue's descriptor in the loop. Others would have other numbers.
const QUEUE: u64 = 1;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&PathBuf::from(std::env::args_os().nth(1).unwrap_or_else(|| "disk.qcow2".into())))
}

/// The program, on a new disk at `path`.
pub(crate) fn run(path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    Disk::create(path, &CreateOptions::default().size(1 << 30))?;
    let options = OpenOptions::default().access(zebu::Access::ReadWrite);
    let disk = Disk::open(path, &options)?;
    // This thread never blocks but in `epoll::wait`.
    let queue = disk.queue().depth(64).promise_to_drive().build()?;

    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, queue.as_fd(), EventData::new_u64(QUEUE), EventFlags::IN)?;

    for i in 0..128 {
        let bufs = IoBuf::copy_of(&[i as u8; 4096]).into();
        queue.submit(Request::Write { offset: i * 65536, bufs, durability: Durability::Volatile }, i);
    }
    queue.submit(Request::Flush, 128);
    let mut events = Vec::with_capacity(8);
    while queue.pending() > 0 {
        // There is a timer only while a request waits for another thread.
        let timeout = queue.next_timer().map(Timespec::try_from).transpose()?;
        rustix::io::retry_on_intr(|| {
            epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref())
        })?;
        if events.is_empty() {
            queue.start();
        }
        for event in events.drain(..) {
            if event.data.u64() == QUEUE {
                while let Some(completion) = queue.next_completion() {
                    completion.result?;
                    println!("request {} has ended", completion.user_data);
                }
            }
        }
    }
    drop(queue);
    disk.close()?;
    Ok(())
}
