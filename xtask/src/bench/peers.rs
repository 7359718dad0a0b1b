//! The programs and libraries that zebu is measured beside, and which of them are asked for.

use super::lab::Lab;
use super::load::{Load, Program};
use crate::ab::Side;
use crate::process::{output, run};
use crate::toolchain::{cargo, target_dir};
use crate::{Outcome, root};
use clap::ValueEnum;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Qemu,
    Imago,
    #[value(name = "qcow2-rs")]
    Qcow2Rs,
    Nbdkit,
}

impl Peer {
    /// The first word of its label in tables.
    pub(super) fn label(self) -> &'static str {
        match self {
            Peer::Qemu => "QEMU",
            Peer::Imago => "imago",
            Peer::Qcow2Rs => "qcow2-rs",
            Peer::Nbdkit => "nbdkit",
        }
    }

    /// The peer that a side with this label is of.
    fn of(label: &str) -> Option<Self> {
        Self::value_variants().iter().copied().find(|peer| label.starts_with(peer.label()))
    }
}

/// The peers of a run.
pub(crate) struct Peers {
    chosen: Vec<Peer>,
    /// The program that runs a load on the Rust engines, built when it is needed first; or why there is none.
    program: OnceCell<Result<PathBuf, String>>,
}

impl Peers {
    /// All, if none is named.
    pub(super) fn new(chosen: &[Peer]) -> Self {
        let chosen = if chosen.is_empty() { Peer::value_variants() } else { chosen };
        Self { chosen: chosen.to_vec(), program: OnceCell::new() }
    }

    pub(super) fn has(&self, peer: Peer) -> bool {
        self.chosen.contains(&peer)
    }

    /// Whether a side with this label is one of the other Rust engines.
    pub(super) fn is_engine(label: &str) -> bool {
        Peer::of(label).is_some_and(|peer| ENGINES.contains(&peer))
    }

    /// Whether a side with this label takes part: zebu's own always do.
    pub(super) fn take_part(&self, label: &str) -> bool {
        Peer::of(label).is_none_or(|peer| self.has(peer))
    }

    /// Why the other Rust engines' program could not be built, if somebody asked for it: no fault of theirs.
    pub(super) fn not_built(&self) -> Option<&str> {
        self.program.get()?.as_ref().err().map(String::as_str)
    }

    fn program(&self) -> Outcome<&Path> {
        self.program.get_or_init(build).as_deref().map_err(Clone::clone)
    }

    /// `load` on a Rust engine, on an image that is there.
    pub(super) fn side<'a>(&'a self, peer: Peer, load: Load, image: &'a Path) -> Side<'a> {
        let run = move || load.timed(self.command(peer, load, image)?);
        Side { label: peer.label().into(), run: Box::new(run) }
    }

    pub(super) fn command(&self, peer: Peer, load: Load, image: &Path) -> Outcome<Command> {
        let mut command = Command::new(self.program()?);
        command.arg(peer.label());
        command.args(["-d", &load.depth.to_string(), "-c", &load.count.to_string()]);
        command.args(["-s", &load.block.to_string(), "-S", &load.step.to_string()]);
        if load.write {
            command.arg("-w");
        }
        command.arg(image);
        Ok(command)
    }
}

/// The two Rust engines that a table can ask.
pub(super) const ENGINES: [Peer; 2] = [Peer::Imago, Peer::Qcow2Rs];

/// The load on an image that is there, beside QEMU and each of the other Rust engines.
pub(super) fn beside_all(lab: &Lab, name: &str, load: Load, image: &Path) -> Outcome {
    let qemu = (row(name, Peer::Qemu), load.on(lab, Program::Qemu, image));
    let engines = ENGINES.map(|peer| (row(name, peer), lab.peers.side(peer, load, image)));
    lab.compare_each(load.on(lab, Program::Zebu, image), [qemu].into_iter().chain(engines).collect())
}

/// Whether [`beside_all`] would measure anything.
pub(super) fn wants_beside_all(lab: &Lab, name: &str) -> bool {
    [Peer::Qemu].into_iter().chain(ENGINES).any(|peer| lab.wants(&row(name, peer)))
}

/// The name of a row beside a peer.
pub(super) fn row(name: &str, peer: Peer) -> String {
    format!("{name}, beside {}", peer.label())
}

fn build() -> Result<PathBuf, String> {
    let target = target_dir()?.join("peers");
    let manifest = root().join("bench/peers/Cargo.toml");
    run(cargo()
        .args(["build", "--quiet", "--release", "--locked", "--manifest-path"])
        .arg(manifest)
        .arg("--target-dir")
        .arg(&target))?;
    let program = target.join("release/zebu-peers");
    output(Command::new(&program).arg("--version"))?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_names_its_peer_and_zebus_own_sides_always_take_part() {
        let only_qemu = Peers::new(&[Peer::Qemu]);
        for (label, takes_part) in [
            ("QEMU, slices", true),
            ("nbdkit", false),
            ("imago", false),
            ("zebu", true),
            ("raw", true),
            ("fio raw", true),
        ] {
            assert_eq!(only_qemu.take_part(label), takes_part, "{label}");
        }
        assert!(Peers::new(&[]).take_part("qcow2-rs"));
    }
}
