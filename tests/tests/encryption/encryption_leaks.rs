//! Places where neither the data of an encrypted disk nor its keys may be: every write to the file, the terminal, memory that a
//! core dump would hold.

use rustix::termios::LocalModes;
use sha2::Digest;
use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::recorder::{Recorder, can_record};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::terminal::{start_at, terminal};

const MIB: usize = 1 << 20;
/// Bytes of a block of the cipher.
const BLOCK: usize = 16;
const SECRET: [&str; 2] = ["--object", "secret,id=key,file=key"];
const PASSPHRASE: &str = "Zq7-the-words-that-nobody-else-has-in-memory-9xK";

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(256) as u8).collect()
}

fn of(file: &str) -> String {
    if file.contains(".luks") {
        format!("driver=luks,key-secret=key,file.filename={file}")
    } else {
        format!("driver=qcow2,encrypt.key-secret=key,file.filename={file}")
    }
}

fn run(dir: &Path, line: &str) {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    words.splice(1..1, SECRET);
    zebu(dir, words).ok();
}

fn make(dir: &Path, file: &str) {
    std::fs::write(dir.join("key"), PASSPHRASE).unwrap();
    let (format, options) = if file.contains(".luks") {
        ("luks", "key-secret=key,iter-time=10")
    } else {
        ("qcow2", "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10,cluster_size=4k")
    };
    run(dir, &format!("create -q -f {format} -o {options} {file} 2M"));
}

/// Blocks of the texts that commands are told to write.
struct Known(HashSet<[u8; BLOCK]>);

impl Known {
    fn of(text: &[u8]) -> Self {
        let whole = text.chunks_exact(BLOCK).filter_map(|block| block.try_into().ok());
        Self(whole.chain([[0xcd; BLOCK]]).collect())
    }

    fn is_in(&self, bytes: &[u8]) -> bool {
        bytes
            .windows(BLOCK)
            .any(|window| window.try_into().is_ok_and(|block: [u8; BLOCK]| self.0.contains(&block)))
    }
}

