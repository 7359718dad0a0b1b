//! Images from strangers: every hostile image with every command ends in an error or a correct result, within memory in
//! proportion to the file and in bounded time; and no trick makes a command open a file that was not allowed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use zebu_tests::hostile::{self, base, references};
use zebu_tests::program::{Finished, find, finish, finish_with, replacing, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;
use zebu_tests::usage::run_measured;

const IMAGE: &str = "image";
/// Resident memory that a command may have beside 4 times the file's size, KiB.
const MEMORY_KIB: u64 = 48 << 10;

/// Processor time that a command may take: so much, and a second more for each MiB of the file.
const DEADLINE: Duration = Duration::from_secs(20);

/// Reads the image as a whole; what it makes is compared with what QEMU makes of the image.
const CONVERT: &str = "convert -f qcow2 -O raw IMAGE out1";

/// Every command that works on an image: those that only read it get it, those that write get copies. Words are split at
/// spaces; what stands between two bars is one word.
const COMMANDS: &[&str] = &[
    "info -f qcow2 IMAGE",
    "info -f qcow2 --output json IMAGE",
    "info -f qcow2 --verdict IMAGE",
    "check -f qcow2 IMAGE",
    "map -f qcow2 --output json IMAGE",
    CONVERT,
    "convert -f qcow2 -O qcow2 -c IMAGE out2",
    "convert -f qcow2 -O qcow2 -l s IMAGE out3",
    "convert -f qcow2 -O qcow2 --bitmaps IMAGE out7",
    "dd -f qcow2 -O qcow2 if=IMAGE of=out4 bs=64k count=40",
    "measure -f qcow2 -O qcow2 IMAGE",
    "compare -f qcow2 -F qcow2 IMAGE IMAGE",
    "snapshot -l IMAGE",
    "backup -f qcow2 IMAGE out5 --manifest manifest",
    "verify -f qcow2 --manifest manifest out5",
    "backup -f qcow2 -l s IMAGE out6",
    "verify -f qcow2 IMAGE",
    "bench -f qcow2 -c 64 IMAGE",
    "io -r -f qcow2 IMAGE -c |read 0 4M|",
    "create -f qcow2 -b IMAGE -F qcow2 overlay",
    "io -f qcow2 overlay -c |write -P 5 1k 200k| -c |read 0 4M|",
    "clone -f qcow2 IMAGE clone",
    "check -f qcow2 -r all COPY1",
    "io -f qcow2 COPY2 -c |write -P 1 0 64k| -c |write -P 2 64k 4k| -c |write -z 128k 64k| -c |discard 192k 64k| \
     -c |write -P 3 1M 64k| -c |write -c -P 4 2M 64k| -c flush",
    "resize -f qcow2 COPY3 8M",
    "bitmap -f qcow2 --add COPY4 new",
    "bitmap -f qcow2 --merge bitmap COPY4 new",
    "bitmap -f qcow2 --clear --disable COPY4 bitmap",
    "bitmap -f qcow2 --remove COPY4 bitmap",
    "bitmap -f qcow2 --remove COPY5 bitmap",
    "snapshot -c another COPY5",
    "snapshot -a s COPY5",
    "snapshot -d s COPY5",
    "amend -f qcow2 -o lazy_refcounts=on COPY6",
    "bitmap -f qcow2 --remove COPY6 bitmap",
    "snapshot -d s COPY6",
    "amend -f qcow2 -o compat=0.10 COPY6",
    "rebase -f qcow2 -b || COPY7",
    "bench -f qcow2 -w -c 64 COPY8",
    "create -f qcow2 -b COPY9 -F qcow2 top",
    "io -f qcow2 top -c |write -P 6 1k 200k|",
    "commit -f qcow2 top",
];

/// Copies of the image that commands write.
const COPIES: usize = 9;

/// The words of a command.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('|').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(|word| word.replace("IMAGE", IMAGE)));
        }
    }
    words
}

