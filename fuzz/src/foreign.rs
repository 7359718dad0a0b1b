//! Images of other programs: their headers are read, and their whole map is walked.

use crate::foreign_samples::hyper_v::{LOG, METADATA, set_vhd_sum, set_vhdx_sum};
use crate::foreign_samples::{self, Sample};
use arbitrary::{Result, Unstructured};
use std::ops::Range;
use std::sync::LazyLock;
use zebu_foreign::{Disk, FileIndex, Files, Format, Kind, Missing, extent_files};

/// Runs of a map that are looked at.
const RUNS: usize = 4096;

/// A file in memory; each name in it leads to the same file.
struct Memory<'a>(&'a [u8]);

impl Files for Memory<'_> {
    fn len(&self, _: FileIndex) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, _: FileIndex, offset: u64, out: &mut [u8]) -> std::result::Result<(), Missing> {
        let start = offset as usize;
        out.copy_from_slice(&self.0[start..start + out.len()]);
        Ok(())
    }
}

/// Every format with the same bytes.
pub fn image(input: &mut Unstructured<'_>) -> Result<()> {
    let guest: u64 = input.arbitrary()?;
    let bytes = input.bytes(input.len())?;
    for format in Format::ALL {
        walk(format, &Memory(bytes), guest);
    }
    Ok(())
}

/// Opens an image, and walks its map.
fn walk(format: Format, files: &impl Files, guest: u64) {
    let _ = extent_files(format, files);
    let _ = Disk::inspect(format, files);
    let Ok(disk) = Disk::open(format, files) else { return };
    let mut at = 0;
    for _ in 0..RUNS {
        if at >= disk.virtual_size() {
            break;
        }
        let Ok(run) = disk.map(files, at, disk.virtual_size() - at) else { break };
        assert!(run.len > 0 && run.len <= disk.virtual_size() - at);
        match run.kind {
            Kind::Data { file, offset } => assert!(offset + run.len <= files.len(file)),
            Kind::Packed(packed) => {
                assert!(packed.offset + packed.len <= files.len(packed.file));
                assert!(packed.start <= at && at + run.len <= packed.start + packed.unit);
            }
            Kind::Hole | Kind::Zero => {}
        }
        at += run.len;
    }
    let _ = disk.map(files, guest, u64::MAX);
}

/// The most changes of a sample.
const CHANGES: usize = 24;

/// A sample of a format, some fields of which have other values, and which may be cut or longer.
pub fn damaged(format: Format, input: &mut Unstructured<'_>) -> Result<()> {
    static GROUNDS: LazyLock<Vec<Ground>> = LazyLock::new(Ground::all);
    let grounds: Vec<&Ground> = GROUNDS.iter().filter(|ground| ground.format == format).collect();
    let ground = *input.choose(&grounds)?;
    let guest = input.arbitrary()?;
    let whole = ground.sample.files[0].1.len() as u64;
    let len = if input.ratio(1, 8)? { input.int_in_range(0..=whole * 2)? } else { whole };
    let mut files = Damaged { sample: &ground.sample, len, changes: Vec::new() };
    for _ in 0..input.int_in_range(0..=CHANGES)? {
        let at = if input.ratio(7, 8)? {
            *input.choose(&ground.fields)?
        } else {
            input.int_in_range(0..=whole as usize)?
        };
        let value: u64 = input.arbitrary()?;
        let bytes = if input.arbitrary()? { value.to_le_bytes() } else { value.to_be_bytes() };
        let bytes = match input.int_in_range(0..=3)? {
            0 => &bytes[..1],
            1 => &bytes[..2],
            2 => &bytes[..4],
            _ => &bytes[..],
        };
        files.changes.push((at, bytes.to_vec()));
    }
    // A wrong sum hides what is behind it.
    if !input.ratio(1, 16)? {
        files.mend_sums(format);
    }
    walk(format, &files, guest);
    Ok(())
}

/// A sample, and where its fields are.
struct Ground {
    format: Format,
    sample: Sample,
    /// Offsets in the image file of words that are neither zero nor data of the disk.
    fields: Vec<usize>,
}

