//! Disks that are compared with a manifest (`--verify`), and their counters.

use serde_json::{Value, json};
use std::sync::Arc;
use zebu_drivers::Verified;
use zebu_storage::sync::Mutex;

/// The disks that are open, by the names of their images.
#[derive(Default)]
pub struct VerifiedDisks(Mutex<Vec<(String, Arc<Verified>)>>);

impl VerifiedDisks {
    /// A name for one more disk of an image: it may be served twice.
    pub fn name_of_next(&self, image: &str) -> String {
        match self.0.lock().iter().filter(|(name, _)| name == image).count() {
            0 => format!("verified:{image}"),
            number => format!("verified-{}:{image}", number + 1),
        }
    }

    /// Notes a disk of an image.
    pub fn note(&self, image: String, disk: Arc<Verified>) {
        self.0.lock().push((image, disk));
    }

    /// Counters, as JSON.
    pub fn counters(&self) -> Vec<Value> {
        let open = self.0.lock();
        let counted = open.iter().map(|(name, disk)| {
            let counts = disk.counts();
            json!({
                "filename": name,
                "manifest": disk.manifest().to_string_lossy(),
                "mended-reads": counts.mended,
                "refused-reads": counts.refused,
            })
        });
        counted.collect()
    }
}