/// The fault in how a command ended.
fn fault(out: &Finished, peak_kib: u64, allowed_kib: u64) -> Option<String> {
    if !matches!(out.code, Some(0..=4 | 63)) {
        return Some(format!("ended by a signal, a panic, or out of time: {out}"));
    }
    if out.stderr.contains("panicked") {
        return Some(format!("panicked: {out}"));
    }
    if out.code != Some(0) && out.stderr.is_empty() && out.stdout.is_empty() {
        return Some(format!("failed in silence: {out}"));
    }
    (peak_kib > allowed_kib).then(|| format!("{peak_kib} KiB resident, {allowed_kib} allowed: {out}"))
}

/// The memory for an image while its chain is opened does not depend on its clusters.
#[test]
fn a_chain_of_small_files_with_large_clusters_takes_little_memory() {
    const IMAGES: u32 = 150;
    let scratch = Scratch::new("strangers");
    for number in 0..IMAGES {
        let mut file = vec![0; 4096];
        let mut set = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        for (at, value) in [(0, 0x5146_49fb), (4, 3), (20, 21), (56, 1), (96, 4), (100, 104u32)] {
            set(at, &value.to_be_bytes());
        }
        set(48, &(2u64 << 20).to_be_bytes());
        if number > 0 {
            let (backing, format) = ((number - 1).to_string(), b"qcow2");
            set(8, &512u64.to_be_bytes());
            set(16, &(backing.len() as u32).to_be_bytes());
            set(512, backing.as_bytes());
            set(104, &[0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, format.len() as u8]);
            set(112, format);
        }
        std::fs::write(scratch.file(&number.to_string()), file).expect("scratch is writable");
    }
    let top = (IMAGES - 1).to_string();
    for words in [
        vec!["info", "-f", "qcow2", "--backing-chain", &top],
        vec!["map", "-f", "qcow2", &top],
        vec!["convert", "-f", "qcow2", "-O", "raw", &top, "out"],
    ] {
        let (out, peak_kib) =
            run_measured(Path::new(env!("CARGO_BIN_EXE_measured")), DEADLINE, scratch.path(), &words);
        let allowed_kib = MEMORY_KIB + 4 * 4 * u64::from(IMAGES);
        assert_eq!((out.code, fault(&out, peak_kib, allowed_kib)), (Some(0), None), "{words:?}");
    }
}

/// A result is a correct one: whatever QEMU reads in the image, too, reads the same. What QEMU refuses is nobody's to say.
fn differs_from_qemu(dir: &Path) -> Option<String> {
    const LARGEST: u64 = 64 << 20;
    let len = std::fs::metadata(dir.join("out1")).expect("just made").len();
    let qemu_img = find("qemu-img").filter(|_| len <= LARGEST)?;
    let mut command = Command::new(find("timeout").expect("coreutils are there"));
    command.args(["-s", "KILL", "60"]).arg(qemu_img);
    command.args(["convert", "-f", "qcow2", "-O", "raw", IMAGE, "theirs"]).current_dir(dir);
    if finish(command).code != Some(0) {
        return None;
    }
    let read = |name: &str| std::fs::read(dir.join(name)).expect("just made");
    let (ours, theirs) = (read("out1"), read("theirs"));
    let first = ours.iter().zip(&theirs).position(|(a, b)| a != b);
    let what =
        format!("{} bytes, and {} of QEMU's; the first that differs is {first:?}", ours.len(), theirs.len());
    (ours != theirs).then(|| format!("converted to something else than by QEMU: {what}"))
}