/// Every write of every command that writes to an image, as the file system sees it. A server is killed under load.
#[test]
fn no_write_of_any_command_holds_plain_text() {
    let Some(qemu) = Qemu::find() else { return };
    if !can_record() {
        return;
    }
    let plain = random_bytes(1, MIB);
    let known = Known::of(&plain);
    for file in ["a.qcow2", "a.luks"] {
        let scratch = Scratch::new("leaks");
        let dir = scratch.path();
        make(dir, file);
        std::fs::write(dir.join("plain"), &plain).unwrap();
        let recorder = Recorder::over(&dir.join(file), 512);
        let name = of(file);
        let mut seen = 0;
        let mut look = |command: &str| {
            let recording = recorder.recording();
            let writes: Vec<_> = recording.writes().collect();
            for (offset, bytes) in &writes[seen..] {
                assert!(!known.is_in(bytes), "{file}: {command}: plain text at byte {offset}");
            }
            assert!(writes.len() > seen, "{file}: {command} wrote nothing");
            seen = writes.len();
        };
        let io = |commands: &[&str]| {
            let mut words = vec!["io"];
            words.extend(SECRET);
            words.extend(["--image-opts", name.as_str()]);
            words.extend(commands.iter().flat_map(|command| ["-c", command]));
            zebu(dir, words).ok();
        };
        run(dir, &format!("convert -n plain --target-image-opts {name}"));
        look("convert -n");
        io(&["write -s plain 4096 100k", "write -P 0xcd 1M 5000", "writev -P 0xcd 3k 1k 100", "flush"]);
        look("io write");
        io(&["write -z 300k 7000", "discard 400k 64k", "write -z -u 500k 64k"]);
        look("io write -z");
        run(dir, &format!("bench -w --pattern 0xcd -c 200 -s 3k -S 5000 --image-opts {name}"));
        look("bench -w");
        if file == "a.qcow2" {
            run(dir, &format!("snapshot -c s --image-opts {name}"));
            io(&["write -s plain 700k 200k", "write -P 0xcd 700001 300"]);
            look("writes after a snapshot");
            run(dir, &format!("snapshot -a s --image-opts {name}"));
            look("snapshot -a");
            run(dir, &format!("bitmap --add --image-opts {name} b"));
            run(dir, &format!("bitmap --remove --image-opts {name} b"));
            look("bitmap");
        }
        // What lies in plain text above is committed.
        let format = if file == "a.qcow2" { "qcow2" } else { "luks" };
        zebu(dir, ["create", "-q", "-f", "qcow2", "-b", file, "-F", format, "top.qcow2", "2M"]).ok();
        let key = if file == "a.qcow2" { "encrypt.key-secret" } else { "key-secret" };
        let top = format!("driver=qcow2,backing.{key}=key,file.filename=top.qcow2");
        let mut words = vec!["io"];
        words.extend(SECRET);
        words.extend(["--image-opts", &top, "-c", "write -s plain 1M 512k", "-c", "write -P 0xcd 33 1000"]);
        zebu(dir, words).ok();
        run(dir, &format!("commit --image-opts {top}"));
        look("commit");
        run(dir, &format!("resize --image-opts {name} --preallocation=full 3M"));
        look("resize");
        // A client writes to a server, which is killed.
        let server =
            Server::start(dir, &format!("--no-sandbox --object secret,id=key,file=key --image-opts {name}"));
        let uri = format!("nbd+unix:///?socket={}", server.socket().display());
        let write = ["write -s plain 0 1M", "write -P 0xcd 1500k 70k", "flush", "write -s plain 900k 1M"];
        qemu.io(dir, "-f raw", &uri, &write).ok();
        drop(server);
        look("a server that was killed");
        let mut convert = Command::new(zebu_program());
        convert.arg("convert").args(SECRET).args(["-n", "-r", "256k", "plain", "--target-image-opts", &name]);
        let mut convert = convert.current_dir(dir).stdout(Stdio::null()).spawn().unwrap();
        wait_until("the convert writes", || {
            let recording = recorder.recording();
            let written: usize = recording.writes().skip(seen).map(|(_, bytes)| bytes.len()).sum();
            written >= 64 << 10
        });
        convert.kill().unwrap();
        convert.wait().unwrap();
        let recording = recorder.recording();
        assert!(recording.writes().all(|(_, bytes)| !known.is_in(bytes)), "{file}: a killed convert");
        assert!(!known.is_in(&recording.killed(recording.len())), "{file}: the file");
    }
}

/// Runs zebu at a terminal, types `typed` when it asks, and returns what the terminal showed and how it ended.
fn at_a_terminal(dir: &Path, words: &[&str], typed: &str) -> (String, i32) {
    at_a_terminal_then(dir, words, |terminal, _| terminal.write_all(typed.as_bytes()).unwrap())
}

/// Runs zebu at a terminal, does something when it asks, and returns what the terminal showed and how it ended.
fn at_a_terminal_then(dir: &Path, words: &[&str], answer: impl Fn(&mut File, u32)) -> (String, i32) {
    let (mut ours, theirs) = terminal();
    let mut command = Command::new(zebu_program());
    command.args(words).current_dir(dir);
    let mut child = start_at(theirs, command);
    let mut shown = Vec::new();
    let mut has_typed = false;
    let mut piece = [0; 4096];
    // A terminal that nobody has open any more reads as EIO.
    while let Ok(len @ 1..) = ours.read(&mut piece) {
        shown.extend_from_slice(&piece[..len]);
        if !has_typed && shown.windows(2).any(|pair| pair == b": ") {
            answer(&mut ours, child.id());
            has_typed = true;
        }
    }
    let code = child.wait().unwrap().code().unwrap_or(-1);
    let modes = rustix::termios::tcgetattr(&ours).unwrap().local_modes;
    assert!(modes.contains(LocalModes::ECHO | LocalModes::ISIG), "the terminal is not as before: {modes:?}");
    (String::from_utf8_lossy(&shown).into_owned(), code)
}

