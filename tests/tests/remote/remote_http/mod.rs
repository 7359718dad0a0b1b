//! Disks on web servers: nginx, with proxies, certificates, users, and a network that breaks in between.

mod access;
mod broken_network;
mod memory;
mod redirects;
mod sources;

use std::path::Path;
use std::process::Command;
use zebu_tests::program::{Finished, find, finish, replacing, run_in, zebu, zebu_program};

/// Bytes of the disk.
pub(crate) const LEN: usize = 24 << 20;

/// A disk with data and zeroes, as `www/disk.raw`, `www/disk.qcow2` and, compressed, `www/packed.qcow2`.
pub(crate) fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN];
    let mut state = 1u64;
    for word in content[1 << 20..17 << 20].chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        word.copy_from_slice(&(state >> 11).to_le_bytes());
    }
    std::fs::create_dir_all(dir.join("www")).unwrap();
    std::fs::write(dir.join("www/disk.raw"), &content).unwrap();
    let qemu_img = find("qemu-img").expect("qemu-img is missing: `cargo xtask setup` installs it");
    for options in ["www/disk.qcow2", "-c www/packed.qcow2"] {
        let line = format!("convert -f raw -O qcow2 www/disk.raw {options}");
        run_in(dir, &qemu_img, line.split_whitespace()).ok();
    }
    content
}

pub(crate) fn flat(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("flat.raw")).unwrap()
}

/// Converts to `flat.raw`.
pub(crate) fn convert(dir: &Path, words: &[&str], name: &str) -> Finished {
    let _ = std::fs::remove_file(dir.join("flat.raw"));
    let mut line = vec!["convert", "-O", "raw"];
    line.extend(words);
    line.extend([name, "flat.raw"]);
    zebu(dir, line)
}

pub(crate) fn zebu_with(dir: &Path, variables: &[(&str, &str)], words: &[&str]) -> Finished {
    let mut command = Command::new(zebu_program());
    command.args(replacing(words)).current_dir(dir).envs(variables.iter().copied());
    finish(command)
}