impl Ground {
    fn all() -> Vec<Self> {
        let differencing = [foreign_samples::vhd_differencing(), foreign_samples::vhdx_differencing()];
        let samples = foreign_samples::all().iter().map(|(_, sample)| sample.clone()).chain(differencing);
        samples
            .map(|sample| {
                let format = Format::ALL.into_iter().find(|format| format.name() == sample.format);
                let format = format.expect("a known format");
                let fields = fields(format, &sample);
                Self { format, sample, fields }
            })
            .collect()
    }
}

fn fields(format: Format, sample: &Sample) -> Vec<usize> {
    let intact = Damaged { sample, len: sample.files[0].1.len() as u64, changes: Vec::new() };
    let disk = Disk::open(format, &intact).expect("an image without damage");
    let (mut at, mut data) = (0, Vec::<Range<u64>>::new());
    while at < disk.virtual_size() {
        let run = disk.map(&intact, at, disk.virtual_size() - at).expect("an image without damage");
        match run.kind {
            Kind::Data { file: FileIndex(0), offset } => data.push(offset..offset + run.len),
            Kind::Packed(packed) => data.push(packed.offset..packed.offset + packed.len),
            _ => {}
        }
        at += run.len;
    }
    let image = &sample.files[0].1;
    let is_field = |at: usize| {
        !data.iter().any(|data| data.contains(&(at as u64)))
            && image[at..image.len().min(at + 4)].iter().any(|byte| *byte != 0)
    };
    let fields: Vec<usize> = (0..image.len()).step_by(4).filter(|at| is_field(*at)).collect();
    assert!(!fields.is_empty());
    fields
}

/// The files of a sample, the first of which is changed.
struct Damaged<'a> {
    sample: &'a Sample,
    len: u64,
    /// Offsets and bytes. Later ones count.
    changes: Vec<(usize, Vec<u8>)>,
}

impl Damaged<'_> {
    /// Has the checksums fit what they are of, where something of it was changed.
    fn mend_sums(&mut self, format: Format) {
        const FOOTER: usize = 512;
        let end = self.len.saturating_sub(FOOTER as u64) as usize;
        // Where a structure is, its length, and where it has its sum.
        let structures: &[(usize, usize, usize)] = match format {
            Format::Vhdx => &[
                (64 << 10, 4096, 4),
                (128 << 10, 4096, 4),
                (192 << 10, 64 << 10, 4),
                (256 << 10, 64 << 10, 4),
                // The two entries of the sample with a log, the first of which is at the log's end.
                (METADATA - 4096, 4096, 4),
                (LOG, 8192, 4),
            ],
            Format::Vpc => &[(0, FOOTER, 64), (512, 1024, 36), (end, FOOTER, 64)],
            _ => return,
        };
        for &(at, len, sum) in structures {
            let is_changed =
                self.changes.iter().any(|(from, bytes)| *from < at + len && from + bytes.len() > at);
            if !is_changed || (at + len) as u64 > self.len {
                continue;
            }
            let mut structure = vec![0; len];
            let _ = self.read(FileIndex(0), at as u64, &mut structure);
            match format {
                Format::Vhdx => set_vhdx_sum(&mut structure, 0, len),
                _ => set_vhd_sum(&mut structure, sum),
            }
            self.changes.push((at + sum, structure[sum..sum + 4].to_vec()));
        }
    }
}

impl Files for Damaged<'_> {
    fn len(&self, file: FileIndex) -> u64 {
        match file.0 {
            0 => self.len,
            other => self.sample.files.get(other as usize).map_or(0, |(_, bytes)| bytes.len() as u64),
        }
    }

    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> std::result::Result<(), Missing> {
        assert!(offset + out.len() as u64 <= self.len(file), "asks for what is not in the file");
        let (bytes, start) = (&self.sample.files[file.0 as usize].1, offset as usize);
        let there = bytes.get(start..).unwrap_or_default();
        let there = &there[..there.len().min(out.len())];
        out[..there.len()].copy_from_slice(there);
        out[there.len()..].fill(0);
        if file.0 == 0 {
            for (at, bytes) in &self.changes {
                let (from, to) = (start.max(*at), (start + out.len()).min(at + bytes.len()));
                if from < to {
                    out[from - start..to - start].copy_from_slice(&bytes[from - at..to - at]);
                }
            }
        }
        Ok(())
    }
}