/// The passphrase is asked for at a terminal, nothing that is typed shows, and the terminal is as before afterwards.
#[test]
fn a_passphrase_is_typed_unseen() {
    let scratch = Scratch::new("leaks");
    let dir = scratch.path();
    make(dir, "a.qcow2");
    let line = format!("{PASSPHRASE}\n");
    let words = ["io", "a.qcow2", "-c", "write -P 7 0 4k", "-c", "read -P 7 0 4k"];
    let (shown, code) = at_a_terminal(dir, &words, &line);
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("Passphrase for a.qcow2: ") && shown.contains("wrote 4096"), "{shown}");
    assert!(!shown.contains("Zq7"), "what was typed shows: {shown}");
    let (shown, code) = at_a_terminal(dir, &words, "wrong\n");
    assert!(code == 1 && shown.contains("Invalid password") && !shown.contains("wrong"), "{shown}");
    // The end of input, and an interruption.
    let (shown, code) = at_a_terminal(dir, &words, "\x04");
    assert!(code == 1 && shown.lines().count() <= 3, "{code}: {shown}");
    for words in [&words[..], &["map", "a.qcow2"]] {
        let (shown, code) = at_a_terminal(dir, words, "ab\x03");
        assert!(code != 0 && !shown.contains("ab"), "{code}: {shown}");
    }
    // Without a terminal there is nobody to ask.
    let finished = zebu(dir, ["map", "a.qcow2"]).exits(1);
    assert!(finished.stderr.contains("key-secret"), "{finished}");
}

/// A signal ends the question at once, and the terminal is as it was before: with a job that would handle it, and without.
#[test]
fn a_signal_ends_the_question() {
    let scratch = Scratch::new("leaks");
    let dir = scratch.path();
    make(dir, "a.qcow2");
    for words in [&["io", "a.qcow2", "-c", "read 0 1k"][..], &["convert", "-O", "raw", "a.qcow2", "out"]] {
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            let (shown, code) = at_a_terminal_then(dir, words, |_, pid| {
                // SAFETY: a signal to our own child, which has not been waited for.
                assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
            });
            // Nothing else would end the question.
            assert!(code != 0, "{words:?} {signal}: {shown}");
            assert!(!dir.join("out").exists());
        }
    }
}

/// A mapping of a process: its bytes' addresses, and the flags of its memory.
struct Mapping {
    start: u64,
    end: u64,
    /// Its file, or the kernel's name for it.
    name: String,
    flags: Vec<String>,
}

/// The mappings that `/proc/PID/smaps` lists.
fn mappings(pid: u32) -> Vec<Mapping> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut all = Vec::new();
    for line in text.lines() {
        let range = line.split_whitespace().next().and_then(|word| {
            let (start, end) = word.split_once('-')?;
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
        });
        if let Some((start, end)) = range {
            let name = line.split_whitespace().nth(5).unwrap_or("memory without a name").to_owned();
            all.push(Mapping { start, end, name, flags: Vec::new() });
        } else if let (Some(flags), Some(last)) = (line.strip_prefix("VmFlags:"), all.last_mut()) {
            last.flags = flags.split_whitespace().map(str::to_owned).collect();
        }
    }
    all
}

