//! An internal snapshot, made by the rules of the format alone: nothing of the engine takes part.

use zebu_qcow2::snapshot::{NewSnapshot, SnapshotEntry, encode_table};
use zebu_qcow2::{Geometry, Header, HostOffset, Purpose, refcount};
use zebu_sim::Content;

const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

struct Editor<'a> {
    file: &'a mut Content,
    geometry: Geometry,
    reftable: u64,
    reftable_bytes: u64,
}

impl Editor<'_> {
    fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read(offset, &mut bytes);
        u64::from_be_bytes(bytes)
    }

    fn set_word(&mut self, offset: u64, word: u64) {
        self.file.write(offset, &word.to_be_bytes());
    }

    /// A cluster at the end of the file, full of zeroes; its refcount is the caller's to raise.
    fn append_cluster(&mut self) -> u64 {
        let size = self.geometry.cluster_size();
        let offset = self.file.len().next_multiple_of(size);
        self.file.set_len(offset + size);
        offset
    }

    fn raise(&mut self, offset: u64) {
        let cluster = offset / self.geometry.cluster_size();
        let per_block = self.geometry.refcount_entries_per_block();
        let entry = cluster / per_block * 8;
        assert!(entry < self.reftable_bytes, "the refcount table is too small for this test");
        let mut block = self.word(self.reftable + entry);
        if block == 0 {
            block = self.append_cluster();
            self.set_word(self.reftable + entry, block);
            self.raise(block);
        }
        let size = self.geometry.cluster_size();
        let mut bytes = self.file.bytes(block..block + size);
        let index = (cluster % per_block) as usize;
        let count = refcount::get(&bytes, index, self.geometry.refcount_order).unwrap();
        refcount::set(&mut bytes, index, self.geometry.refcount_order, count + 1).unwrap();
        self.file.write(block, &bytes);
    }
}

/// Takes a snapshot of the image in `file`, which nobody has open, with refcounts of at least 2 bits and no snapshot yet.
pub(crate) fn take(file: &mut Content, name: &str, disk_size: u64) {
    let (header, _) = Header::parse(&file.bytes(0..4096.min(file.len())), Purpose::ReadWrite).unwrap();
    let geometry = header.geometry();
    let cluster = geometry.cluster_size();
    let mut editor = Editor {
        file,
        reftable: header.refcount_table_offset.0,
        reftable_bytes: u64::from(header.refcount_table_clusters) * cluster,
        geometry,
    };
    let (l1, l1_size) = (header.l1_table_offset.0, u64::from(header.l1_size));
    for index in 0..l1_size {
        let entry = editor.word(l1 + index * 8);
        let table = entry & OFFSET;
        if table == 0 {
            continue;
        }
        editor.set_word(l1 + index * 8, entry & !COPIED);
        editor.raise(table);
        for at in (table..table + cluster).step_by(geometry.l2_entry_size as usize) {
            let entry = editor.word(at);
            if entry & OFFSET != 0 {
                editor.set_word(at, entry & !COPIED);
                editor.raise(entry & OFFSET);
            }
        }
    }
    let copy: Vec<u64> = (0..l1_size.div_ceil(cluster / 8)).map(|_| editor.append_cluster()).collect();
    for offset in &copy {
        editor.raise(*offset);
    }
    // A refcount block may have come between, so the places follow each other only if none did.
    assert!(copy.windows(2).all(|pair| pair[1] == pair[0] + cluster));
    let bytes = editor.file.bytes(l1..l1 + l1_size * 8);
    editor.file.write(copy[0], &bytes);
    let entry = SnapshotEntry::new(NewSnapshot {
        id: b"1".to_vec(),
        name: name.as_bytes().to_vec(),
        l1_table_offset: HostOffset(copy[0]),
        l1_size: l1_size as u32,
        date_sec: 1_700_000_000,
        date_nsec: 0,
        disk_size,
        vm_state_size: 0,
        vm_clock_nsec: 0,
        icount: None,
    });
    let table = encode_table(&[entry]).unwrap();
    assert!(table.len() as u64 <= cluster);
    let place = editor.append_cluster();
    editor.raise(place);
    editor.file.write(place, &table);
    editor.file.write(60, &1_u32.to_be_bytes());
    editor.file.write(64, &place.to_be_bytes());
}
