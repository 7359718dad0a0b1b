//! Images of every format, intact and damaged: what is intact maps to its disk, and what is damaged ends in an error.

mod samples;

use flate2::{Decompress, FlushDecompress};
use proptest::prelude::*;
use samples::Sample;
use samples::cases::CASES;
use samples::hyper_v::{set_vhd_sum, vhd_footer};
use samples::put;
use std::cell::RefCell;
use std::collections::BTreeSet;
use zebu_foreign::{Disk, Error, FileIndex, Files, Format, Identity, Kind, Missing, Packing, extent_files};

/// Files in memory. Of each, only those pages are there that were asked for.
struct Memory {
    files: Vec<Vec<u8>>,
    there: RefCell<BTreeSet<(u32, u64)>>,
}

const PAGE: u64 = 1000;

impl Memory {
    fn new(files: Vec<Vec<u8>>) -> Self {
        Self { files, there: RefCell::default() }
    }

    fn ask<T>(&self, work: impl Fn(&Self) -> zebu_foreign::Result<T>) -> zebu_foreign::Result<T> {
        for _ in 0..200 {
            match work(self) {
                Err(Error::Missing(missing)) => {
                    let pages = missing.offset / PAGE..(missing.offset + missing.len as u64).div_ceil(PAGE);
                    let new = pages.map(|page| (missing.file.0, page));
                    let before = self.there.borrow().len();
                    self.there.borrow_mut().extend(new);
                    assert!(self.there.borrow().len() > before, "asks twice for {missing:?}");
                }
                other => return other,
            }
        }
        panic!("asks without end");
    }
}

impl Files for Memory {
    fn len(&self, file: FileIndex) -> u64 {
        self.files.get(file.0 as usize).map_or(0, |bytes| bytes.len() as u64)
    }

    fn read(&self, file: FileIndex, offset: u64, out: &mut [u8]) -> Result<(), Missing> {
        let end = offset + out.len() as u64;
        assert!(end <= self.len(file), "asks for what is not in the file");
        for page in offset / PAGE..end.div_ceil(PAGE) {
            if !self.there.borrow().contains(&(file.0, page)) {
                return Err(Missing { file, offset, len: out.len() });
            }
        }
        out.copy_from_slice(&self.files[file.0 as usize][offset as usize..end as usize]);
        Ok(())
    }
}

fn format(name: &str) -> Format {
    Format::ALL.into_iter().find(|format| format.name() == name).expect("a format")
}

/// Opens a sample with the files that it names.
fn open(sample: &Sample) -> zebu_foreign::Result<(Memory, Disk)> {
    let format = format(sample.format);
    let image = Memory::new(vec![sample.files[0].1.clone()]);
    let names = image.ask(|files| extent_files(format, files))?;
    let named = names.iter().map(|name| {
        let found = sample.files.iter().find(|(known, _)| known == name);
        found.map(|(_, bytes)| bytes.clone()).unwrap_or_default()
    });
    let files = Memory::new(image.files.iter().cloned().chain(named).collect());
    let disk = files.ask(|files| Disk::open(format, files))?;
    Ok((files, disk))
}

/// Reads a disk by its map. Holes are zero.
fn read(files: &Memory, disk: &Disk) -> zebu_foreign::Result<Vec<u8>> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < disk.virtual_size() {
        let run = files.ask(|files| disk.map(files, at, disk.virtual_size() - at))?;
        assert!(run.len > 0 && at + run.len <= disk.virtual_size());
        let len = run.len as usize;
        match run.kind {
            Kind::Hole | Kind::Zero => out.resize(out.len() + len, 0),
            Kind::Data { file, offset } => {
                out.extend_from_slice(&files.files[file.0 as usize][offset as usize..][..len]);
            }
            Kind::Packed(packed) => {
                let stream =
                    &files.files[packed.file.0 as usize][packed.offset as usize..][..packed.len as usize];
                let mut unit = vec![0; packed.unit as usize];
                let mut inflater = Decompress::new(packed.packing == Packing::Zlib);
                let ended = inflater.decompress(stream, &mut unit, FlushDecompress::Finish);
                ended.map_err(|_| Error::Unsupported { message: "a damaged stream".into() })?;
                out.extend_from_slice(&unit[(at - packed.start) as usize..][..len]);
            }
        }
        at += run.len;
    }
    Ok(out)
}

fn read_sample(sample: &Sample) -> zebu_foreign::Result<Vec<u8>> {
    let (files, disk) = open(sample)?;
    read(&files, &disk)
}

