//! Pages of the files of an image whose tables are looked up as they lie in the file.

use crate::Result;
use crate::qcow2::read_tables::read_bytes;
use crate::sync::Mutex;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use zebu_foreign::{FileIndex, Files, Missing};
use zebu_storage::{File, Worker};

/// Bytes of a page.
pub(crate) const PAGE: u64 = 16 << 10;
/// Bytes that are read at once.
const AT_ONCE: u64 = 1 << 20;
/// Pages that are kept in each of two generations: 4 MiB in both.
const GENERATION: usize = 128;

/// File and number of a page.
type Key = (u32, u64);
type Page = Arc<[u8]>;

/// The pages of an image that were used last.
#[derive(Debug, Default)]
pub(crate) struct FilePages(Mutex<Generations>);

/// When the younger generation is full, it becomes the older one. What is used in the older one becomes young again.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Key, Page>,
    old: HashMap<Key, Page>,
}

impl Generations {
    fn get(&mut self, key: Key) -> Option<Page> {
        if let Some(page) = self.young.get(&key) {
            return Some(page.clone());
        }
        let page = self.old.remove(&key)?;
        self.insert(key, page.clone());
        Some(page)
    }

    fn insert(&mut self, key: Key, page: Page) {
        if self.young.len() >= GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, page);
    }
}

impl FilePages {
    /// Forgets all pages.
    pub(crate) fn clear(&self) {
        *self.0.lock() = Generations::default();
    }
}

/// The pages that one lookup has at hand: its own, and those of the image.
pub(crate) struct Pages<'a> {
    files: &'a [File],
    shared: Option<&'a FilePages>,
    own: BTreeMap<Key, Page>,
    /// The page that was looked at last.
    last: Cell<Option<(Key, Page)>>,
}

impl<'a> Pages<'a> {
    pub(crate) fn new(files: &'a [File], shared: Option<&'a FilePages>) -> Self {
        Self { files, shared, own: BTreeMap::new(), last: Cell::new(None) }
    }

    /// Reads what a parser misses.
    pub(crate) async fn load(&mut self, worker: &Worker, missing: Missing) -> Result<()> {
        let Some(file) = self.files.get(missing.file.0 as usize) else { return Ok(()) };
        let start = missing.offset / PAGE * PAGE;
        let end = (missing.offset + missing.len as u64).next_multiple_of(PAGE).min(file.len().max(start + 1));
        // A part at a time: what is missing may be as long as a log, and is copied.
        for from in (start..end).step_by(AT_ONCE as usize) {
            let len = AT_ONCE.min(end - from) as usize;
            let bytes = read_bytes(worker, file, from, len).await?;
            for (number, page) in (from / PAGE..).zip(bytes.chunks(PAGE as usize)) {
                let (key, page) = ((missing.file.0, number), Page::from(page));
                if let Some(shared) = self.shared {
                    shared.0.lock().insert(key, page.clone());
                }
                self.own.insert(key, page);
            }
        }
        Ok(())
    }

    fn page(&self, key: Key) -> Option<Page> {
        if let Some((of, page)) = self.last.take()
            && of == key
        {
            self.last.set(Some((of, page.clone())));
            return Some(page);
        }
        let page = self.own.get(&key).cloned();
        let page = page.or_else(|| self.shared?.0.lock().get(key))?;
        self.last.set(Some((key, page.clone())));
        Some(page)
    }
}

impl Files for Pages<'_> {
    fn len(&self, file: FileIndex) -> u64 {
        self.files.get(file.0 as usize).map_or(0, File::len)
    }

    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        let mut filled = 0;
        while filled < out.len() {
            let at = offset + filled as u64;
            let within = (at % PAGE) as usize;
            let page = self.page((file.0, at / PAGE));
            let there = page.as_ref().and_then(|page| page.get(within..)).filter(|bytes| !bytes.is_empty());
            let Some(bytes) = there else {
                return Err(Missing { file, offset: at, len: out.len() - filled });
            };
            let len = bytes.len().min(out.len() - filled);
            out[filled..filled + len].copy_from_slice(&bytes[..len]);
            filled += len;
        }
        Ok(())
    }
}
