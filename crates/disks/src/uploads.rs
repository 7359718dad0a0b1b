//! Uploads that were begun, and messages about them.

use crate::notices::{Notice, Notices};
use std::sync::Arc;
use zebu_storage::sync::Mutex;
use zebu_store::{Upload, UploadStats};

/// Uploads that were begun.
#[derive(Default)]
pub struct Uploads(Mutex<Vec<Arc<Upload>>>);

impl Uploads {
    /// Notes one.
    pub fn note(&self, upload: Arc<Upload>) {
        self.0.lock().push(upload);
    }

    /// Counters of all uploads; `None` if there was none.
    pub fn stats(&self) -> Option<UploadStats> {
        self.0.lock().iter().map(|upload| upload.stats()).reduce(|mut all, one| {
            all.sent += one.sent;
            all.sent_bytes += one.sent_bytes;
            all.kept += one.kept;
            all.retries += one.retries;
            all
        })
    }

    /// Says what was sent (`-v`), if anything was.
    pub(crate) fn tell(&self, notices: &Notices) {
        for upload in self.0.lock().iter() {
            let (name, UploadStats { sent, sent_bytes, kept, retries, .. }) = (upload.name(), upload.stats());
            notices.say(Notice::Fact(&format!(
                "{name}: {sent} parts with {sent_bytes} bytes sent, {kept} parts of an interrupted upload kept, {retries} retries"
            )));
        }
    }
}
