//! Raw disks in zstd, in frames that can be read one by one.

use crate::failure::Failure;
use crate::seek_table::{MOST_FRAME, Making};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use zstd_safe::{CCtx, CParameter};

/// The level of compression.
const LEVEL: i32 = 3;
/// Bytes of a frame, unpacked, and how many frames are few enough for those.
const FRAME: u64 = 1 << 20;
const MOST_FRAMES: u64 = 1 << 20;

/// Packs the bytes of a file into another; the length.
pub(crate) fn pack(file: &File, len: u64, out: &File) -> Result<u64, Failure> {
    let broken = |code: usize| Failure::new(libc::EIO, format!("zstd: {}", zstd_safe::get_error_name(code)));
    let cant_write = |error: io::Error| Failure::of_file("the packed bytes can't be written", &error);
    let frame = len.div_ceil(MOST_FRAMES).next_power_of_two().clamp(FRAME, MOST_FRAME / 2);
    let mut context = CCtx::create();
    context.set_parameter(CParameter::CompressionLevel(LEVEL)).map_err(broken)?;
    context.set_parameter(CParameter::ChecksumFlag(true)).map_err(broken)?;
    let mut piece = vec![0; frame as usize];
    let mut packed = vec![0; zstd_safe::compress_bound(piece.len())];
    let mut table = Making::default();
    let (mut at, mut written) = (0, 0);
    // An empty disk is one empty frame, by which it is known.
    while at < len || written == 0 {
        let most = frame.min(len - at) as usize;
        file.read_exact_at(&mut piece[..most], at)?;
        let made = context.compress2(&mut packed[..], &piece[..most]).map_err(broken)?;
        out.write_all_at(&packed[..made], written).map_err(cant_write)?;
        table.add(made, most)?;
        at += most as u64;
        written += made as u64;
    }
    let table = table.finish()?;
    out.write_all_at(&table, written).map_err(cant_write)?;
    Ok(written + table.len() as u64)
}