/// Runs the commands whose index `has` takes on one image; all that is wrong, and how many commands refused the image.
fn faults(dir: &Path, name: &str, write: &dyn Fn(&Path), has: impl Fn(usize) -> bool) -> (Vec<String>, u32) {
    let (mut faults, mut failed) = (Vec::new(), 0);
    write(&dir.join(IMAGE));
    for copy in 1..=COPIES {
        std::fs::copy(dir.join(IMAGE), dir.join(format!("COPY{copy}"))).expect("scratch is writable");
    }
    let before = std::fs::read(dir.join(IMAGE)).expect("just written");
    let allowed_kib = MEMORY_KIB + 4 * before.len() as u64 / 1024;
    let deadline = DEADLINE + Duration::from_secs(before.len() as u64 >> 20);
    for (index, line) in COMMANDS.iter().enumerate() {
        if !has(index) {
            continue;
        }
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (out, peak_kib) = run_measured(Path::new(env!("CARGO_BIN_EXE_measured")), deadline, dir, &words);
        failed += u32::from(out.code != Some(0));
        faults.extend(fault(&out, peak_kib, allowed_kib).map(|fault| format!("{name}: {fault}")));
        if *line == CONVERT && out.code == Some(0) {
            faults.extend(differs_from_qemu(dir).map(|fault| format!("{name}: {fault}")));
        }
    }
    if std::fs::read(dir.join(IMAGE)).expect("still there") != before {
        faults.push(format!("{name}: a command that only reads has changed the image"));
    }
    for made in std::fs::read_dir(dir).expect("still there").flatten() {
        std::fs::remove_file(made.path()).expect("a file of our own");
    }
    (faults, failed)
}

#[test]
fn the_intact_image_is_clean_and_reads_as_made() {
    let scratch = Scratch::new("strangers");
    std::fs::write(scratch.file(IMAGE), base::image()).expect("scratch is writable");
    zebu(scratch.path(), ["check", "-f", "qcow2", IMAGE]).ok();
    let pattern = [
        "io",
        "-r",
        "-f",
        "qcow2",
        IMAGE,
        "-c",
        "read -P 0x11 0 64k",
        "-c",
        "read -P 0x22 64k 64k",
        "-c",
        "read -P 0 128k 64k",
        "-c",
        "read -P 0x33 192k 64k",
    ];
    zebu(scratch.path(), pattern).ok();
    let info = zebu(scratch.path(), ["info", "-f", "qcow2", IMAGE]).ok();
    assert!(info.stdout.contains("bitmap"), "{info}");
    let write = |path: &Path| std::fs::write(path, base::image()).expect("writable");
    // So that what hostile images meet is the command at work, not an option that is refused.
    assert_eq!(faults(scratch.path(), "intact", &write, |_| true), (Vec::new(), 0));
}

#[test]
fn hostile_images_end_in_an_error_or_a_result_within_bounds() {
    let all = hostile::all();
    let names: BTreeSet<&str> = all.iter().map(|image| image.name).collect();
    assert_eq!(names.len(), all.len(), "two images have one name");
    // To look at some: ZEBU_HOSTILE=words of their names.
    let some = std::env::var("ZEBU_HOSTILE").unwrap_or_default();
    assert!(all.iter().any(|image| image.name.contains(&some)), "no image has '{some}' in its name");
    let run = |part: usize| {
        let scratch = Scratch::new("strangers");
        let chosen = all.iter().enumerate().filter(|(_, image)| image.name.contains(&some));
        // A tenth has every image and every command.
        chosen
            .skip(part)
            .step_by(2)
            .flat_map(|(number, image)| {
                let has = |index| tenth::has(number + index);
                faults(scratch.path(), image.name, &|path| image.write(path), has).0
            })
            .collect::<Vec<_>>()
    };
    let faults: Vec<String> = std::thread::scope(|scope| {
        let halves = [0, 1].map(|part| {
            let run = &run;
            scope.spawn(move || run(part))
        });
        halves.into_iter().flat_map(|half| half.join().expect("a fault is returned, not a panic")).collect()
    });
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n\n"));
}

/// Metadata whose refcounts are 0 looks like free space. A write that takes some of it and fails gives it back; the next
/// one must not get it.
#[test]
fn metadata_that_nobody_counts_is_not_given_away() {
    let scratch = Scratch::new("strangers");
    let mut image = base::image();
    image[base::REFBLOCK as usize..][..24].fill(0);
    image[base::STREAM as usize..][..64].fill(0xff);
    std::fs::write(scratch.file(IMAGE), &image).expect("scratch is writable");
    // The first needs the stream, which is damaged.
    let commands =
        ["write -P 0xa5 65556 1", "flush", "write -P 0xa5 3801088 1", "write -P 0xa5 3735552 64k", "flush"];
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let out = zebu(scratch.path(), ["io", "-t", "writeback", "-f", "qcow2", IMAGE].into_iter().chain(words));
    assert_eq!(out.code, Some(1), "{out}");
    assert!(!out.stdout.contains("wrote"), "acknowledged, and where? {out}");
    let now = std::fs::read(scratch.file(IMAGE)).expect("still there");
    for place in [0..112, base::L1 as usize..base::L1 as usize + 8, base::L2 as usize..base::L2 as usize + 64]
    {
        assert_eq!(now[place.clone()], image[place.clone()], "{place:x?}");
    }
}

