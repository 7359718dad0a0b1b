//! Images that are made are read again, and hold the disk of a simple model.

use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use zebu_foreign::write::{
    Allocation, Birth, Layout, NewImage, NewVdi, NewVhdx, NewVmdk, NewVpc, Part, Stream, VmdkKind, VpcSize,
};
use zebu_foreign::{Disk, FileIndex, Files, Format, Kind, Missing};

const MIB: u64 = 1 << 20;

/// A file whose holes take no memory.
#[derive(Default)]
struct Memory {
    pages: BTreeMap<u64, Vec<u8>>,
    len: u64,
}

const PAGE: u64 = 4096;

impl Memory {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.len = self.len.max(offset + bytes.len() as u64);
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let within = (at % PAGE) as usize;
            let (now, later) = rest.split_at(rest.len().min(PAGE as usize - within));
            if now.iter().any(|byte| *byte != 0) || self.pages.contains_key(&(at / PAGE)) {
                let page = self.pages.entry(at / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
                page[within..within + now.len()].copy_from_slice(now);
            }
            (at, rest) = (at + now.len() as u64, later);
        }
    }

    fn get(&self, offset: u64, len: u64) -> Vec<u8> {
        (offset..offset + len)
            .map(|at| self.pages.get(&(at / PAGE)).map_or(0, |page| page[(at % PAGE) as usize]))
            .collect()
    }
}

impl Files for Memory {
    fn len(&self, _: FileIndex) -> u64 {
        self.len
    }
    fn read(&self, _: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        assert!(offset + out.len() as u64 <= self.len);
        out.copy_from_slice(&self.get(offset, out.len() as u64));
        Ok(())
    }
}

fn birth() -> Birth {
    Birth { random: [[0xa5; 16], [7; 16], [0xff; 16]], time: 1_700_000_000 }
}

/// Writes of short strings, each within a block of the least size.
type Writes = BTreeMap<u64, Vec<u8>>;

fn made(image: &NewImage, size: u64, writes: &Writes) -> (Memory, u64) {
    let layout = Layout::new(image, size, "disk", &birth()).unwrap();
    let mut memory = Memory::default();
    let mut table = layout.empty_table();
    for (offset, bytes) in writes {
        let (index, within) = (offset / layout.block_size(), offset % layout.block_size());
        let host = match (layout.linear(), layout.find(&table, index)) {
            (Some(start), _) => start + offset - within,
            (None, Some(host)) => host,
            (None, None) => {
                let host = layout.allocate(&mut table, index).unwrap();
                memory.write(host - layout.mark().len() as u64, layout.mark());
                host
            }
        };
        memory.write(host + within, bytes);
    }
    let parts: Vec<Part> = layout.tables(&table).chain(layout.headers(&table)).collect();
    let mut written: Vec<(u64, u64)> =
        parts.iter().map(|part| (part.offset, part.offset + part.bytes.len() as u64)).collect();
    written.sort_unstable();
    assert!(written.windows(2).all(|pair| pair[0].1 <= pair[1].0), "parts overlap: {written:?}");
    for part in parts {
        memory.write(part.offset, &part.bytes);
    }
    let len = layout.file_len(&table);
    assert!(memory.len <= len, "the file is longer than it is told to be");
    memory.len = len;
    (memory, layout.virtual_size())
}

fn streamed(new: &NewVmdk, size: u64, writes: &Writes) -> Memory {
    let mut grains: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    for (offset, bytes) in writes {
        let grain = grains.entry(offset / Stream::GRAIN).or_insert_with(|| vec![0; Stream::GRAIN as usize]);
        let within = (offset % Stream::GRAIN) as usize;
        grain[within..within + bytes.len()].copy_from_slice(bytes);
    }
    let mut stream = Stream::new(new, size, "disk", &birth()).unwrap();
    let mut out = Vec::new();
    stream.start(&mut out);
    for (index, grain) in grains {
        let mut packer = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        packer.write_all(&grain).unwrap();
        stream.grain(index, &packer.finish().unwrap(), &mut out).unwrap();
    }
    stream.end(&mut out).unwrap();
    let mut memory = Memory::default();
    memory.write(0, &out);
    memory
}

