//! The targets in a plain loop, without nightly Rust: `cargo run --release --example steady -- SECONDS [SEED]
//! [TARGET...]`. First the inputs in `seeds/`, which fuzzing guided by coverage has found, then seeded random ones.
//! A panic names the target and the input or the seed, which alone replays it.

use arbitrary::{Result, Unstructured};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use zebu_foreign::Format;
use zebu_fuzz::{clients, foreign, image, luks, tables, words};

type Target = fn(&mut Unstructured<'_>) -> Result<()>;

const TARGETS: [(&str, Target); 27] = [
    ("image_read", image::read),
    ("image_write", image::write),
    ("image_compressed", image::compressed),
    ("foreign_image", foreign::image),
    ("foreign_vmdk", |input| foreign::damaged(Format::Vmdk, input)),
    ("foreign_vhdx", |input| foreign::damaged(Format::Vhdx, input)),
    ("foreign_vpc", |input| foreign::damaged(Format::Vpc, input)),
    ("foreign_vdi", |input| foreign::damaged(Format::Vdi, input)),
    ("foreign_qed", |input| foreign::damaged(Format::Qed, input)),
    ("foreign_parallels", |input| foreign::damaged(Format::Parallels, input)),
    ("foreign_qcow", |input| foreign::damaged(Format::Qcow, input)),
    ("foreign_cloop", |input| foreign::damaged(Format::Cloop, input)),
    ("foreign_dmg", |input| foreign::damaged(Format::Dmg, input)),
    ("header", tables::header),
    ("snapshot_table", tables::snapshots),
    ("bitmap_directory", tables::bitmaps),
    ("luks1", luks::luks1),
    ("luks2", luks::luks2),
    ("command_words", words::command),
    ("control_line", words::control),
    ("http_response", clients::http_response),
    ("http_words", clients::http_words),
    ("nbd_option", clients::nbd_option),
    ("nbd_reply", clients::nbd_reply),
    ("nbd_request", clients::nbd_request),
    ("vhost_request", clients::vhost_request),
    ("vhost_ring", clients::vhost_ring),
];

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Names the input that is under way when a panic passes.
enum Running {
    Seed(&'static str, u64),
    File(&'static str, PathBuf),
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            match self {
                Self::Seed(name, seed) => {
                    eprintln!("{name}: seed {seed}: replay with `cargo run --example steady -- 0 {seed}`");
                }
                Self::File(name, path) => eprintln!("{name}: {}", path.display()),
            }
        }
    }
}

/// Runs the inputs in `seeds/` of a target; how many there are.
fn replay(name: &'static str, target: Target) -> u64 {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("seeds").join(name);
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort_unstable();
    for path in &paths {
        let input = std::fs::read(path).expect("readable");
        let _running = Running::File(name, path.clone());
        let _ = target(&mut Unstructured::new(&input));
    }
    paths.len() as u64
}

fn main() {
    let (names, numbers): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|word| TARGETS.iter().any(|(name, _)| name == word));
    let mut numbers = numbers.iter().map(|word| word.parse::<u64>().expect("SECONDS [SEED] [TARGET...]"));
    let time = Duration::from_secs(numbers.next().unwrap_or(60));
    let first = numbers.next().unwrap_or(1);
    let is_chosen = |name: &str| names.is_empty() || names.iter().any(|other| other == name);
    let targets: Vec<_> = TARGETS.into_iter().filter(|(name, _)| is_chosen(name)).collect();
    let started = Instant::now();
    let kept: u64 = targets.iter().map(|&(name, target)| replay(name, target)).sum();
    let mut seed = first;
    loop {
        let mut state = seed;
        let len = next(&mut state) % 600 + 32;
        let input: Vec<u8> = (0..len).map(|_| next(&mut state) as u8).collect();
        for &(name, target) in &targets {
            let _running = Running::Seed(name, seed);
            // An input that is used up early is as good as one that was never made.
            let _ = target(&mut Unstructured::new(&input));
        }
        seed += 1;
        if started.elapsed() >= time {
            break;
        }
    }
    println!(
        "{} inputs, each for {} targets: no fault (seeds {first} to {}), after {kept} kept inputs",
        seed - first,
        targets.len(),
        seed - 1
    );
}
