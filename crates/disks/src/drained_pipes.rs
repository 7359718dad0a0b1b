//! Secrets that came from pipes.

use std::fs::File;
use std::io::Read;
use zebu_engine::Passphrase;
use zebu_storage::sync::Mutex;
use zeroize::Zeroizing;

/// Bytes of a secret at most. A passphrase of LUKS has 512 in cryptsetup.
const MOST: u64 = 1 << 20;

/// Content of pipes, by their names. A command that opens several images reads its secrets for each; a pipe gives them once.
#[derive(Default)]
pub(crate) struct DrainedPipes(Mutex<Vec<(String, Passphrase)>>);

impl DrainedPipes {
    /// Whether a secret came from a pipe, which gives it to no other process any more.
    pub(crate) fn have_given_any(&self) -> bool {
        !self.0.lock().is_empty()
    }

    /// Wipes what was read.
    pub(crate) fn forget(&self) {
        self.0.lock().clear();
    }

    /// The content of a file, which may be a pipe.
    pub(crate) fn read(&self, path: &str) -> Result<Zeroizing<Vec<u8>>, String> {
        let unable = |error: std::io::Error| format!("Unable to read {path}: {error}");
        let mut drained = self.0.lock();
        if let Some((_, known)) = drained.iter().find(|(name, _)| name == path) {
            return Ok(Zeroizing::new(known.as_bytes().to_vec()));
        }
        let file = File::open(path).map_err(unable)?;
        let is_pipe = !file.metadata().map_err(unable)?.is_file();
        // Enough for any usual one: what grows leaves copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(4096));
        file.take(MOST + 1).read_to_end(&mut bytes).map_err(unable)?;
        if bytes.len() as u64 > MOST {
            return Err(format!("Unable to read {path}: a secret has at most {MOST} bytes"));
        }
        if is_pipe {
            drained.push((path.to_owned(), Passphrase::new(&bytes).map_err(|error| error.to_string())?));
        }
        Ok(bytes)
    }
}