/// An entry that points past the end of the file, to a cluster that nobody counts: the space is anybody's.
#[test]
fn nothing_is_written_past_the_end_of_the_file_where_nothing_is_allocated() {
    let scratch = Scratch::new("strangers");
    let mut image = base::image();
    image[base::L2 as usize + 4] ^= 2;
    std::fs::write(scratch.file(IMAGE), &image).expect("scratch is writable");
    for write in ["write -P 0xa5 3328 100000", "write -P 0xa5 0 64k"] {
        let out = zebu(scratch.path(), ["io", "-t", "writeback", "-f", "qcow2", "-c", write, IMAGE]);
        assert_eq!(out.code, Some(1), "{out}");
        assert!(!out.stdout.contains("wrote"), "{out}");
    }
    let now = std::fs::read(scratch.file(IMAGE)).expect("still there");
    let table = base::L2 as usize..(base::L2 + base::CLUSTER) as usize;
    // Its bitmap begins a record, in clusters of its own.
    assert!(now.len() < 2 << 20, "it has grown to {} bytes", now.len());
    assert!(now[table.clone()] == image[table], "the table has changed");
}

/// A copy that was cut short: the entry and the refcount are right, the bytes are gone. The cluster can be written, and
/// growth for other clusters leaves it alone.
#[test]
fn a_cluster_that_was_cut_off_can_be_written_again() {
    let scratch = Scratch::new("strangers");
    let mut image = base::image();
    image.truncate(base::DATA_2 as usize);
    std::fs::write(scratch.file(IMAGE), &image).expect("scratch is writable");
    let offset = 3 * base::CLUSTER + 3328;
    for cache in ["writeback", "none"] {
        let write = format!("write -P 0xa5 {offset} 100000");
        let out =
            zebu(scratch.path(), ["io", "-t", cache, "-f", "qcow2", "-c", &write, "-c", "flush", IMAGE]);
        assert_eq!(out.code, Some(0), "{out}");
        let read = format!("read -P 0xa5 {offset} 100000");
        let out = zebu(scratch.path(), ["io", "-r", "-f", "qcow2", "-c", &read, IMAGE]);
        assert_eq!(out.code, Some(0), "{out}");
        if let Some(qemu) = Qemu::find() {
            qemu.io(scratch.path(), "-f qcow2", IMAGE, &[&read]).ok();
        }
    }
}

/// Writes an image, given the directory with what it must not reach.
type Write = dyn Fn(&Path, &Path) + Sync;

/// A way to make a program open a file that its user did not name.
struct Trick {
    name: &'static str,
    format: &'static str,
    write: Box<Write>,
    /// The named files that may be opened with `local`, in the directory of the image; with `dir=outside`, and with `all`.
    local: &'static [&'static str],
    within: &'static [&'static str],
    all: &'static [&'static str],
}

