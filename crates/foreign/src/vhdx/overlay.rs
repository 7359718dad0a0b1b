//! Changes of a file that lie in a log, applied when the file is read.

use crate::error::Result;
use crate::files::{FileIndex, Files, Missing};
use std::collections::BTreeMap;
use std::sync::Arc;

/// New content of a range.
#[derive(Debug, Clone)]
enum Content {
    Zero,
    /// The bytes, and how many of them come before the range.
    Bytes(Arc<[u8]>, usize),
}

#[derive(Debug, Clone)]
struct Segment {
    end: u64,
    content: Content,
}

/// The changes: ranges that do not overlap, by their start.
#[derive(Debug, Clone, Default)]
pub(super) struct Overlay {
    segments: BTreeMap<u64, Segment>,
    /// Bytes that the file has at least when all is applied.
    len: u64,
}

impl Content {
    fn advanced(&self, bytes: u64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Bytes(all, before) => Self::Bytes(all.clone(), before.saturating_add(bytes as usize)),
        }
    }
}

impl Overlay {
    pub(super) fn zero(&mut self, start: u64, len: u64) {
        self.insert(start, len, Content::Zero);
    }

    pub(super) fn write(&mut self, start: u64, bytes: Vec<u8>) {
        self.insert(start, bytes.len() as u64, Content::Bytes(bytes.into(), 0));
    }

    /// The file has `len` bytes at least.
    pub(super) fn grow_to(&mut self, len: u64) {
        self.len = self.len.max(len);
    }

    fn insert(&mut self, start: u64, len: u64, content: Content) {
        let end = start.saturating_add(len);
        if start == end {
            return;
        }
        // What lies under the new range goes; what sticks out on either side stays.
        let under: Vec<u64> =
            self.segments.range(..end).rev().take_while(|(_, s)| s.end > start).map(|(at, _)| *at).collect();
        for at in under {
            let Some(old) = self.segments.remove(&at) else { continue };
            if old.end > end {
                let content = old.content.advanced(end.saturating_sub(at));
                self.segments.insert(end, Segment { end: old.end, content });
            }
            if at < start {
                self.segments.insert(at, Segment { end: start, content: old.content });
            }
        }
        self.segments.insert(start, Segment { end, content });
    }

    /// The changes of a range: their start, end and content.
    fn of(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Segment)> {
        self.segments.range(..end).rev().take_while(move |(_, s)| s.end > start).map(|(at, s)| (*at, s))
    }

    /// Whether a range is changed.
    pub(super) fn touches(&self, start: u64, len: u64) -> bool {
        self.of(start, start.saturating_add(len)).next().is_some()
    }
}

/// Files of which the image file is changed.
pub(super) struct Patched<'a> {
    pub(super) files: &'a dyn Files,
    pub(super) overlay: &'a Overlay,
}

impl Files for Patched<'_> {
    fn len(&self, file: FileIndex) -> u64 {
        let len = self.files.len(file);
        if file == FileIndex::IMAGE { len.max(self.overlay.len) } else { len }
    }

    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        let there = self.files.len(file).saturating_sub(offset).min(out.len() as u64) as usize;
        if let Some((there, past)) = out.split_at_mut_checked(there) {
            if !there.is_empty() {
                self.files.read(file, offset, there)?;
            }
            past.fill(0);
        }
        if file != FileIndex::IMAGE {
            return Ok(());
        }
        let end = offset.saturating_add(out.len() as u64);
        for (start, segment) in self.overlay.of(offset, end) {
            let (from, to) = (start.max(offset), segment.end.min(end));
            let range = from.saturating_sub(offset) as usize..to.saturating_sub(offset) as usize;
            let Some(part) = out.get_mut(range) else { continue };
            match segment.content.advanced(from.saturating_sub(start)) {
                Content::Zero => part.fill(0),
                Content::Bytes(bytes, before) => {
                    for (to, from) in part.iter_mut().zip(bytes.get(before..).unwrap_or_default()) {
                        *to = *from;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Memory(Vec<u8>);

    impl Files for Memory {
        fn len(&self, _: FileIndex) -> u64 {
            self.0.len() as u64
        }
        fn read(&self, _: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
            out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn changes_are_applied_in_their_order(
            changes in proptest::collection::vec((0u64..300, 0u64..100, any::<Option<u8>>()), 0..20),
            start in 0u64..300,
            len in 0u64..100,
        ) {
            let mut model = vec![7; 200];
            model.resize(400, 0);
            let mut overlay = Overlay::default();
            overlay.grow_to(400);
            for (at, len, byte) in changes {
                let filling: Vec<u8> = (0..len).map(|i| byte.map_or(0, |byte| byte.wrapping_add(i as u8))).collect();
                model[at as usize..][..len as usize].copy_from_slice(&filling);
                match byte {
                    None => overlay.zero(at, len),
                    Some(_) => overlay.write(at, filling),
                }
            }
            let mut out = vec![1; len as usize];
            let files = Memory(vec![7; 200]);
            let patched = Patched { files: &files, overlay: &overlay };
            patched.read(FileIndex::IMAGE, start, &mut out).unwrap();
            prop_assert_eq!(&out[..], &model[start as usize..][..len as usize]);
        }
    }
}
