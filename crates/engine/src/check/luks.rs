//! The LUKS header of an encrypted image, whose pointer says how many bytes are its own.

use super::finding::FindingKind;
use super::report::Tally;
use super::source::Source;
use crate::crypt::header::LuksHeader;
use crate::{ErrorKind, Result};
use std::ops::Range;
use zebu_luks::Limits;

/// Whether `area` of the file holds the whole header, which tells its length without a key. If not, key slots may lie
/// in clusters that look free.
pub(super) async fn is_covered(source: &Source<'_>, area: Range<u64>, tally: &mut Tally) -> Result<bool> {
    let offset = area.start;
    match LuksHeader::read(source.worker, source.file, area, &Limits::NONE).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Cancelled => Err(error),
        Err(error) => {
            let reason = error.message().to_owned();
            tally.add(FindingKind::LuksHeaderInvalid { offset, reason }, 1);
            Ok(false)
        }
    }
}