fn find_in(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

/// Secrets of an encrypted image, each with a name. Longer ones are looked for in pieces of 16 bytes: a part of a key is one too
/// many.
struct Needles(Vec<(String, Vec<u8>)>);

impl Needles {
    fn new(passphrase: &[u8]) -> Self {
        let mut needles = Self(Vec::new());
        needles.add("passphrase", passphrase);
        needles
    }

    fn add(&mut self, name: &str, secret: &[u8]) {
        for (number, piece) in secret.chunks_exact(BLOCK).enumerate() {
            self.0.push((format!("{name}, piece {number}"), piece.to_vec()));
        }
    }

    /// The blocks that HMAC begins with.
    fn add_hmac(&mut self, passphrase: &[u8]) {
        for (name, with) in [("inner", 0x36), ("outer", 0x5c)] {
            let block: Vec<u8> = passphrase.iter().map(|byte| byte ^ with).collect();
            self.add(&format!("{name} block of HMAC"), &block);
        }
    }

    /// The keys of a LUKS header: of the slot that the passphrase opens, and of the data.
    fn add_keys(&mut self, file: &[u8], passphrase: &[u8]) {
        let limits = zebu_luks::Limits::default();
        let material = |range: std::ops::Range<u64>| &file[range.start as usize..range.end as usize];
        self.add_hmac(passphrase);
        let (slot_key, key, spec) = if file[7] == 1 {
            let header = zebu_luks::Luks1Header::parse(file, &limits).unwrap();
            let slot = header.slots()[0];
            let mut slot_key = vec![0; header.cipher().key_len()];
            header.hash().pbkdf2(passphrase, &slot.salt, slot.iterations, &mut slot_key);
            let key = header.unlock(0, passphrase, material(header.material(0).unwrap())).unwrap();
            (slot_key, key, header.cipher())
        } else {
            let header = zebu_luks::Luks2Header::parse(file, &limits).unwrap();
            let slot = header.metadata().slots().next().unwrap().clone();
            let slot_key = slot.kdf().derive(passphrase, slot.cipher().key_len()).unwrap().to_vec();
            let key = header.metadata().unlock(slot.number(), passphrase, material(slot.material())).unwrap();
            (slot_key, key, header.metadata().segment().cipher)
        };
        let key = key.expect("the passphrase opens the first slot");
        self.add("key of the slot", &slot_key);
        self.add("key of the data", key.bytes());
        if spec.mode() == zebu_luks::Mode::CbcEssivSha256 {
            self.add("key of essiv", &sha2::Sha256::digest(key.bytes()));
        }
    }

    /// Looks at all memory of a process. Returns the secrets that are in core dumps, with places, and whether any is in memory
    /// that is for none, and whether all such memory is locked.
    fn look_in(&self, pid: u32) -> (Vec<String>, bool, bool) {
        let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
        let (mut dumped, mut is_found, mut is_locked) = (Vec::new(), false, true);
        let mut begins = vec![false; 1 << 16];
        for (_, secret) in &self.0 {
            begins[first_of(secret)] = true;
        }
        for mapping in mappings(pid) {
            let has = |flag: &str| mapping.flags.iter().any(|found| found == flag);
            // What nobody writes to is the program.
            if !(has("rd") && has("wr")) {
                continue;
            }
            let mut bytes = vec![0; (mapping.end - mapping.start) as usize];
            if memory.read_exact_at(&mut bytes, mapping.start).is_err() {
                // The kernel's own pages.
                continue;
            }
            let has_bytes = |page: &(usize, &[u8])| page.1 != [0; 4096];
            let pages = bytes.chunks(4096).enumerate().filter(has_bytes);
            for at in pages.flat_map(|(page, bytes)| page * 4096..page * 4096 + bytes.len()) {
                if !begins[first_of(&bytes[at..])] {
                    continue;
                }
                for (name, _) in self.0.iter().filter(|(_, secret)| bytes[at..].starts_with(secret)) {
                    if has("dd") {
                        is_found = true;
                        is_locked &= has("lo");
                    } else {
                        let place = mapping.start + at as u64;
                        dumped.push(format!("{name} at {place:x} in {}", mapping.name));
                    }
                }
            }
        }
        (dumped, is_found, is_locked)
    }
}

/// The first two bytes, as an index.
fn first_of(bytes: &[u8]) -> usize {
    usize::from(u16::from_le_bytes(bytes.first_chunk().copied().unwrap_or_default()))
}

/// Makes an image and returns its secrets.
type Make = fn(&Path) -> Needles;

fn luks1(dir: &Path, cipher: &str) -> Needles {
    run(dir, &format!("create -q -f luks -o key-secret=key,iter-time=1,{cipher} a.luks 2M"));
    let mut needles = Needles::new(PASSPHRASE.as_bytes());
    needles.add_keys(&std::fs::read(dir.join("a.luks")).unwrap(), PASSPHRASE.as_bytes());
    needles
}

/// Images by what their keys go through.
const IMAGES: [(&str, &str, Make); 8] = [
    ("aes-128-xts", "a.luks", |dir| luks1(dir, "cipher-alg=aes-128,hash-alg=sha1")),
    ("aes-256-xts", "a.luks", |dir| luks1(dir, "cipher-alg=aes-256")),
    ("aes-256-cbc-essiv", "a.luks", |dir| {
        luks1(dir, "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,hash-alg=sha512")
    }),
    ("aes-128-cbc-plain64", "a.luks", |dir| luks1(dir, "cipher-alg=aes-128,cipher-mode=cbc")),
    ("serpent-256-xts", "a.luks", |dir| luks1(dir, "cipher-alg=serpent-256")),
    ("twofish-256-cbc-essiv", "a.luks", |dir| {
        luks1(dir, "cipher-alg=twofish-256,cipher-mode=cbc,ivgen-alg=essiv")
    }),
    ("LUKS2 with Argon2id", "b.luks", |dir| {
        File::create(dir.join("b.luks")).unwrap().set_len(18 << 20).unwrap();
        let program = find("cryptsetup").expect("cryptsetup is needed: `cargo xtask setup` installs it");
        let costs = ["--pbkdf-memory", "4096", "--pbkdf-force-iterations", "4"];
        let format = ["luksFormat", "-q", "--type", "luks2", "--pbkdf", "argon2id", "--key-file", "key"];
        let made = Command::new(program).current_dir(dir).args(format).args(costs).arg("b.luks").output();
        let made = made.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut needles = Needles::new(PASSPHRASE.as_bytes());
        needles.add_keys(&std::fs::read(dir.join("b.luks")).unwrap(), PASSPHRASE.as_bytes());
        needles
    }),
    ("AES before LUKS", "a.qcow2", |dir| {
        run(dir, "create -q -f qcow2 -o encrypt.format=aes,encrypt.key-secret=key a.qcow2 2M");
        Needles::new(PASSPHRASE.as_bytes())
    }),
];

/// Passphrases and keys are in memory that is locked and in no core dump, and nowhere else in a server, whatever the cipher: not
/// after it has opened the disk, and not after whole and cut sectors went through it.
#[test]
fn keys_are_in_no_memory_that_a_core_dump_would_hold() {
    let Some(qemu) = Qemu::find() else { return };
    let mut faults = Vec::new();
    for (name, file, make) in IMAGES {
        let scratch = Scratch::new("leaks");
        let dir = scratch.path();
        std::fs::write(dir.join("key"), PASSPHRASE).unwrap();
        let needles = make(dir);
        let secret = "secret,id=key,file=key";
        let server = Server::start(dir, &format!("--no-sandbox --object {secret} --image-opts {}", of(file)));
        let uri = format!("nbd+unix:///?socket={}", server.socket().display());
        let mut look = |when: &str| {
            let (dumped, is_found, is_locked) = needles.look_in(server.pid());
            faults.extend(dumped.iter().map(|secret| format!("{name}, {when}: {secret}")));
            // The passphrase, at least.
            assert!(is_found, "{name}: no secret was found at all");
            assert!(is_locked, "{name}: memory that is not locked");
        };
        look("open");
        let requests =
            ["write -P 3 0 1M", "read -P 3 0 1M", "write -P 4 1M 4k", "write -P 5 700 100", "read 7 9"];
        qemu.io(dir, "-f raw", &uri, &requests).ok();
        look("after requests");
    }
    assert!(faults.is_empty(), "{} secrets:\n{}", faults.len(), faults.join("\n"));
}

/// A server takes its key from a descriptor; its own command line has none.
#[test]
fn a_server_takes_its_key_from_a_descriptor() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("leaks");
    let dir = scratch.path();
    make(dir, "a.qcow2");
    let key = File::open(dir.join("key")).unwrap();
    // SAFETY: a descriptor of its own that is open in the server, too.
    let number = unsafe { libc::dup(key.as_raw_fd()) };
    assert!(number >= 0);
    let options = format!("--object secret,id=key,file=/dev/fd/{number} --image-opts {}", of("a.qcow2"));
    let server = Server::start(dir, &options);
    // SAFETY: our own, which nobody uses any more.
    unsafe { libc::close(number) };
    let line = std::fs::read(format!("/proc/{}/cmdline", server.pid())).unwrap();
    assert!(!find_in(&line, &PASSPHRASE.as_bytes()[..8]));
    let uri = format!("nbd+unix:///?socket={}", server.socket().display());
    qemu.io(dir, "-f raw", &uri, &["write -P 9 1k 10k", "flush", "read -P 9 1k 10k"]).ok();
    drop(server);
    let words = ["io", SECRET[0], SECRET[1], "--image-opts", &of("a.qcow2"), "-c", "read -P 9 1k 10k"];
    zebu(dir, words).ok();
}
