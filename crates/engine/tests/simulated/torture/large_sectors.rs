//! Disks by themselves whose cipher has sectors of 4096 bytes, on a disk that tears at 512: after each step, every crash state at once,
//! decrypted by the rules of the format alone.

use crate::crash::guest::{Guest, Request};
use crate::crash::judge::read_all;
use crate::crash::setup::{PASSPHRASE, Setup, passphrase};
use crate::torture::possible_image::Source;
use futures_util::future::join_all;
use std::process::Command;
use std::rc::Rc;
use zebu_engine::storage::Worker;
use zebu_engine::{Access, Format, Image, Keys, OpenOptions, OpenedFile, ZeroMode};
use zebu_luks::{CipherSpec, SectorCipher};
use zebu_sim::{
    Content, CrashOptions, DiscardLeaves, GuestConfig, GuestModel, SECTOR, Seeds, SimConfig, SimFileConfig,
    SimRng, SimWorld, Tally, Tear,
};
use zebu_storage::sabotage::{self, Fault};

const FILE: &str = "disk.luks";
/// Bytes before the data.
const HEADER: u64 = 512 << 10;
/// Bytes of the disk.
const SIZE: u64 = 64 << 10;
/// Bytes of a sector of the cipher.
const LARGE: u64 = 4096;
const PER_LARGE: u64 = LARGE / SECTOR;

/// Sizes of a guest's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Requests {
    /// Whole sectors of the cipher, as a guest asks for that knows the logical block.
    WholeSectors,
    /// Any sectors of 512 bytes.
    PartsOfSectors,
}

impl Requests {
    fn unit(self) -> u64 {
        if self == Self::WholeSectors { LARGE } else { SECTOR }
    }

    fn random(self, rng: &mut SimRng) -> Request {
        let unit = self.unit() / SECTOR;
        match Request::random(rng, SIZE / unit, LARGE / unit, false) {
            Request::Write { offset, len, durability } => {
                Request::Write { offset: offset * unit, len: len * unit, durability }
            }
            Request::Zero { offset, len, mode } => {
                Request::Zero { offset: offset * unit, len: len * unit, mode }
            }
            Request::Discard { offset, len } => Request::Discard { offset: offset * unit, len: len * unit },
            Request::Read { offset, len } => Request::Read { offset: offset * unit, len: len * unit },
            other => other,
        }
    }
}

/// The disk below: what it writes as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Below {
    /// Sectors of 512 bytes.
    Sectors,
    /// Blocks of 4096 bytes, with O_DIRECT.
    Blocks,
}

impl Below {
    fn config(self) -> SimFileConfig {
        if self == Self::Blocks { SimFileConfig::direct(LARGE as u32) } else { SimFileConfig::default() }
    }

    fn tear(self) -> Tear {
        if self == Self::Blocks { Tear::Block } else { Tear::Sector }
    }
}

/// A container of cryptsetup's, with zeroes on its disk.
struct Container {
    content: Content,
    cipher: SectorCipher,
    /// A block of 16 bytes hangs on that before it, so that one at a tear is neither old nor new.
    is_chained: bool,
    tally: Tally,
}