#[test]
fn intact_images_map_to_their_disks() {
    for (name, sample) in samples::all() {
        let found = read_sample(sample).unwrap_or_else(|error| panic!("{name}: {error}"));
        let first = found.iter().zip(&sample.disk).position(|(a, b)| a != b);
        assert!(found == sample.disk, "{name}: {} bytes of {}, {first:?}", found.len(), sample.disk.len());
    }
}

#[test]
fn differencing_images_name_their_parents_and_map_their_own_sectors() {
    for (sample, name, identity) in [
        (samples::vhd_differencing(), "dir/parent.vhd", Identity::Uuid([0xcd; 16])),
        (
            samples::vhdx_differencing(),
            "../base.vhdx",
            Identity::Uuid([4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16]),
        ),
    ] {
        let (files, disk) = open(&sample).unwrap();
        let parent = disk.parent().unwrap();
        assert_eq!((parent.name.as_str(), &parent.identities[..]), (name, &[identity][..]));
        assert!(read(&files, &disk).unwrap() == sample.disk, "{name}");
    }
}

#[test]
fn a_run_may_begin_and_end_anywhere() {
    for sample in [samples::vhdx_differencing(), samples::flat(), samples::parallels(), samples::dmg()] {
        let (files, disk) = open(&sample).unwrap();
        for guest in (0..disk.virtual_size()).step_by(333) {
            for most in [1, 100, 5000] {
                let run = files.ask(|files| disk.map(files, guest, most)).unwrap();
                assert!(run.len <= most && run.len > 0);
                let expected = &sample.disk[guest as usize..(guest + run.len) as usize];
                match run.kind {
                    Kind::Hole | Kind::Zero => assert!(expected.iter().all(|byte| *byte == 0)),
                    Kind::Data { file, offset } => {
                        assert_eq!(
                            &files.files[file.0 as usize][offset as usize..][..expected.len()],
                            expected
                        );
                    }
                    Kind::Packed(_) => {}
                }
            }
        }
    }
}

#[test]
fn damage_is_told() {
    for (name, make, damage, message) in CASES {
        let mut sample = make();
        damage(sample.header());
        match read_sample(&sample) {
            Ok(_) => panic!("{name}: it can be read"),
            Err(error) => assert!(error.to_string().contains(message), "{name}: {error}"),
        }
    }
}

#[test]
fn public_mistakes_of_others_are_among_the_cases() {
    for (number, cases) in samples::cases::PUBLIC {
        for case in *cases {
            assert!(CASES.iter().any(|(name, ..)| name == case), "{number}: no case '{case}'");
        }
    }
}