/// Compares the disk with the model around each write, and looks at every run.
fn check(format: Format, memory: &Memory, size: u64, writes: &Writes) {
    let disk = Disk::open(format, memory).unwrap();
    assert_eq!(disk.virtual_size(), size);
    let mut shown: BTreeMap<u64, u8> = BTreeMap::new();
    for (offset, bytes) in writes {
        shown.extend((*offset..).zip(bytes.iter().copied()));
    }
    let mut seen = 0;
    let mut guest = 0;
    while guest < size {
        let run = disk.map(memory, guest, size - guest).unwrap();
        assert!(run.len > 0);
        let here = shown.range(guest..guest + run.len);
        match run.kind {
            Kind::Hole | Kind::Zero => assert!(here.clone().all(|(_, byte)| *byte == 0)),
            Kind::Data { file: FileIndex::IMAGE, offset } => {
                for (at, byte) in here.clone() {
                    assert_eq!(memory.get(offset + at - guest, 1), [*byte], "at {at}");
                }
            }
            Kind::Packed(packed) => {
                let mut unit = Vec::new();
                let stream = memory.get(packed.offset, packed.len);
                flate2::read::ZlibDecoder::new(&stream[..]).read_to_end(&mut unit).unwrap();
                for (at, byte) in here.clone() {
                    assert_eq!(unit[(at - packed.start) as usize], *byte, "at {at}");
                }
            }
            Kind::Data { .. } => panic!("another file"),
        }
        seen += here.count();
        guest += run.len;
    }
    assert_eq!(seen, shown.len());
}

fn images() -> Vec<NewImage> {
    let mut images = Vec::new();
    for allocation in [Allocation::Dynamic, Allocation::Fixed] {
        for zero_blocks in [true, false] {
            let block_size = if zero_blocks { None } else { Some(1 << 20) };
            images.push(NewImage::Vhdx(NewVhdx {
                allocation,
                zero_blocks,
                block_size,
                log_size: 2 << 20,
                logical_sector: None,
            }));
        }
        for size in [VpcSize::ByGeometry, VpcSize::Exact] {
            images.push(NewImage::Vpc(NewVpc { allocation, size }));
        }
        for block_size in [4096, 1 << 20] {
            images.push(NewImage::Vdi(NewVdi { allocation, block_size }));
        }
    }
    for zeroed_grain in [true, false] {
        images.push(NewImage::Vmdk(NewVmdk { zeroed_grain, ..NewVmdk::default() }));
    }
    images
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn disks_come_back(
        sectors in 0u64..300_000,
        places in proptest::collection::vec((any::<u64>(), 1usize..700, any::<u8>()), 0..12),
    ) {
        let size = sectors * 512;
        let mut writes = Writes::new();
        for (place, len, byte) in places {
            let at = place.checked_rem(size).unwrap_or(0) / 4096 * 4096;
            let len = (len as u64).min(size.saturating_sub(at)) as usize;
            writes.insert(at, vec![byte; len]);
        }
        for image in images() {
            let (memory, shown) = made(&image, size, &writes);
            prop_assert!(shown >= size);
            if !matches!(image, NewImage::Vpc(_)) {
                prop_assert_eq!(shown, size);
            }
            check(image.format(), &memory, shown, &writes);
        }
        let new = NewVmdk { kind: VmdkKind::StreamOptimized, ..NewVmdk::default() };
        check(Format::Vmdk, &streamed(&new, size, &writes), size, &writes);
    }
}

