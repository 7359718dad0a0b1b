//! Uploads of this command, and what is told of them.

use crate::output::stderr;
use std::sync::{Arc, Mutex, PoisonError};
use zebu_store::{Upload, UploadStats};

/// Uploads that were begun.
static UPLOADS: Mutex<Vec<Arc<Upload>>> = Mutex::new(Vec::new());

/// Notes one.
pub(crate) fn note_upload(upload: Arc<Upload>) {
    UPLOADS.lock().unwrap_or_else(PoisonError::into_inner).push(upload);
}

/// Counters of all uploads; `None` if there was none.
pub(crate) fn upload_stats() -> Option<UploadStats> {
    let uploads = UPLOADS.lock().unwrap_or_else(PoisonError::into_inner);
    uploads.iter().map(|upload| upload.stats()).reduce(|mut all, one| {
        all.sent += one.sent;
        all.sent_bytes += one.sent_bytes;
        all.kept += one.kept;
        all.retries += one.retries;
        all
    })
}

/// Says what was sent (`-v`), if anything was.
pub(crate) fn tell_uploads() {
    let uploads = UPLOADS.lock().unwrap_or_else(PoisonError::into_inner);
    for upload in uploads.iter() {
        let (name, UploadStats { sent, sent_bytes, kept, retries, .. }) = (upload.name(), upload.stats());
        stderr::tell(&format!(
            "{name}: {sent} parts with {sent_bytes} bytes sent, {kept} parts of an interrupted upload kept, {retries} retries"
        ));
    }
}
