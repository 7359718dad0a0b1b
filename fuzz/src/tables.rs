//! The parsers of tables that an image brings, on any bytes.

use arbitrary::{Result, Unstructured};
use zebu_qcow2::{Header, Purpose, bitmap, snapshot};

const PURPOSES: [Purpose; 4] = [Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check, Purpose::Inspect];

/// A header: what can be read can be written, and is the same when it is read again.
///
/// # Errors
/// The input is used up.
pub fn header(u: &mut Unstructured<'_>) -> Result<()> {
    let image = crate::image::hostile(u)?;
    let purpose = *u.choose(&PURPOSES)?;
    let Ok((header, _)) = Header::parse(&image, purpose) else { return Ok(()) };
    if let Ok(bytes) = header.encode() {
        let (again, _) = Header::parse(&bytes, purpose).expect("what was written can be read");
        assert_eq!(again.virtual_size(), header.virtual_size());
        assert_eq!(again.backing_file(), header.backing_file());
    }
    Ok(())
}

/// A snapshot table.
///
/// # Errors
/// The input is used up.
pub fn snapshots(u: &mut Unstructured<'_>) -> Result<()> {
    let count = if u.arbitrary()? { u.int_in_range(0..=8)? } else { u.arbitrary()? };
    let purpose = *u.choose(&PURPOSES)?;
    let bytes = u.bytes(u.len())?;
    if let Ok(snapshot::ParsedTable::Complete { entries, .. }) = snapshot::parse_table(bytes, count, purpose)
    {
        assert!(entries.len() <= count as usize);
        assert!(entries.iter().map(|entry| entry.id.len() + entry.name.len()).sum::<usize>() <= bytes.len());
    }
    Ok(())
}

/// A bitmap directory.
///
/// # Errors
/// The input is used up.
pub fn bitmaps(u: &mut Unstructured<'_>) -> Result<()> {
    let count = if u.arbitrary()? { u.int_in_range(0..=8)? } else { u.arbitrary()? };
    let bytes = u.bytes(u.len())?;
    if let Ok(entries) = bitmap::parse_directory(bytes, count) {
        assert!(entries.iter().map(|entry| entry.name.len()).sum::<usize>() <= bytes.len());
    }
    Ok(())
}