/// The tricks. Each closure gets the image to write, and the directory `outside` with the `secret` in it.
fn tricks() -> Vec<Trick> {
    fn backing(name: &'static str, text: impl Fn(&Path) -> String + Sync + 'static) -> Trick {
        let write = move |image: &Path, outside: &Path| references::backing(image, &text(outside), "raw");
        Trick { name, format: "qcow2", write: Box::new(write), local: &[], within: &[], all: &[] }
    }
    fn data(name: &'static str, text: impl Fn(&Path) -> String + Sync + 'static) -> Trick {
        let write = move |image: &Path, outside: &Path| references::data_file(image, &text(outside));
        Trick { name, format: "qcow2", write: Box::new(write), local: &[], within: &[], all: &[] }
    }
    fn vmdk(
        name: &'static str,
        format: &'static str,
        text: impl Fn(&Path) -> String + Sync + 'static,
    ) -> Trick {
        let write = move |image: &Path, outside: &Path| references::vmdk_descriptor(image, &text(outside));
        Trick { name, format, write: Box::new(write), local: &[], within: &[], all: &[] }
    }
    let secret = |outside: &Path| outside.join("secret").display().to_string();
    let json = |outside: &Path| {
        format!("json:{{\"driver\":\"file\",\"filename\":\"{}/secret\"}}", outside.display())
    };
    let fixed = |text: &'static str| move |_: &Path| text.to_owned();
    let (secrets, beside): (&[&str], &[&str]) = (&["outside/secret"], &["inside/base"]);
    vec![
        Trick {
            local: beside,
            within: beside,
            all: beside,
            ..backing("a backing file beside the image", fixed("base"))
        },
        Trick { within: secrets, all: secrets, ..backing("an absolute backing file", secret) },
        Trick {
            within: secrets,
            all: secrets,
            ..backing("a backing file by ..", fixed("../outside/secret"))
        },
        Trick {
            all: secrets,
            within: secrets,
            ..backing("a backing file by a link to a file", fixed("link"))
        },
        Trick {
            all: secrets,
            within: secrets,
            ..backing("a backing file by a link to a directory", fixed("dirlink/secret"))
        },
        Trick { all: secrets, ..backing("a backing file in JSON", json) },
        backing("a backing file over NBD", fixed("nbd://127.0.0.1:1/x")),
        backing("a backing file over HTTP", fixed("http://127.0.0.1:1/x")),
        backing("a backing file by a host over HTTP", fixed("https://user:pw@localhost:1/x?y")),
        backing("a backing file by the protocol file", |outside| {
            format!("file:{}/secret", outside.display())
        }),
        // Standard input is the secret: it is what these lead to.
        Trick { all: secrets, ..backing("a backing file by a descriptor", fixed("/proc/self/fd/0")) },
        Trick { all: secrets, ..data("a data file by a descriptor", fixed("/proc/self/fd/0")) },
        Trick {
            all: secrets,
            ..backing("a backing file by the directory of descriptors", fixed("/proc/thread-self/fd/0"))
        },
        Trick {
            all: &["/proc/self/environ"],
            ..backing(
                "a backing file by /proc, from where the image is",
                fixed("../../../../../../../../proc/self/environ"),
            )
        },
        Trick {
            local: beside,
            within: beside,
            all: beside,
            ..data("a data file beside the image", fixed("base"))
        },
        Trick { within: secrets, all: secrets, ..data("an absolute data file", secret) },
        Trick { within: secrets, all: secrets, ..data("a data file by ..", fixed("../outside/secret")) },
        Trick { all: secrets, ..data("a data file in JSON", json) },
        data("a data file over NBD", fixed("nbd://127.0.0.1:1/x")),
        data("a data file over HTTP", fixed("http://127.0.0.1:1/x")),
        Trick {
            name: "a qcow2 header in a raw disk",
            format: "raw",
            write: Box::new(move |image, outside| references::raw_with_qcow2_header(image, &secret(outside))),
            local: &[],
            within: &[],
            all: &[],
        },
        // What CVE-2022-47951 and CVE-2024-44082 are made of.
        Trick {
            within: secrets,
            all: secrets,
            ..vmdk("a VMDK descriptor in a raw disk, probed", "", secret)
        },
        Trick {
            local: beside,
            within: beside,
            all: beside,
            ..vmdk("an extent beside it", "vmdk", fixed("base"))
        },
        Trick {
            within: secrets,
            all: secrets,
            ..vmdk("an extent by ..", "vmdk", fixed("../outside/secret"))
        },
        Trick {
            within: secrets,
            all: secrets,
            ..vmdk("an extent by a link to a file", "vmdk", fixed("link"))
        },
        Trick { all: secrets, ..vmdk("an extent by a descriptor", "vmdk", fixed("/proc/self/fd/0")) },
        Trick {
            all: &["/proc/self/environ"],
            ..vmdk("an extent by /proc", "vmdk", fixed("../../../../../../../../proc/self/environ"))
        },
        vmdk("an extent over NBD", "vmdk", fixed("nbd://127.0.0.1:1/x")),
        vmdk("an extent over HTTP", "vmdk", fixed("http://127.0.0.1:1/x")),
        vmdk("an extent in JSON", "vmdk", |_| "json:{}".to_owned()),
        vmdk("an extent by the protocol file", "vmdk", |outside| {
            format!("file:{}/secret", outside.display())
        }),
        Trick {
            name: "a parent of a VMDK",
            format: "vmdk",
            write: Box::new(move |image, outside| references::vmdk_child(image, &secret(outside))),
            local: &[],
            within: secrets,
            all: secrets,
        },
        Trick {
            name: "a backing file of a backing file",
            format: "qcow2",
            write: Box::new(move |image, outside| {
                references::backing(image, "middle", "qcow2");
                references::backing(&image.with_file_name("middle"), &secret(outside), "raw");
            }),
            local: &["inside/middle"],
            within: &["inside/middle", "outside/secret"],
            all: &["inside/middle", "outside/secret"],
        },
        Trick {
            name: "a data file of a backing file",
            format: "qcow2",
            write: Box::new(move |image, outside| {
                references::backing(image, "middle", "qcow2");
                references::data_file(&image.with_file_name("middle"), &secret(outside));
            }),
            local: &["inside/middle"],
            within: &["inside/middle", "outside/secret"],
            all: &["inside/middle", "outside/secret"],
        },
    ]
}

