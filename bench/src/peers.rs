//! The peers of a run, and the program that puts a load on the other Rust engines.

use crate::Outcome;
use crate::process::{output, run};
use crate::workspace::{cargo, root, target_dir};
use clap::ValueEnum;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A peer that a run may be confined to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Qemu,
    Imago,
    #[value(name = "qcow2-rs")]
    Qcow2Rs,
    Nbdkit,
}

/// The peers of a run.
pub(crate) struct Peers {
    chosen: Vec<Peer>,
    /// The program that runs a load on the other Rust engines, built when it is needed first.
    program: OnceCell<Outcome<PathBuf>>,
}

impl Peers {
    /// All, if none is named.
    pub(crate) fn new(chosen: &[Peer]) -> Self {
        let chosen = if chosen.is_empty() { Peer::value_variants() } else { chosen };
        Self { chosen: chosen.to_vec(), program: OnceCell::new() }
    }

    /// Whether a side takes part; those that are no peer's always do.
    pub(crate) fn take_part(&self, who: &str) -> bool {
        let names = [
            ("QEMU", Peer::Qemu),
            ("imago", Peer::Imago),
            ("qcow2-rs", Peer::Qcow2Rs),
            ("nbdkit", Peer::Nbdkit),
        ];
        let peer = names.iter().find(|(name, _)| who.starts_with(name));
        peer.is_none_or(|(_, peer)| self.chosen.contains(peer))
    }

    pub(crate) fn program(&self) -> Outcome<&Path> {
        self.program.get_or_init(build_peers).as_deref().map_err(Clone::clone)
    }
}

fn build_peers() -> Outcome<PathBuf> {
    let target = target_dir()?.join("peers");
    let manifest = root().join("bench/peers/Cargo.toml");
    let mut build = cargo();
    build.args(["build", "--quiet", "--release", "--locked", "--manifest-path"]).arg(manifest);
    run(build.arg("--target-dir").arg(&target)).map_err(|e| format!("the other Rust engines: {e}"))?;
    let program = target.join("release/zebu-peers");
    output(Command::new(&program).arg("--version"))?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_whose_side_it_is_and_zebus_own_always_take_part() {
        let only_qemu = Peers::new(&[Peer::Qemu]);
        let taking_part = ["QEMU, whole tables", "nbdkit", "imago", "zebu", "raw", "fio, raw file"]
            .map(|who| only_qemu.take_part(who));
        assert_eq!(taking_part, [true, false, false, true, true, true]);
        assert!(Peers::new(&[]).take_part("qcow2-rs"));
    }
}