#[test]
fn large_disks_have_tables_of_several_parts() {
    for (size, image) in [
        (3 << 40, NewImage::Vhdx(NewVhdx { block_size: Some(1 << 20), ..NewVhdx::default() })),
        (60 << 40, NewImage::Vhdx(NewVhdx::default())),
        (2040 << 30, NewImage::Vpc(NewVpc::default())),
        (3 << 40, NewImage::Vdi(NewVdi::default())),
        (1 << 40, NewImage::Vmdk(NewVmdk::default())),
    ] {
        let writes: Writes =
            [0, 5 * MIB + 4096, size / 2, size - 4096].map(|at| (at, vec![0xb7; 4096])).into();
        let (memory, shown) = made(&image, size, &writes);
        assert_eq!(shown, size);
        let disk = Disk::open(image.format(), &memory).unwrap();
        for (at, bytes) in &writes {
            match disk.map(&memory, *at, 4096).unwrap().kind {
                Kind::Data { offset, .. } => assert_eq!(memory.get(offset, 4096), *bytes),
                other => panic!("{image:?} at {at}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_fixed_vhd_for_azure_has_whole_mebibytes() {
    let new = NewVpc { allocation: Allocation::Fixed, size: VpcSize::Exact };
    for (asked, size) in [(MIB, MIB), (MIB + 512, 2 * MIB), (10 * MIB - 1, 10 * MIB)] {
        let (memory, shown) = made(&NewImage::Vpc(new.clone()), asked, &Writes::new());
        assert_eq!((shown, memory.len), (size, size + 512));
    }
}

#[test]
fn what_is_out_of_range_is_refused() {
    let refused =
        |image: &NewImage, size| Layout::new(image, size, "disk", &birth()).unwrap_err().to_string();
    let vhdx = |new| NewImage::Vhdx(new);
    for block_size in [1 << 19, 3 << 20, 512 << 20] {
        let new = NewVhdx { block_size: Some(block_size), ..NewVhdx::default() };
        assert!(refused(&vhdx(new), MIB).contains("block size"));
    }
    assert!(refused(&vhdx(NewVhdx { log_size: 4096, ..NewVhdx::default() }), MIB).contains("log size"));
    assert!(refused(&vhdx(NewVhdx::default()), 65 << 40).contains("64 TiB"));
    assert!(refused(&NewImage::Vpc(NewVpc::default()), 2041 << 30).contains("2040 GiB"));
    assert!(
        refused(&NewImage::Vdi(NewVdi { block_size: 5, ..NewVdi::default() }), MIB).contains("block size")
    );
    let fixed = NewVpc { allocation: Allocation::Fixed, ..NewVpc::default() };
    for image in [NewImage::Vmdk(NewVmdk::default()), NewImage::Vpc(fixed)] {
        assert!(refused(&image, 0).contains("no disks of 0 bytes"));
    }
    let stream = NewVmdk { kind: VmdkKind::StreamOptimized, ..NewVmdk::default() };
    assert!(refused(&NewImage::Vmdk(stream.clone()), MIB).contains("order"));
    let mut made = Stream::new(&stream, MIB, "disk", &birth()).unwrap();
    made.grain(3, b"x", &mut Vec::new()).unwrap();
    assert!(made.grain(3, b"x", &mut Vec::new()).is_err());
    assert!(Stream::new(&stream, u64::MAX, "disk", &birth()).is_err());
}

#[test]
fn names_do_not_end_the_text_that_they_stand_in() {
    let stream = NewVmdk { kind: VmdkKind::StreamOptimized, ..NewVmdk::default() };
    let mut made = Stream::new(&stream, MIB, "a\"\nRW 1 FLAT \"/etc/passwd\" 0\n", &birth()).unwrap();
    let mut out = Vec::new();
    made.start(&mut out);
    let text = String::from_utf8_lossy(&out);
    assert!(text.contains("RW 2048 SPARSE \"a__RW 1 FLAT _/etc/passwd_ 0_\"\n"), "{text}");
}