/// The system calls of `trace` that open files, make connections or start programs: their line, and the path that a
/// successful one got at in the end (`-y` shows it behind the descriptor).
fn opened(trace: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for line in trace.lines() {
        if line.contains("connect(") || (line.contains("execve(") && !line.contains("zebu")) {
            found.push((line.to_owned(), line.to_owned()));
        }
        let is_open = line.contains("open(")
            || line.contains("openat(")
            || line.contains("openat2(")
            || line.contains("openat2 resumed")
            || line.contains("openat resumed");
        let Some((_, result)) = line.rsplit_once(" = ") else { continue };
        if is_open && let Some((_, path)) = result.split_once('<') {
            let path = path.rsplit_once('>').map_or(path, |(path, _)| path);
            found.push((path.trim_end_matches(" (deleted)").to_owned(), line.to_owned()));
        }
    }
    found
}

/// A file of /proc about a process, as a name that any process has for itself.
fn of_a_process(path: &str) -> Option<String> {
    let (process, file) = path.strip_prefix("/proc/")?.split_once('/')?;
    process.bytes().all(|b| b.is_ascii_digit()).then(|| format!("/proc/self/{file}"))
}

/// Files that every program opens: its libraries, and what it asks the kernel about itself and the machine.
fn is_of_the_system(path: &str) -> bool {
    let system = [
        "/lib/",
        "/usr/lib/",
        "/etc/ld.so.cache",
        "/sys/fs/cgroup/",
        "/sys/devices/system/",
        "/dev/null",
        "/etc/zebu/refs",
        // The C library asks before it gives a heap back.
        "/proc/sys/vm/overcommit_memory",
    ];
    // Of /proc, its own memory map, its share of the processors, and which signals are ignored; nothing that leads elsewhere.
    let own = ["/proc/self/maps", "/proc/self/cgroup", "/proc/self/mountinfo", "/proc/self/status"];
    let of_itself = of_a_process(path).is_some_and(|file| own.contains(&file.as_str()));
    of_itself || system.iter().any(|prefix| path.starts_with(prefix)) || path.starts_with("anon_inode")
}

#[test]
fn what_leads_elsewhere_is_not_of_the_system() {
    for path in
        ["/proc/17/fd/0", "/proc/17/environ", "/proc/self/maps", "/sys/kernel/x", "/tmp/x.so", "/libx"]
    {
        assert!(!is_of_the_system(path), "{path}");
    }
    assert!(is_of_the_system("/proc/17/maps") && is_of_the_system("/usr/lib/x/libc.so.6"));
}

