//! The strict mode: after each step of the world, every state that the disk may hold after a power failure, at once.
//!
//! After a crash, sectors are independent of each other. So the file is read as a set: the header may be one of these,
//! this L1 entry one of those, and so on down to the guest's sectors; whatever can be reached must be right.
//!
//! | | what is looked at |
//! |---|---|
//! | I1 | whatever a table may point to has a refcount of at least the number of the pointers that may exist at once, whatever refcount blocks and table may hold |
//! | I2, I3, I4, I6 | every sector of the guest's disk, through every mapping that may exist and every content that the place may have, holds what the model allows: no other place's data, no data that was not written yet, nothing older than a flush |
//! | I5 | what is uncertain of the header lies in one block of 4096 bytes |
//!
//! Neither sampled nor bounded: a violation in any of the crash states shows. Not looked at: disks that promise sectors of
//! 4096 bytes (there the sectors of a block are not independent).

use crate::crash::setup::{DATA, Origin, Setup, TOP};
use crate::torture::encrypted_data::EncryptedData;
use crate::torture::possible_image::{Header, Reads, Source, Target, word};
use std::collections::{BTreeMap, BTreeSet};
use zebu_engine::Compression;
use zebu_sim::{Content, GuestModel, SECTOR, SimDisk, SimWorld, backing_pattern};

/// Pointers to each host cluster.
type Pointers = BTreeMap<u64, u64>;

/// Looks at a world step by step.
pub(crate) struct Invariants<'a> {
    setup: &'a Setup,
    disk: SimDisk,
    /// When it was looked at last: events of the disk, the model's moment.
    seen: (u64, u64),
    /// Clusters that internal snapshots, which nobody changes meanwhile, point to.
    of_snapshots: Pointers,
    backing: Vec<u8>,
    encrypted: Option<EncryptedData>,
}

fn add(to: &mut Pointers, cluster: u64, count: u64) {
    *to.entry(cluster).or_default() += count;
}

/// At least as many as in either.
fn at_most_of(one: &mut Pointers, other: Pointers) {
    for (cluster, count) in other {
        let known = one.entry(cluster).or_default();
        *known = (*known).max(count);
    }
}

fn sum(to: &mut Pointers, more: &Pointers) {
    for (cluster, count) in more {
        add(to, *cluster, *count);
    }
}

impl<'a> Invariants<'a> {
    /// Begins with the image in `world`, which is durable and at rest.
    pub(crate) fn new(setup: &'a Setup, world: &SimWorld) -> Self {
        let of_snapshots = match world.content(TOP) {
            Some(top) if setup.origin == Origin::Snapshot => pointers_of_snapshots(&top),
            _ => Pointers::new(),
        };
        let from_backing = matches!(setup.origin, Origin::RawBase | Origin::Qcow2Base | Origin::DeepChain);
        let backing = if from_backing { backing_pattern(0, setup.pattern as usize) } else { Vec::new() };
        let encrypted = setup.encrypted.then(|| EncryptedData::of(&world.content(TOP).expect("the image")));
        Self { setup, disk: world.disk(), seen: (u64::MAX, u64::MAX), of_snapshots, backing, encrypted }
    }

    /// Checks the invariants now. Looks only if something has changed since it looked last.
    pub(crate) fn check(&mut self, model: &GuestModel) -> Result<(), String> {
        let now = (self.disk.events(), model.moment());
        if self.seen == now || self.setup.direct == 4096 {
            return Ok(());
        }
        self.seen = now;
        self.disk.note_moment();
        let top = self.disk.possible(TOP).expect("the image");
        let data = self.disk.possible(DATA);
        let top_source = Source::Uncertain(&top);
        let headers = top_source
            .variants(0)
            .iter()
            .map(|sector| Header::read(sector))
            .collect::<Result<Vec<_>, _>>()?;
        header_in_one_block(&headers[0], top.uncertain())?;
        let image = Image {
            top: &top_source,
            data: data.as_ref().map(Source::Uncertain),
            model,
            backing: &self.backing,
            setup: self.setup,
            encrypted: self.encrypted.as_ref(),
        };
        // A header is one sector: what hangs on it exists with it.
        for header in &headers {
            if !model.may_have_len(header.size) {
                return Err(format!("the disk may have {} bytes", header.size));
            }
            image.contents(header)?;
            if !header.is_dirty {
                let mut pointers = image.pointers(header);
                sum(&mut pointers, &self.of_snapshots);
                image.counts_suffice(header, pointers)?;
            }
        }
        Ok(())
    }
}

