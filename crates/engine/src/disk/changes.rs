//! Snapshots, bitmaps and extents of a disk.

use super::Disk;
use crate::bitmaps::{BitmapRecording, DirtyBits, NewBitmap};
use crate::check::{CheckOptions, CheckReport};
use crate::snapshots::{NewSnapshot, SnapshotRef};
use crate::status::{BitmapInfo, Extent, SnapshotInfo};
use crate::{Extents, Result};
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Internal snapshots. Other requests go on meanwhile, as [`crate::Image`] says.
impl Disk {
    /// The snapshots in the image, oldest first. None for raw.
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.image().snapshots()
    }

    /// Takes a snapshot.
    ///
    /// # Errors
    /// As of [`crate::Image::create_snapshot`].
    pub fn create_snapshot(&self, new: NewSnapshot) -> Result<SnapshotInfo> {
        self.0.run(async move |image, worker| image.create_snapshot(&worker, new).await)
    }

    /// Makes the disk hold what it held when the snapshot was taken.
    ///
    /// # Errors
    /// As of [`crate::Image::apply_snapshot`].
    pub fn apply_snapshot(&self, which: &SnapshotRef) -> Result<()> {
        let which = which.clone();
        self.0.run(async move |image, worker| image.apply_snapshot(&worker, &which).await)
    }

    /// Deletes a snapshot.
    ///
    /// # Errors
    /// As of [`crate::Image::delete_snapshot`].
    pub fn delete_snapshot(&self, which: &SnapshotRef) -> Result<()> {
        let which = which.clone();
        self.0.run(async move |image, worker| image.delete_snapshot(&worker, &which).await)
    }
}

/// Persistent dirty bitmaps, as [`crate::Image`] says.
impl Disk {
    /// The bitmaps of the image. None for raw.
    pub fn bitmaps(&self) -> Vec<BitmapInfo> {
        self.image().bitmaps()
    }

    /// The bits of a bitmap.
    ///
    /// # Errors
    /// As of [`crate::Image::bitmap_bits`].
    pub fn bitmap_bits(&self, name: &str) -> Result<DirtyBits> {
        let name = name.to_owned();
        self.0.run(async move |image, worker| image.bitmap_bits(&worker, &name).await)
    }

    /// Adds an empty bitmap.
    ///
    /// # Errors
    /// As of [`crate::Image::add_bitmap`].
    pub fn add_bitmap(&self, new: &NewBitmap) -> Result<()> {
        let new = new.clone();
        self.0.run(async move |image, worker| image.add_bitmap(&worker, &new).await)
    }

    /// Removes a bitmap, whatever its state.
    ///
    /// # Errors
    /// As of [`crate::Image::remove_bitmap`].
    pub fn remove_bitmap(&self, name: &str) -> Result<()> {
        let name = name.to_owned();
        self.0.run(async move |image, worker| image.remove_bitmap(&worker, &name).await)
    }

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// As of [`crate::Image::clear_bitmap`].
    pub fn clear_bitmap(&self, name: &str) -> Result<()> {
        let name = name.to_owned();
        self.0.run(async move |image, worker| image.clear_bitmap(&worker, &name).await)
    }

    /// Has a bitmap record writes from now on, or no longer.
    ///
    /// # Errors
    /// As of [`crate::Image::set_bitmap_recording`].
    pub fn set_bitmap_recording(&self, name: &str, recording: BitmapRecording) -> Result<()> {
        let name = name.to_owned();
        self.0.run(async move |image, worker| image.set_bitmap_recording(&worker, &name, recording).await)
    }

    /// Marks in a bitmap all that is dirty in `bits`.
    ///
    /// # Errors
    /// As of [`crate::Image::merge_bitmap`].
    pub fn merge_bitmap(&self, name: &str, bits: &DirtyBits) -> Result<()> {
        let (name, bits) = (name.to_owned(), bits.clone());
        self.0.run(async move |image, worker| image.merge_bitmap(&worker, &name, &bits).await)
    }
}

/// The mapping, and the consistency check.
impl Disk {
    /// The run of one kind that starts at `offset`, at most `len` bytes, through the whole chain.
    ///
    /// # Errors
    /// As of [`crate::Image::extent`].
    pub fn extent(&self, offset: u64, len: u64) -> Result<Extent> {
        self.0.run(async move |image, worker| image.extent(&worker, offset, len).await)
    }

    /// A walk over the extents of a range of the disk, through the whole chain.
    ///
    /// ```
    /// # use zebu_engine as zebu;
    /// use zebu::{CreateOptions, Disk, OpenOptions};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("disk.qcow2");
    /// # Disk::create(&path, &CreateOptions::default().size(1 << 20))?;
    /// let disk = Disk::open(&path, &OpenOptions::default())?;
    /// let extents = disk.extents(0..disk.virtual_size()).collect::<zebu::Result<Vec<_>>>()?;
    /// assert_eq!((extents.len(), extents[0].len), (1, 1 << 20));
    /// # Ok::<(), zebu::Error>(())
    /// ```
    pub fn extents(&self, range: Range<u64>) -> DiskExtents {
        DiskExtents { disk: self.clone(), walk: self.image().extents(range), ahead: VecDeque::new() }
    }

    /// Checks the image at `path`, and repairs it as `options` say. It must not be open for writing.
    ///
    /// # Errors
    /// As of [`crate::check::check`].
    pub fn check(path: &Path, options: &CheckOptions) -> Result<CheckReport> {
        crate::block_on(async |worker| crate::check::check(&worker, path, options).await)
    }
}

/// Extents that one hop to the disk's thread looks up.
const BATCH: usize = 256;

/// The walk of [`Disk::extents`]. It goes on after an error, at the same place.
#[must_use = "a walk does nothing unless it is iterated over"]
pub struct DiskExtents {
    disk: Disk,
    walk: Extents,
    ahead: VecDeque<Result<Extent>>,
}

impl fmt::Debug for DiskExtents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskExtents").field("disk", &self.disk).finish_non_exhaustive()
    }
}

impl DiskExtents {
    fn look_ahead(&mut self) -> Result<()> {
        let mut walk = self.walk.clone();
        let (walk, found) = self.disk.0.run(async move |_, worker| {
            let mut found = VecDeque::new();
            while found.len() < BATCH {
                match walk.next(&worker).await.transpose() {
                    None => break,
                    Some(extent) => {
                        let failed = extent.is_err();
                        found.push_back(extent);
                        if failed {
                            break;
                        }
                    }
                }
            }
            Ok((walk, found))
        })?;
        (self.walk, self.ahead) = (walk, found);
        Ok(())
    }
}

impl Iterator for DiskExtents {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ahead.is_empty()
            && let Err(error) = self.look_ahead()
        {
            return Some(Err(error));
        }
        self.ahead.pop_front()
    }
}