impl Container {
    /// `None`: tests with other programs are left out.
    fn make(cipher: &str, key_len: usize) -> Option<Self> {
        if std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1") {
            eprintln!("skipped: ZEBU_SKIP_QEMU=1");
            return None;
        }
        let scratch = tempfile::tempdir().unwrap();
        let key: Vec<u8> = (0..key_len as u8).map(|byte| byte.wrapping_mul(37)).collect();
        std::fs::write(scratch.path().join("key"), &key).unwrap();
        std::fs::write(scratch.path().join("phrase"), PASSPHRASE).unwrap();
        let path = scratch.path().join(FILE);
        std::fs::File::create(&path).unwrap().set_len(HEADER + SIZE).unwrap();
        let line = format!(
            "luksFormat -q --type luks2 --cipher {cipher} --key-size {} --sector-size {LARGE} --volume-key-file key \
             --luks2-metadata-size 16k --luks2-keyslots-size 256k --offset {} --pbkdf pbkdf2 \
             --pbkdf-force-iterations 1000 --key-file phrase {FILE}",
            key_len * 8,
            HEADER / SECTOR
        );
        let output =
            Command::new("cryptsetup").current_dir(&scratch).args(line.split_whitespace()).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        let spec = CipherSpec::parse_joined(cipher, key_len).unwrap();
        let cipher = SectorCipher::with_sector_size(spec, &key, LARGE as u32).unwrap();
        let content = Content::from_bytes(&std::fs::read(path).unwrap());
        let mut made = Self { content, cipher, is_chained: !spec.mode().is_xts(), tally: Tally::default() };
        let world = made.world(1, Below::Sectors);
        let worker = world.worker();
        let image = open(&world, &worker, Below::Sectors);
        assert_eq!((image.virtual_size(), image.logical_block_size()), (SIZE, LARGE as u32));
        let zeroed = world.block_on(async {
            image.write_zeroes(&worker, 0, SIZE, ZeroMode::Keep).await?;
            image.close(&worker).await
        });
        zeroed.unwrap().unwrap();
        made.content = world.content(FILE).unwrap();
        Some(made)
    }

    fn world(&self, seed: u64, below: Below) -> SimWorld {
        let mut config = SimConfig::seeded(seed);
        if below == Below::Blocks {
            // The simulation splits at 512 bytes, and so a block that such a disk writes as a whole.
            config.splits = 0;
        }
        let world = SimWorld::with_config(&config);
        world.file(FILE, self.content.clone(), below.config());
        world
    }

    /// Runs requests of a seed. `Err`: what must not be.
    fn run(&self, seed: u64, requests: Requests) -> Result<(), String> {
        let mut rng = SimRng::new(seed ^ 0x6c61_7267_6573_6563);
        let below = *rng.pick(&[Below::Sectors, Below::Sectors, Below::Blocks]);
        let world = self.world(rng.next_u64(), below);
        world.count_in(&self.tally);
        let workers: Vec<Worker> = (0..rng.between(1, 3)).map(|_| world.worker()).collect();
        let image = open(&world, &workers[0], below);
        let config = GuestConfig { len: SIZE, backing_len: 0, discard: DiscardLeaves::ZeroOrOld };
        let mut model = GuestModel::new(config);
        model.count_in(&self.tally);
        let guest = Rc::new(Guest::new(image, model, &Setup::plain()));
        let streams: Vec<_> = (0..rng.between(2, 4))
            .map(|number| {
                let list: Vec<Request> = (0..rng.between(4, 16)).map(|_| requests.random(&mut rng)).collect();
                let worker = workers[number as usize % workers.len()].clone();
                let (guest, on) = (Rc::clone(&guest), worker.clone());
                worker.spawn(async move {
                    for request in list {
                        guest.perform(&on, request).await;
                    }
                })
            })
            .collect();
        let mut seen = None;
        let ended = world.block_on_watched(join_all(streams), |_| {
            let now = (world.events(), guest.model.borrow().moment());
            if seen == Some(now) || guest.violation.borrow().is_some() {
                return;
            }
            seen = Some(now);
            if let Err(violation) = self.check_all(&world, &guest.model.borrow()) {
                guest.blame(format!("at {:?}: {violation}", world.now()));
            }
        });
        ended.map_err(|stuck| stuck.to_string())?;
        if let Some(violation) = guest.violation.borrow_mut().take() {
            return Err(violation);
        }
        self.check_states(&world, below, &guest.model.borrow(), rng.next_u64())
    }

    /// Every content that the file may have now, at once.
    fn check_all(&self, world: &SimWorld, model: &GuestModel) -> Result<(), String> {
        let possible = world.possible(FILE).unwrap();
        let file = Source::Uncertain(&possible);
        for large in 0..SIZE / LARGE {
            let first = HEADER / SECTOR + large * PER_LARGE;
            let variants: Vec<Vec<Vec<u8>>> =
                (first..first + PER_LARGE).map(|sector| file.variants(sector)).collect();
            self.check_large(large, &variants, model)?;
        }
        Ok(())
    }

    /// One sector of the cipher, whose parts may have these contents.
    fn check_large(&self, large: u64, variants: &[Vec<Vec<u8>>], model: &GuestModel) -> Result<(), String> {
        for (part, contents) in variants.iter().enumerate() {
            let guest = large * LARGE + part as u64 * SECTOR;
            if self.is_chained && !model.is_settled(guest) {
                continue;
            }
            let before = if part > 0 && self.is_chained { &variants[part - 1] } else { &variants[part][..1] };
            for (before, content) in before.iter().flat_map(|b| contents.iter().map(move |c| (b, c))) {
                let mut parts: Vec<&[u8]> = variants.iter().map(|contents| &contents[0][..]).collect();
                if part > 0 && self.is_chained {
                    parts[part - 1] = before;
                }
                parts[part] = content;
                let mut bytes = parts.concat();
                self.cipher.decrypt(large * PER_LARGE, &mut bytes).unwrap();
                let at = part * SECTOR as usize;
                model.check(guest, &bytes[at..at + SECTOR as usize]).map_err(|v| v.to_string())?;
            }
        }
        Ok(())
    }

    /// Some states that a crash may leave, opened and read.
    fn check_states(
        &self,
        world: &SimWorld,
        below: Below,
        model: &GuestModel,
        seed: u64,
    ) -> Result<(), String> {
        let options = CrashOptions { max_states: 16, tear: below.tear(), seed };
        for state in world.crash_states(&options) {
            let after = SimWorld::new(0);
            after.file(FILE, state.file(FILE).unwrap().clone(), SimFileConfig::default());
            let worker = after.worker();
            let image = open(&after, &worker, Below::Sectors);
            let disk = after.block_on(read_all(&worker, &image, SIZE)).unwrap()?;
            for (offset, bytes) in (0..).step_by(SECTOR as usize).zip(disk.chunks(SECTOR as usize)) {
                if self.is_chained && below == Below::Sectors && !model.is_settled(offset) {
                    continue;
                }
                model.check(offset, bytes).map_err(|violation| format!("{state}: {violation}"))?;
            }
        }
        Ok(())
    }
}