/// I5.
fn header_in_one_block(header: &Header, uncertain: impl Iterator<Item = u64>) -> Result<(), String> {
    let sectors = header.cluster() / SECTOR;
    let blocks: BTreeSet<u64> =
        uncertain.filter(|sector| *sector < sectors).map(|s| s * SECTOR / 4096).collect();
    if blocks.len() > 1 {
        return Err(format!("I5: the header may be torn over the blocks {blocks:?} of 4096 bytes"));
    }
    Ok(())
}

/// An image at one moment.
struct Image<'a> {
    top: &'a Source<'a>,
    data: Option<Source<'a>>,
    model: &'a GuestModel,
    /// The content of unallocated clusters; zeroes past its end.
    backing: &'a [u8],
    setup: &'a Setup,
    encrypted: Option<&'a EncryptedData>,
}

impl Image<'_> {
    /// The different words that may stand at `offset` of the image file, `count` of them together.
    fn words(&self, offset: u64, count: usize) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        let at = (offset % SECTOR) as usize;
        self.top.each(offset / SECTOR, |sector| {
            let found = (word(sector, at), if count > 1 { word(sector, at + 8) } else { 0 });
            if !all.contains(&found) {
                all.push(found);
            }
        });
        all
    }

    /// I2, I3, I4, I6: what the guest may read, under every mapping that may be.
    fn contents(&self, header: &Header) -> Result<(), String> {
        let cluster = header.cluster();
        let per_table = header.entries_per_table();
        let mut zero_seen = BTreeSet::new();
        for guest in 0..header.size.div_ceil(cluster) {
            for (l1, _) in self.words(header.l1_offset + guest / per_table * 8, 1) {
                let table = Header::table(l1);
                let entries = if table == 0 {
                    vec![(0, 0)]
                } else {
                    let at = table + guest % per_table * header.entry_bytes();
                    self.words(at, if header.extended_l2 { 2 } else { 1 })
                };
                for (entry, second) in entries {
                    // What reads as nothing of its own, under whatever mapping, is looked at once.
                    if (entry, second) == (0, 0) && !zero_seen.insert(guest) {
                        continue;
                    }
                    self.cluster(header, guest, entry, second).map_err(|e| {
                        format!("{e}\nguest cluster {guest:#x} through L1 entry {l1:#x}, L2 entry {entry:#x} {second:#x}")
                    })?;
                }
            }
        }
        Ok(())
    }

    fn cluster(&self, header: &Header, guest: u64, entry: u64, second: u64) -> Result<(), String> {
        let start = guest * header.cluster();
        let end = (start + header.cluster()).min(header.size / SECTOR * SECTOR);
        if let Target::Stream { offset, end: stream_end } = header.target(entry) {
            let bytes = self.stream(header, offset, stream_end)?;
            return self.allowed(start, &bytes[..(end - start) as usize]);
        }
        let parts = if header.extended_l2 { 32 } else { 1 };
        let part = header.cluster() / parts;
        let data = self.data.as_ref().unwrap_or(self.top);
        for at in (start..end).step_by(SECTOR as usize) {
            let index = (at - start) / part;
            match header.reads_as(entry, second, index, self.data.is_some()) {
                Reads::Nonsense => return Err("the entry makes no sense".to_owned()),
                Reads::Zero => self.allowed(at, &[0; SECTOR as usize])?,
                Reads::Backing => {
                    let mut sector = [0; SECTOR as usize];
                    if let Some(bytes) = self.backing.get(at as usize..at as usize + SECTOR as usize) {
                        sector.copy_from_slice(bytes);
                    }
                    self.allowed(at, &sector)?;
                }
                Reads::Data => {
                    let host = (Header::table(entry) + (at - start)) / SECTOR;
                    let mut violation = None;
                    data.each(host, |bytes| {
                        let shown = match self.encrypted {
                            Some(encrypted) => self.allowed(at, &encrypted.decrypted(host, bytes)),
                            None => self.allowed(at, bytes),
                        };
                        if let Err(e) = shown {
                            violation.get_or_insert(e);
                        }
                    });
                    if let Some(e) = violation {
                        return Err(e);
                    }
                }
            }
        }
        Ok(())
    }

    fn allowed(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.model.check(at, bytes).map_err(|violation| format!("I2, I3, I6: {violation}"))
    }

    /// The content of a compressed cluster. Its bytes must be certain by the time that anything may point to them.
    fn stream(&self, header: &Header, offset: u64, end: u64) -> Result<Vec<u8>, String> {
        let mut bytes: Vec<u8> = Vec::new();
        for sector in offset / SECTOR..end / SECTOR {
            let from = if sector == offset / SECTOR { (offset % SECTOR) as usize } else { 0 };
            let mut variants = self.top.variants(sector);
            // What follows the stream in its last sector is another's, and may not be there yet.
            if variants.len() > 1 {
                let is_last = sector + 1 == end / SECTOR;
                let unpack = |variant: &Vec<u8>| self.unpacked(header, &[&bytes, &variant[from..]].concat());
                let unpacked: Vec<_> = variants.iter().filter_map(unpack).collect();
                let is_same = unpacked.windows(2).all(|pair| pair[0] == pair[1]);
                if !is_last || unpacked.len() != variants.len() || !is_same {
                    return Err(format!("I3: the stream at {offset:#x} is linked and not certain"));
                }
                return Ok(unpacked.into_iter().next().unwrap_or_default());
            }
            bytes.extend_from_slice(&variants.remove(0)[from..]);
        }
        self.unpacked(header, &bytes).ok_or_else(|| format!("the stream at {offset:#x} can't be decoded"))
    }

    fn unpacked(&self, header: &Header, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut out = vec![0; header.cluster() as usize];
        match self.setup.compression {
            Compression::Zstd => {
                let len = zstd_safe::find_frame_compressed_size(bytes).ok()?;
                let got = zstd_safe::decompress(&mut out[..], bytes.get(..len)?).ok()?;
                (got == out.len()).then_some(out)
            }
            Compression::Zlib => {
                let mut inflate = flate2::Decompress::new(false);
                inflate.decompress(bytes, &mut out, flate2::FlushDecompress::Finish).ok()?;
                (inflate.total_out() == out.len() as u64).then_some(out)
            }
            other => panic!("{other:?}"),
        }
    }

    /// How many pointers to each host cluster may exist at once, but for those of the refcount table.
    fn pointers(&self, header: &Header) -> Pointers {
        let cluster = header.cluster();
        let mut all = Pointers::new();
        add(&mut all, 0, 1);
        for at in clusters(header.l1_offset, header.l1_size * 8, cluster) {
            add(&mut all, at, 1);
        }
        for at in clusters(header.reftable_offset, header.reftable_clusters * cluster, cluster) {
            add(&mut all, at, 1);
        }
        if let Some(encrypted) = self.encrypted {
            let key_slots = &encrypted.header;
            for at in clusters(key_slots.start, key_slots.end - key_slots.start, cluster) {
                add(&mut all, at, 1);
            }
        }
        self.add_tables(header, header.l1_offset, header.l1_size, &mut all);
        all
    }

    /// Adds the clusters that the L1 table there and its L2 tables point to.
    fn add_tables(&self, header: &Header, l1_offset: u64, l1_size: u64, all: &mut Pointers) {
        let cluster = header.cluster();
        let mut known: BTreeMap<u64, Pointers> = BTreeMap::new();
        for sector in clusters(l1_offset, l1_size * 8, SECTOR) {
            let mut of_sector = Pointers::new();
            for bytes in self.top.variants(sector) {
                let mut of_variant = Pointers::new();
                for (index, entry) in bytes.chunks(8).enumerate() {
                    let place = sector * SECTOR + index as u64 * 8;
                    let table = Header::table(word(entry, 0));
                    if table != 0 && (l1_offset..l1_offset + l1_size * 8).contains(&place) {
                        add(&mut of_variant, table / cluster, 1);
                        let of_table = known.entry(table).or_insert_with(|| self.of_table(header, table));
                        sum(&mut of_variant, of_table);
                    }
                }
                at_most_of(&mut of_sector, of_variant);
            }
            sum(all, &of_sector);
        }
    }

    /// The clusters that the L2 table there points to, in the image file.
    fn of_table(&self, header: &Header, table: u64) -> Pointers {
        let cluster = header.cluster();
        let mut all = Pointers::new();
        if self.data.is_some() {
            return all;
        }
        for sector in clusters(table, cluster, SECTOR) {
            let mut of_sector = Pointers::new();
            self.top.each(sector, |bytes| {
                if bytes.iter().all(|byte| *byte == 0) {
                    return;
                }
                let mut of_variant = Pointers::new();
                for entry in bytes.chunks(header.entry_bytes() as usize) {
                    match header.target(word(entry, 0)) {
                        Target::None => {}
                        Target::Cluster(offset) => add(&mut of_variant, offset / cluster, 1),
                        Target::Stream { offset, end } => {
                            for at in offset / cluster..end.div_ceil(cluster) {
                                add(&mut of_variant, at, 1);
                            }
                        }
                    }
                }
                at_most_of(&mut of_sector, of_variant);
            });
            sum(&mut all, &of_sector);
        }
        all
    }

    /// The sectors of the refcount table, and for each content that one may have, what that points to.
    fn blocks(&self, header: &Header) -> BTreeMap<u64, Vec<(Vec<u8>, Pointers)>> {
        let bytes = header.reftable_clusters * header.cluster();
        let sectors = clusters(header.reftable_offset, bytes, SECTOR);
        let pointers = |bytes: Vec<u8>| {
            let mut found = Pointers::new();
            for entry in bytes.chunks(8).map(|entry| word(entry, 0) & !511).filter(|block| *block != 0) {
                add(&mut found, entry / header.cluster(), 1);
            }
            (bytes, found)
        };
        sectors.map(|s| (s, self.top.variants(s).into_iter().map(pointers).collect())).collect()
    }

    /// I1: no cluster has a refcount that may be less than the pointers to it that may be. A refcount block is found
    /// through the sector of the table that points to it: where that sector is the old one, its new pointers are not
    /// there either.
    fn counts_suffice(&self, header: &Header, mut pointers: Pointers) -> Result<(), String> {
        let bits = 1_u64 << header.refcount_order;
        let per_block = header.cluster() * 8 / bits;
        let blocks = self.blocks(header);
        for (_, found) in blocks.values().flatten() {
            for cluster in found.keys() {
                pointers.entry(*cluster).or_default();
            }
        }
        for (&cluster, &others) in &pointers {
            let entry = header.reftable_offset + cluster / per_block * 8;
            let at_once = |variants: &[(Vec<u8>, Pointers)]| {
                variants.iter().map(|(_, found)| found.get(&cluster).copied().unwrap_or(0)).max().unwrap_or(0)
            };
            let elsewhere: u64 =
                blocks.iter().filter(|(s, _)| **s != entry / SECTOR).map(|(_, v)| at_once(v)).sum();
            let Some(variants) = blocks.get(&(entry / SECTOR)) else {
                return Err(format!("I1: cluster {cluster:#x} is beyond the refcount table"));
            };
            for (bytes, found) in variants {
                let count = others + elsewhere + found.get(&cluster).copied().unwrap_or(0);
                let block = word(bytes, (entry % SECTOR) as usize) & !511;
                let at = block * 8 + cluster % per_block * bits;
                let mut least = if block == 0 { 0 } else { u64::MAX };
                if block != 0 {
                    self.top.each(at / 8 / SECTOR, |sector| {
                        let index = (at % (SECTOR * 8) / bits) as usize;
                        let found = zebu_qcow2::refcount::get(sector, index, header.refcount_order);
                        least = least.min(found.unwrap_or(0));
                    });
                }
                if least < count {
                    return Err(format!(
                        "I1, I2: cluster {cluster:#x} may have {count} pointers and a refcount of {least} (block {block:#x})"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The clusters (or sectors, with `size` 512) of a range of bytes.
fn clusters(offset: u64, bytes: u64, size: u64) -> std::ops::Range<u64> {
    offset / size..(offset + bytes).div_ceil(size)
}

/// The clusters that the snapshots of an image at rest point to.
fn pointers_of_snapshots(top: &Content) -> Pointers {
    let source = Source::Certain(top);
    let header = Header::read(&source.variants(0)[0]).expect("an image");
    let mut all = Pointers::new();
    let cluster = header.cluster();
    let image = Image {
        top: &source,
        data: None,
        model: &Setup::plain().model(),
        backing: &[],
        setup: &Setup::plain(),
        encrypted: None,
    };
    let mut at = header.snapshots_offset;
    for _ in 0..header.snapshots {
        let entry = top.bytes(at..at + 40);
        let l1_offset = word(&entry, 0);
        let l1_size = u64::from(u32::from_be_bytes(entry[8..12].try_into().unwrap()));
        let id = u64::from(u16::from_be_bytes(entry[12..14].try_into().unwrap()));
        let name = u64::from(u16::from_be_bytes(entry[14..16].try_into().unwrap()));
        let extra = u64::from(u32::from_be_bytes(entry[36..40].try_into().unwrap()));
        for place in clusters(l1_offset, l1_size * 8, cluster) {
            add(&mut all, place, 1);
        }
        image.add_tables(&header, l1_offset, l1_size, &mut all);
        at += (40 + extra + id + name).next_multiple_of(8);
    }
    for place in clusters(header.snapshots_offset, at - header.snapshots_offset, cluster) {
        add(&mut all, place, 1);
    }
    all
}