/// Every command that takes an image, and whether it follows names in it at all. REFS, FORMAT and SECOND are the options
/// that say what it may follow and what the image is.
const TRICKED: &[(&str, bool)] = &[
    ("convert REFS FORMAT -O raw IMAGE out", true),
    ("convert REFS FORMAT -O qcow2 -c IMAGE out", true),
    ("io -r REFS FORMAT IMAGE -c |read 0 1M|", true),
    ("io REFS FORMAT IMAGE -c |write -P 1 1k 200k| -c flush", true),
    ("info REFS --backing-chain FORMAT IMAGE", true),
    ("info REFS FORMAT IMAGE", false),
    ("info REFS --verdict FORMAT IMAGE", false),
    ("map REFS FORMAT IMAGE", true),
    ("measure REFS FORMAT -O qcow2 IMAGE", true),
    ("compare REFS FORMAT SECOND IMAGE IMAGE", true),
    ("check REFS FORMAT IMAGE", true),
    ("check REFS FORMAT -r all IMAGE", true),
    ("dd REFS FORMAT -O raw if=IMAGE of=out bs=64k count=4", true),
    ("backup REFS FORMAT IMAGE out", true),
    ("verify REFS FORMAT IMAGE", true),
    ("clone REFS FORMAT IMAGE out", true),
    ("bench REFS FORMAT -c 8 IMAGE", true),
    ("bench REFS FORMAT -w -c 8 IMAGE", true),
    ("snapshot REFS FORMAT -l IMAGE", true),
    ("snapshot REFS FORMAT -c new IMAGE", true),
    ("bitmap REFS FORMAT --add IMAGE new", true),
    ("resize REFS FORMAT IMAGE 8M", true),
    ("amend REFS FORMAT -o lazy_refcounts=on IMAGE", true),
    ("rebase REFS FORMAT -b || IMAGE", true),
    ("commit REFS FORMAT IMAGE", true),
    // Who makes an overlay on an image has not said that its names may be followed.
    ("create -f qcow2 -b IMAGE -F qcow2 out", false),
];

/// The words of a command on an image of a format (empty: to be found out) that may follow names by a rule.
fn tricked_words(line: &str, rule: &str, format: &str) -> Vec<String> {
    let option = |name: &str| if format.is_empty() { String::new() } else { format!("{name} {format}") };
    let line = line.replace("REFS", &format!("--allow-refs {rule}"));
    words(&line.replace("FORMAT", &option("-f")).replace("SECOND", &option("-F")))
}

