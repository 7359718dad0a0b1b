//! Samples of an interrupted backup, compared with the disk that it is to go on with, and with its image. To compare all
//! would take as long as to copy it again.

use super::options::{BackupOptions, SourceErrors};
use super::unreadable::Unreadable;
use crate::jobs::manifest::{Digest, ManifestReader};
use crate::jobs::zeros::is_known_zero;
use crate::progress::Cancel;
use crate::{Error, ErrorKind, Image, Remedy, Result};
use std::path::Path;
use zebu_storage::Worker;

/// Most clusters that are compared of those that hold something, and bytes of them; some are, however large they are.
const DATA: u64 = 192;
const DATA_BYTES: u64 = 64 << 20;
const LEAST_DATA: u64 = 64;
/// Most runs of zero clusters of which two are compared.
const ZEROES: u64 = 32;

/// Some of many, evenly spread: all of them, or between half of `most` and `most`.
struct Spread<T> {
    most: usize,
    step: u64,
    seen: u64,
    kept: Vec<T>,
}

impl<T> Spread<T> {
    fn new(most: u64) -> Self {
        Self { most: most as usize, step: 1, seen: 0, kept: Vec::new() }
    }

    fn offer(&mut self, item: T) {
        if self.seen.is_multiple_of(self.step) {
            if self.kept.len() == self.most {
                let mut index = 0;
                self.kept.retain(|_| {
                    index += 1;
                    index % 2 == 1
                });
                self.step *= 2;
            }
            if self.seen.is_multiple_of(self.step) {
                self.kept.push(item);
            }
        }
        self.seen += 1;
    }
}

/// Clusters of an interrupted backup, and what its manifest says of them.
pub(super) struct Samples(Vec<Sample>);

struct Sample {
    offset: u64,
    len: u64,
    digest: Digest,
}

impl Samples {
    /// Chooses some of the first `done` bytes that a manifest tells of.
    ///
    /// # Errors
    /// The manifest can't be read; cancelled.
    pub(super) fn choose(manifest: &Path, done: u64, cancel: &Cancel) -> Result<Self> {
        let mut reader = ManifestReader::open(manifest, cancel)?;
        let cluster = reader.subject.cluster_size;
        let mut data = Spread::new((DATA_BYTES / cluster).clamp(LEAST_DATA, DATA));
        let mut zeroes = Spread::new(ZEROES);
        while let Some((first, count, digest)) = reader.next_run()? {
            cancel.check()?;
            match digest {
                Digest::Zero => zeroes.offer([first, first + count / 2]),
                Digest::Hash(_) => data.offer((first, digest)),
            }
        }
        let zeroes = zeroes.kept.into_iter().flatten().map(|cluster| (cluster, Digest::Zero));
        let samples = data.kept.into_iter().chain(zeroes).map(|(index, digest)| {
            let offset = index * cluster;
            Sample { offset, len: cluster.min(done.saturating_sub(offset)), digest }
        });
        Ok(Self(samples.filter(|sample| sample.len > 0).collect()))
    }

    /// Compares the source with them.
    ///
    /// # Errors
    /// The source is another disk, or was written since; it can't be read.
    pub(super) async fn compare_source(
        &self,
        worker: &Worker,
        source: &Image,
        options: &BackupOptions,
        unreadable: &Unreadable,
    ) -> Result<()> {
        for &Sample { offset, len, digest } in &self.0 {
            options.control.cancel.check()?;
            // What could not be read then is zero there, whatever the disk holds.
            if unreadable.touches(offset..offset + len) {
                continue;
            }
            let found = match digest_of(worker, source, offset, len).await {
                Ok(found) => found,
                Err(_) if options.source_errors == SourceErrors::Skip => continue,
                Err(error) => return Err(error),
            };
            if found != digest {
                let message = "the interrupted backup holds something else: it is of another disk, or the disk was \
                               written since. Name the right one, or begin anew";
                return Err(Error::new(ErrorKind::InvalidArgument, message)
                    .on(source.path())
                    .at_guest(offset)
                    .with_remedy(Remedy::RestartBackup));
            }
        }
        Ok(())
    }

    /// Compares the partial image with them, and with it what it stands on.
    ///
    /// # Errors
    /// The image is damaged, or does not belong to the manifest.
    pub(super) async fn compare_partial(
        &self,
        worker: &Worker,
        partial: &Image,
        cancel: &Cancel,
    ) -> Result<()> {
        for &Sample { offset, len, digest } in &self.0 {
            cancel.check()?;
            let found = digest_of(worker, partial, offset, len).await;
            let found = found.map_err(|error| error.with_remedy(Remedy::RestartBackup))?;
            if found != digest {
                let message = "the partial image does not hold what its manifest says: begin the backup anew";
                return Err(Error::new(ErrorKind::Corrupt, message)
                    .on(partial.path())
                    .at_guest(offset)
                    .with_remedy(Remedy::RestartBackup));
            }
        }
        Ok(())
    }
}

async fn digest_of(worker: &Worker, image: &Image, offset: u64, len: u64) -> Result<Digest> {
    if is_known_zero(worker, image, offset, len).await? {
        return Ok(Digest::Zero);
    }
    let (result, bufs) = image.read_source(worker, offset, worker.buffer(len as usize).into()).await;
    result?;
    let mut bytes = vec![0; len as usize];
    bufs.copy_to(0, &mut bytes);
    Ok(Digest::of(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_all() {
        for many in [1u64, 8, 9, 100, 10_000] {
            let mut spread = Spread::new(8);
            (0..many).for_each(|item| spread.offer(item));
            let kept = spread.kept;
            assert!(kept.len() as u64 >= many.min(4) && kept.len() <= 8, "{many}: {kept:?}");
            let step = kept.get(1).map_or(1, |second| second - kept[0]);
            assert!(kept.windows(2).all(|pair| pair[1] - pair[0] == step), "{many}: {kept:?}");
            assert!(many - kept[kept.len() - 1] <= step, "{many}: {kept:?}");
        }
    }
}
