//! Images of other programs: their headers are read, and their whole map is walked.

use arbitrary::{Result, Unstructured};
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
    let files = Memory(bytes);
    for format in Format::ALL {
        let _ = extent_files(format, &files);
        let _ = Disk::inspect(format, &files);
        let Ok(disk) = Disk::open(format, &files) else { continue };
        let mut at = 0;
        for _ in 0..RUNS {
            let Ok(run) = disk.map(&files, at, disk.virtual_size() - at) else { break };
            assert!(run.len > 0 && run.len <= disk.virtual_size() - at);
            match run.kind {
                Kind::Data { offset, .. } => assert!(offset + run.len <= bytes.len() as u64),
                Kind::Packed(packed) => {
                    assert!(packed.offset + packed.len <= bytes.len() as u64);
                    assert!(packed.start <= at && at + run.len <= packed.start + packed.unit);
                }
                Kind::Hole | Kind::Zero => {}
            }
            at += run.len;
            if at >= disk.virtual_size() {
                break;
            }
        }
        let _ = disk.map(&files, guest, u64::MAX);
    }
    Ok(())
}
