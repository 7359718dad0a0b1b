//! Options of commands whose sources may be packed.

use crate::failure::Failure;
use crate::watch::Watch;
use std::path::Path;
use zebu_disks::packed::{PackedChoice, Prepared, Reader};
use zebu_disks::size::size_argument;
use zebu_disks::{Context, ImageSpec};

/// The options.
#[derive(Debug, clap::Args)]
pub(crate) struct PackedArgs {
    /// The disk in a tar file or OVA [default: the one that its OVF names]
    #[arg(hide_short_help = true, long, value_name = "NAME")]
    member: Option<String>,

    /// Unpack at most so many bytes of a packed source [default: as the target's size allows, or 256G]
    #[arg(hide_short_help = true, long, value_name = "SIZE", value_parser = size_argument)]
    max_size: Option<u64>,
}

impl PackedArgs {
    /// Whether a part of a tar file is named.
    pub(crate) fn has_member(&self) -> bool {
        self.member.is_some()
    }

    /// Bytes of a disk that is unpacked while it is read.
    pub(crate) fn most_of_disk(&self) -> u64 {
        self.choice().most_of_disk()
    }

    /// Unpacks a source, if it is packed, or begins to, as [`zebu_disks::packed::prepare`].
    pub(crate) fn prepare(
        &self,
        context: &Context,
        spec: &mut ImageSpec,
        targets: &[&Path],
        reader: impl Fn() -> Result<Reader, Failure>,
        watch: &Watch,
    ) -> Result<Prepared, Failure> {
        let hear = |phase: &'static str, done: u64, total: u64| watch.note(phase, done, total);
        let watch = zebu_disks::Watch::new(watch.cancel().clone(), &hear);
        zebu_disks::packed::prepare(context, &self.choice(), spec, targets, reader, &watch)
    }

    fn choice(&self) -> PackedChoice {
        PackedChoice { member: self.member.clone(), max_size: self.max_size }
    }
}