#[test]
fn chunks_of_a_dmg_that_make_no_sense_are_refused() {
    let data = vec![0; 1024];
    for (chunk, message) in [
        ((0x8000_0007, 0, 2, 0, 1024), "LZFSE"),
        ((0x8000_0004, 0, 2, 0, 1024), "ADC"),
        ((0x8000_0008, 0, 2, 0, 1024), "LZMA"),
        ((7, 0, 2, 0, 1024), "unknown type"),
        ((0x8000_0005, 0, 1 << 20, 0, 1024), "too large"),
        ((0x8000_0005, 0, 2, 0, 0), "empty"),
        ((0x8000_0005, 0, 2, 5000, 1024), "cut off"),
        ((1, 0, 2, 0, 512), "stored chunk"),
        ((1, 0, u64::MAX, 0, 512), "2^64"),
        ((2, u64::MAX, 1, 0, 512), "2^64"),
        ((2, 1, 1, 0, 0), "overlap"),
    ] {
        let image = samples::packed::dmg_of(&data, &[(2, 0, 2, 0, 0), chunk], 100);
        let image = if message == "overlap" { image } else { samples::packed::dmg_of(&data, &[chunk], 100) };
        let error = read_sample(&Sample::one("dmg", image, Vec::new())).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
}

/// The writer of a VHD decides which of its two sizes counts.
#[test]
fn the_size_of_a_vhd_follows_its_writer() {
    let size = 5000 * 512u64;
    for (creator, expected) in [
        (b"win ", size),
        (b"qem2", size),
        (b"d2v ", size),
        (b"vbox", size),
        (b"tap\0", size),
        (b"vpc ", 72 * 4 * 17 * 512),
        (b"qemu", 72 * 4 * 17 * 512),
    ] {
        let mut footer = vhd_footer(2, size);
        footer[28..32].copy_from_slice(creator);
        footer[56..60].copy_from_slice(&[0, 72, 4, 17]);
        set_vhd_sum(&mut footer, 64);
        let image = [vec![0; size as usize], footer].concat();
        let (_, disk) = open(&Sample::one("vpc", image, Vec::new())).unwrap();
        assert_eq!(disk.virtual_size(), expected, "{creator:?}");
    }
}

/// An error tells of what is missing; the rest is not read as something else.
#[test]
fn images_that_are_cut_off_end_in_errors_or_in_their_disk() {
    for (name, sample) in samples::all() {
        // The end of a text that names files can't be missed.
        if sample.files.len() > 1 {
            continue;
        }
        let len = sample.files[0].1.len();
        let steps = if len > 100_000 { 12 } else { 200 };
        for step in 0..steps {
            let mut cut = sample.clone();
            cut.image().truncate(len * step / steps);
            if let Ok(found) = read_sample(&cut) {
                assert!(found == sample.disk, "{name} cut to {}", len * step / steps);
            }
        }
    }
}

/// A file that is cut off in the middle of its data loses the rest alone, to the sector.
#[test]
fn data_before_the_end_of_a_cut_file_is_mapped() {
    let all = samples::all();
    for (name, at, start, len) in [
        // Of each: the file's number, where the data lies that is cut, and where its block begins on the disk.
        ("vmdk-flat", 1, 0, 4096),
        ("vmdk-sparse", 0, 3 * 4096, 4096),
        ("vdi", 0, 0, 1 << 20),
        ("qed", 0, 4096, 4096),
    ] {
        let (_, mut sample) = all.iter().find(|(known, _)| *known == name).expect("a sample").clone();
        // The data that comes last in the file loses its last sector and a half.
        let file = &mut sample.files[at].1;
        file.truncate(file.len() - 700);
        let (files, disk) = open(&sample).unwrap_or_else(|error| panic!("{name}: {error}"));
        let kept = (len - 700) / 512 * 512;
        let mut found = Vec::new();
        while found.len() < kept {
            let guest = (start + found.len()) as u64;
            let run = files.ask(|files| disk.map(files, guest, len as u64 - found.len() as u64)).unwrap();
            let Kind::Data { file, offset } = run.kind else { panic!("{name}: {run:?}") };
            let bytes = &files.files[file.0 as usize][offset as usize..][..run.len as usize];
            found.extend_from_slice(bytes);
        }
        assert!(found.len() == kept && found == sample.disk[start..start + kept], "{name}");
        let lost = files.ask(|files| disk.map(files, (start + kept) as u64, 512)).unwrap_err();
        assert!(lost.to_string().contains("past the end of the file"), "{name}: {lost}");
    }
}

/// A disk of 8 EiB whose tables tell of a few bytes: its holes are few runs, and not one for each block.
#[test]
fn holes_of_huge_disks_are_few_runs() {
    const HUGE: u64 = i64::MAX as u64 / 512;
    let mut parallels = samples::parallels();
    put(parallels.image(), 0, b"WithouFreSpacExt");
    put(parallels.image(), 36, &HUGE.to_le_bytes());
    let mut qed = samples::qed();
    put(qed.image(), 48, &(1u64 << 30).to_le_bytes());
    let mut se_sparse = samples::se_sparse();
    put(&mut se_sparse.files[1].1, 16, &HUGE.to_le_bytes());
    se_sparse.files[0].1 =
        samples::vmware::descriptor("seSparse", "", &format!("RW {HUGE} SESPARSE \"delta\""));
    for mut sample in [parallels, qed, se_sparse] {
        // Data of other units than the sample's would lie past its end.
        let len = sample.image().len();
        sample.image().resize(len + (4 << 20), 0);
        let (files, disk) = open(&sample).unwrap();
        let (mut at, mut runs) = (0, 0);
        while at < disk.virtual_size() {
            let run = files.ask(|files| disk.map(files, at, u64::MAX)).unwrap();
            at += run.len;
            runs += 1;
            assert!(runs < 1000, "{}: {at} of {} bytes", sample.format, disk.virtual_size());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn any_bytes_in_headers_and_tables_end_in_an_error_or_a_disk(
        which in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((0usize..6000, any::<u8>()), 1..12),
        file in any::<prop::sample::Index>(),
    ) {
        let all = samples::all();
        let (_, mut sample) = all[which.index(all.len())].clone();
        let at = file.index(sample.files.len());
        let bytes = &mut sample.files[at].1;
        for (at, byte) in changes {
            // From the end as well, where footers are.
            let at = if at % 3 == 0 { bytes.len().saturating_sub(at / 3 + 1) } else { at % bytes.len() };
            bytes[at] = byte;
        }
        if let Ok((files, disk)) = open(&sample)
            && disk.virtual_size() < 64 << 20
        {
            let _ = read(&files, &disk);
        }
    }
}