#[test]
fn no_trick_opens_a_file_that_was_not_allowed() {
    let Some(strace) = find("strace") else {
        eprintln!("skipped: strace is not installed");
        return;
    };
    let scratch = Scratch::new("strangers");
    let root = std::fs::canonicalize(scratch.path()).expect("just made");
    // Without the right to trace there is nothing to see.
    let mut probe = Command::new(&strace);
    if finish({
        probe.args(["-f", "true"]);
        probe
    })
    .code
        != Some(0)
    {
        eprintln!("skipped: strace may not trace here");
        return;
    }
    let tricks = tricks();
    let (faults, used): (Vec<Vec<String>>, Vec<BTreeSet<String>>) = std::thread::scope(|scope| {
        let (tricks, root, strace) = (&tricks, &root, &strace);
        let threads: Vec<_> = (0..2)
            .map(|part| {
                scope.spawn(move || {
                    let mine: Vec<&Trick> = tricks.iter().skip(part).step_by(2).collect();
                    let mut faults = Vec::new();
                    let mut used = BTreeSet::new();
                    for (number, trick) in mine.iter().enumerate() {
                        let dir = root.join(format!("{part}-{number}"));
                        // A tenth has every trick and every command.
                        let lines = TRICKED.iter().enumerate();
                        let lines = lines.filter(|(index, _)| tenth::has(number + index));
                        let lines: Vec<_> = lines.map(|(_, line)| line).collect();
                        try_trick(&dir, strace, trick, &lines, &mut faults, &mut used);
                    }
                    (faults, used)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a fault is returned, not a panic")).unzip()
    });
    let faults: Vec<String> = faults.concat();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    // The trace would see it: what was allowed was opened.
    let used: BTreeSet<String> = used.into_iter().flatten().collect();
    for file in ["inside/base", "outside/secret", "inside/middle"] {
        assert!(used.contains(file), "{file} was never opened: the trace is blind ({used:?})");
    }
}

fn try_trick(
    root: &Path,
    strace: &Path,
    trick: &Trick,
    lines: &[&(&str, bool)],
    faults: &mut Vec<String>,
    used: &mut BTreeSet<String>,
) {
    let (inside, outside) = (root.join("inside"), root.join("outside"));
    for dir in [&inside, &outside] {
        std::fs::create_dir_all(dir).expect("scratch is writable");
    }
    for file in [inside.join("base"), outside.join("secret")] {
        std::fs::write(file, vec![0x77; base::SIZE as usize]).expect("scratch is writable");
    }
    std::os::unix::fs::symlink("../outside/secret", inside.join("link")).expect("scratch is writable");
    std::os::unix::fs::symlink("../outside", inside.join("dirlink")).expect("scratch is writable");
    (trick.write)(&inside.join(IMAGE), &outside);
    let within = format!("dir={}", outside.display());
    let rules: [(&str, &[&str]); 4] =
        [("none", &[]), ("local", trick.local), (&within, trick.within), ("all", trick.all)];
    for (rule, allowed) in rules {
        for (line, follows) in lines {
            // What the last command changed or made is as if it had not been.
            (trick.write)(&inside.join(IMAGE), &outside);
            for made in std::fs::read_dir(&inside).expect("just made").flatten() {
                if made.file_name().to_string_lossy().trim_start_matches('.').starts_with("out") {
                    std::fs::remove_file(made.path()).expect("a file of our own");
                }
            }
            let trace = root.join("trace");
            let mut command = Command::new(strace);
            command.args(["-f", "-y", "-s", "4096", "-e", "trace=openat,openat2,open,execve,connect", "-o"]);
            command.arg(&trace).arg(zebu_program()).args(replacing(tricked_words(line, rule, trick.format)));
            let secret = std::fs::File::open(outside.join("secret")).expect("just written");
            command.current_dir(&inside);
            let out = finish_with(command, secret.into());
            let what = format!("{}, --allow-refs {rule}: {line}", trick.name);
            if !matches!(out.code, Some(0..=4 | 63)) {
                faults.push(format!("{what}: {out}"));
            }
            let trace = std::fs::read_to_string(&trace).unwrap_or_default();
            let own = [inside.join(IMAGE), inside.clone(), outside.clone(), zebu_program().to_owned()];
            for (path, line) in opened(&trace) {
                let file = path
                    .strip_prefix(&format!("{}/", root.display()))
                    .map_or_else(|| of_a_process(&path), |file| Some(file.to_owned()));
                let is_own = own.iter().any(|own| own == &PathBuf::from(&path))
                    || file
                        .as_ref()
                        .is_some_and(|f| f.starts_with("inside/out") || f.starts_with("inside/.out"));
                // Whether the target's directory takes O_DIRECT is asked with a file of no name, which nothing can lead to.
                let asks_the_directory = line.contains("|O_TMPFILE")
                    && PathBuf::from(&path).parent().is_some_and(|directory| directory == inside);
                // Whoever allows all allows servers as well.
                let is_server = path.contains("connect(") && path.contains("htons(1)");
                if is_server && rule == "all" && trick.name.ends_with("over NBD") {
                    continue;
                }
                // To web servers with what netrc says, and to hosts by how the system looks them up.
                if rule == "all" && trick.name.ends_with("over HTTP") {
                    let is_lookup = path.contains("connect(") || path.ends_with("/.netrc");
                    let is_authority = path.contains("/ssl/") || path.starts_with("/etc/pki/");
                    if is_lookup || is_authority || path.starts_with("/etc/") {
                        continue;
                    }
                }
                let named = *follows && file.as_ref().is_some_and(|file| allowed.contains(&file.as_str()));
                if named {
                    used.extend(file);
                } else if !is_own && !asks_the_directory && !is_of_the_system(&path) {
                    faults.push(format!("{what}: opened {path}\n  {line}"));
                }
            }
        }
    }
}
