//! Names that an image refers to, changed while a command opens them.
//!
//! A program of its own: beside it, `strangers.rs` would count this one's memory as that of the commands that it measures.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use zebu_tests::hostile::{base, references};
use zebu_tests::program::zebu;
use zebu_tests::scratch::Scratch;

const IMAGE: &str = "image";
/// Writes an image that refers to a name.
type Refer = fn(&Path, &str);

/// Bytes of the file beside the image, and of the file elsewhere; no byte in common.
const BESIDE: u8 = 0x77;
const SECRET: u8 = 0x99;

/// While a name is a file beside the image at one moment and a link out of the directory at the next, a command that may
/// follow names in the directory only reads the file or fails.
#[test]
fn a_name_that_is_swapped_for_a_link_never_leads_outside() {
    /// Opened before the other half of the moments, it must have been seen to work and to be refused this often.
    const SEEN: usize = 5;
    let scratch = Scratch::new("swapped");
    let (inside, outside) = (scratch.path().join("inside"), scratch.path().join("outside"));
    for (dir, byte) in [(&inside, BESIDE), (&inside.join("sub"), BESIDE), (&outside, SECRET)] {
        std::fs::create_dir_all(dir).expect("scratch is writable");
        std::fs::write(dir.join("base"), vec![byte; base::SIZE as usize]).expect("scratch is writable");
    }
    std::os::unix::fs::symlink("../outside/base", inside.join("other-base")).expect("scratch is writable");
    std::os::unix::fs::symlink("../outside", inside.join("other-sub")).expect("scratch is writable");
    // (What is swapped, with what; the name in the image; how it refers to it.)
    let ways: [(&str, &str, &str, Refer); 4] = [
        ("base", "other-base", "base", |image, name| references::backing(image, name, "raw")),
        ("base", "other-base", "base", references::data_file),
        ("sub", "other-sub", "sub/base", |image, name| references::backing(image, name, "raw")),
        ("sub", "other-sub", "sub/base", references::data_file),
    ];
    for (here, there, name, write) in ways {
        write(&inside.join(IMAGE), name);
        let is_over = AtomicBool::new(false);
        let (mut worked, mut refused) = (0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let dir = std::fs::File::open(&inside).expect("it is a directory");
                while !is_over.load(Relaxed) {
                    rustix::fs::renameat_with(&dir, here, &dir, there, rustix::fs::RenameFlags::EXCHANGE)
                        .expect("the file system can exchange names");
                    std::thread::yield_now();
                }
            });
            for _ in 0..2000 {
                let words =
                    ["convert", "--allow-refs", "local", "-f", "qcow2", "-O", "raw", IMAGE, "out.raw"];
                let out = zebu(&inside, words);
                if out.code == Some(0) {
                    worked += 1;
                    let read = std::fs::read(inside.join("out.raw")).expect("just written");
                    assert!(!read.contains(&SECRET), "{name}: what lies outside was read: {out}");
                } else {
                    refused += 1;
                    assert!(out.code == Some(1) && !out.stderr.is_empty(), "{out}");
                }
                if worked >= SEEN && refused >= SEEN && worked + refused >= 40 {
                    break;
                }
            }
            is_over.store(true, Relaxed);
        });
        assert!(worked >= SEEN && refused >= SEEN, "{name}: {worked} worked, {refused} were refused");
    }
}