/// Opens the file of a world for writing.
fn open(world: &SimWorld, worker: &Worker, below: Below) -> Image {
    let file = world.open(FILE, below.config()).unwrap();
    let options = OpenOptions::default()
        .format(Some(Format::Luks))
        .access(Access::ReadWrite)
        .keys(Keys::of_top(passphrase()));
    let chain = vec![OpenedFile::new(file, Format::Luks)];
    world.block_on(Image::open_files(worker, chain, &options)).unwrap().unwrap()
}

fn run_seeds(container: Option<Container>, requests: Requests) {
    let Some(mut container) = container else { return };
    let seeds = Seeds::new(10);
    container.tally = seeds.tally().clone();
    seeds.run(|seed| {
        if let Err(violation) = container.run(seed, requests) {
            panic!("seed {seed}: {violation}");
        }
    });
}

fn xts() -> Option<Container> {
    Container::make("aes-xts-plain64", 64)
}

fn cbc() -> Option<Container> {
    Container::make("aes-cbc-plain64", 32)
}

/// Each sector of 512 bytes is old or new.
#[test]
fn whole_sectors_in_xts() {
    run_seeds(xts(), Requests::WholeSectors);
}

/// In XTS a block of 16 bytes hangs on its place alone: what a part of a sector is written beside stays as it is.
#[test]
fn parts_of_sectors_in_xts() {
    run_seeds(xts(), Requests::PartsOfSectors);
}

/// In a torn sector anything may be, and nowhere else.
#[test]
fn whole_sectors_in_cbc() {
    run_seeds(cbc(), Requests::WholeSectors);
}

/// A guest that takes sectors of 512 bytes for independent loses some: this is why it is told of larger ones.
#[test]
fn parts_of_sectors_in_cbc_are_lost() {
    let Some(container) = cbc() else { return };
    let lost = (0..20).find_map(|seed| container.run(seed, Requests::PartsOfSectors).err());
    let violation = lost.expect("a torn sector takes its neighbours along");
    assert!(violation.contains("allowed:"), "{violation}");
}

/// The defence taken away: requests share a sector, and one finds noise or leaves it.
#[test]
fn sectors_that_are_shared_become_noise() {
    for (container, requests) in [(xts(), Requests::PartsOfSectors), (cbc(), Requests::WholeSectors)] {
        let Some(container) = container else { return };
        let run = |fault, seed| sabotage::under(fault, || container.run(seed, requests)).0;
        let seed = (0..40).find(|seed| run(Some(Fault::ShareSectors), *seed).is_err());
        let seed = seed.expect("shared sectors are noticed");
        assert_eq!(run(None, seed), Ok(()), "{requests:?}, seed {seed}: without the fault");
    }
}
