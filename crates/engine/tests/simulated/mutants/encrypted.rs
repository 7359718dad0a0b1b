//! Scenes of encrypted images.

use crate::crash::setup::{PASSPHRASE, Setup, encryption, passphrase};
use zebu_engine::jobs::change_key_slots_in;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    CreateOptions, Durability, Format, Image, KeySlotChange, KeySlotGuard, Keys, NewKey, OpenOptions,
    OpenedFile, Passphrase, SlotChoice,
};
use zebu_luks::{Limits, Luks1Header};
use zebu_sim::{Content, CrashOptions, SimFileConfig, SimWorld, Tear};

/// Writes of 64 bytes each, all of one sector and under way together.
#[test]
pub(crate) fn writes_of_parts_of_a_sector_all_arrive() {
    for seed in 0..10 {
        let setup =
            Setup { pattern: 8192, origin: crate::crash::setup::Origin::Own, ..Setup::plain() }.encrypted();
        let world = setup.world(&setup.make(seed), seed);
        let worker = world.worker();
        let image = setup.open(&world, &worker).unwrap();
        let all = world.block_on(async {
            let writes: Vec<_> = (0..8u8)
                .map(|part| {
                    let (image, worker) = (image.clone(), worker.clone());
                    async move {
                        let bytes = IoBuf::copy_of(&[part + 1; 64]).into();
                        image
                            .write(&worker, u64::from(part) * 64, bytes, Durability::Volatile)
                            .await
                            .0
                            .unwrap();
                    }
                })
                .collect();
            futures_util::future::join_all(writes).await;
            let (result, bufs) = image.read(&worker, 0, IoBuf::zeroed(512).into()).await;
            result.unwrap();
            let mut all = vec![0; 512];
            bufs.copy_to(0, &mut all);
            all
        });
        for (part, bytes) in (1u8..).zip(all.unwrap().chunks(64)) {
            assert!(bytes.iter().all(|byte| *byte == part), "seed {seed}: a write of part {part} is undone");
        }
    }
}

const FILE: &str = "top";

fn key(text: &str) -> Passphrase {
    Passphrase::new(text.as_bytes()).unwrap()
}

/// Runs a change of key slots on the file of a world.
async fn change(world: &SimWorld, worker: &Worker, change: &KeySlotChange) {
    let file = world.open(FILE, SimFileConfig::default()).unwrap();
    let open = OpenOptions::default().keys(Keys::of_top(passphrase()));
    change_key_slots_in(worker, &OpenedFile::new(file, Format::Luks), &open, change, KeySlotGuard::Keep)
        .await
        .unwrap();
}

/// Number of slots that count as used, none of which may be one that nothing opens.
fn used_slots(content: &Content, phrases: &[&[u8]]) -> Result<usize, String> {
    let header =
        Luks1Header::parse(&content.bytes(0..4096), &Limits::default()).map_err(|e| e.to_string())?;
    let mut used = 0;
    for slot in header.active_slots() {
        let material = header.material(slot).unwrap();
        let material = content.bytes(material);
        let opens = phrases.iter().any(|phrase| header.unlock(slot, phrase, &material).unwrap().is_some());
        if !opens {
            return Err(format!("slot {slot} counts as used, and nothing opens it"));
        }
        used += 1;
    }
    Ok(used)
}

/// A count of the keys that are left must leave out one that is none: the next removal could take the last one.
#[test]
pub(crate) fn a_key_slot_that_counts_as_used_opens() {
    let mut world = SimWorld::new(1);
    let phrases: [&[u8]; 2] = [PASSPHRASE, b"second"];
    for step in 0..3 {
        let worker = world.worker();
        let before = match step {
            0 => {
                let file = world.file(FILE, Content::new(), SimFileConfig::default());
                let options = CreateOptions::default()
                    .format(Format::Luks)
                    .size(Some(4096))
                    .encryption(Some(encryption()));
                world.block_on(Image::create_in(&worker, &file, &options)).unwrap().unwrap();
                1
            }
            1 => {
                let new = NewKey::new(key("second")).iteration_time(std::time::Duration::ZERO);
                world.block_on(change(&world, &worker, &KeySlotChange::Add(new))).unwrap();
                1
            }
            _ => {
                let old = KeySlotChange::Remove(SlotChoice::OpenedBy(key("second")));
                world.block_on(change(&world, &worker, &old)).unwrap();
                1
            }
        };
        if step > 0 {
            let options = CrashOptions { max_states: 300, tear: Tear::Sector, seed: 1 };
            for state in world.crash_states(&options) {
                let content = state.file(FILE).unwrap();
                match used_slots(content, &phrases) {
                    Ok(used) => assert!(used >= before, "{state}: {used} keys are left"),
                    Err(error) => panic!("step {step}, {state}: {error}"),
                }
            }
        }
        let content = world.content(FILE).unwrap();
        world = SimWorld::new(step + 2);
        world.file(FILE, content, SimFileConfig::default());
    }
}
