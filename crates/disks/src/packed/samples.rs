//! Samples for tests: files of the usual packers, and what is in them.

use super::decode::Packing;
use super::decoding::{Source, Tail};
use super::pieces::{Pieces, Range};
use crate::notices::Notices;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use zebu_engine::jobs::Cancel;

/// The output of a program that packs.
pub(super) fn pack(line: &str, content: &[u8]) -> Vec<u8> {
    let mut words = line.split(' ');
    let program = words.next().unwrap();
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("{program}: {e}; `cargo xtask setup` installs it"));
    let mut stdin = child.stdin.take().unwrap();
    let content = content.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&content).unwrap());
    let out = child.wait_with_output().unwrap();
    writer.join().unwrap();
    out.stdout
}

/// Bytes of which a third is noise.
pub(super) fn content(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    (0..len)
        .map(|at| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(at as u64);
            if at / 5000 % 3 == 0 { (state >> 56) as u8 } else { 0 }
        })
        .collect()
}

/// A file of these bytes, packed as its first bytes tell.
pub(super) fn source(packed: &[u8]) -> Source {
    let mut file = tempfile::tempfile().expect("the directory of temporary files is writable");
    file.write_all(packed).expect("just made");
    let bytes = Arc::new(Pieces::of(Range { start: 0, len: packed.len() as u64 }));
    let packing = Packing::of(packed).unwrap_or(Packing::Xz);
    Source {
        file: Arc::new(file),
        bytes,
        packing,
        cancel: Cancel::new(),
        tail: Tail::of(Notices::default(), "sample".into()),
    }
}

/// Processor time of this thread.
pub(super) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
