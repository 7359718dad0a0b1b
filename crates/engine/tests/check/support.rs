//! Helpers of the tests of the check: images made by QEMU, bytes to damage, and QEMU's verdict.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use zebu_engine::check::{CheckCounts, CheckOptions, CheckReport, FindingKind, Repair, check};
use zebu_engine::storage::{Engine, Worker, WorkerConfig};

/// Whether these tests are to be skipped because the machine has no QEMU, as `ZEBU_SKIP_QEMU=1` says.
pub(crate) fn skipped() -> bool {
    std::env::var_os("ZEBU_SKIP_QEMU").is_some_and(|value| value == "1")
}

/// Runs a tool of QEMU, which must be installed.
pub(crate) fn tool(name: &str, args: &[&str]) -> Output {
    Command::new(name).args(args).output().unwrap_or_else(|error| {
        panic!(
            "these tests compare with QEMU: {name} (Debian: apt-get install qemu-utils) does not run: {error}; \
             ZEBU_SKIP_QEMU=1 leaves them out"
        )
    })
}

/// Standard output of `qemu-img`, which must succeed.
pub(crate) fn qemu_img(args: &[&str]) -> String {
    let output = tool("qemu-img", args);
    assert!(output.status.success(), "qemu-img {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The number behind `"key": ` in JSON; 0 if it is not there, as QEMU means it.
fn json_number(json: &str, key: &str) -> u64 {
    let Some(at) = json.find(&format!("\"{key}\":")) else { return 0 };
    let digits: String =
        json[at + key.len() + 3..].trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// The secret of encrypted test images.
pub(crate) const LUKS_SECRET: &str = "secret,id=s0,data=abc";

/// QEMU's verdict.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) code: i32,
    /// `None` if it gave up without numbers.
    pub(crate) counts: Option<CheckCounts>,
    pub(crate) said: String,
}

/// An image in a directory of its own.
pub(crate) struct TestImage {
    dir: tempfile::TempDir,
    name: String,
}

impl TestImage {
    /// Creates an image and runs commands of `qemu-io` on it.
    pub(crate) fn new(create: &[&str], size: &str, io: &[&str]) -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap(), name: "image.qcow2".into() };
        let path = image.path();
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        args.extend(create);
        args.extend([path.to_str().unwrap(), size]);
        qemu_img(&args);
        image.io(io);
        image
    }

    /// An image with these bytes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap(), name: "image.qcow2".into() };
        std::fs::write(image.path(), bytes).unwrap();
        image
    }

    pub(crate) fn copy(&self) -> Self {
        let image = Self { dir: tempfile::tempdir().unwrap(), name: self.name.clone() };
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), image.dir.path().join(entry.file_name())).unwrap();
        }
        image
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join(&self.name)
    }

    pub(crate) fn sibling(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn len(&self) -> u64 {
        std::fs::metadata(self.path()).unwrap().len()
    }

    /// Runs commands of `qemu-io`.
    pub(crate) fn io(&self, commands: &[&str]) {
        if commands.is_empty() {
            return;
        }
        let path = self.path();
        let mut args = vec!["-f", "qcow2", "-t", "unsafe", "-d", "unmap"];
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push(path.to_str().unwrap());
        let output = tool("qemu-io", &args);
        let said = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("failed"), "qemu-io {args:?}: {said}{error}");
    }

    /// Runs `qemu-img snapshot` with these arguments.
    pub(crate) fn snapshot(&self, args: &[&str]) {
        let path = self.path();
        let mut all = vec!["snapshot"];
        all.extend(args);
        all.push(path.to_str().unwrap());
        qemu_img(&all);
    }

    /// Adds a bitmap.
    pub(crate) fn bitmap(&self, name: &str) {
        qemu_img(&["bitmap", "--add", self.path().to_str().unwrap(), name]);
    }

    pub(crate) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let file = std::fs::File::open(self.path()).unwrap();
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match file.read_at(&mut bytes[done..], offset + done as u64).unwrap() {
                0 => break,
                n => done += n,
            }
        }
        bytes
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(self.path()).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    pub(crate) fn word(&self, offset: u64) -> u64 {
        u64::from_be_bytes(self.bytes(offset, 8).try_into().unwrap())
    }

    pub(crate) fn set_word(&self, offset: u64, value: u64) {
        self.write(offset, &value.to_be_bytes());
    }

    pub(crate) fn u32(&self, offset: u64) -> u32 {
        u32::from_be_bytes(self.bytes(offset, 4).try_into().unwrap())
    }

    pub(crate) fn set_u32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_be_bytes());
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        1 << self.u32(20)
    }

    /// Offset of the active L1 table.
    pub(crate) fn l1(&self) -> u64 {
        self.word(40)
    }

    /// Offset of the L2 table of L1 entry `index`.
    pub(crate) fn l2(&self, index: u64) -> u64 {
        self.word(self.l1() + index * 8) & 0x00ff_ffff_ffff_fe00
    }

    /// Offset of the refcount table.
    pub(crate) fn reftable(&self) -> u64 {
        self.word(48)
    }

    /// Offset of refcount block `index`.
    pub(crate) fn refblock(&self, index: u64) -> u64 {
        self.word(self.reftable() + index * 8) & !0x1ff
    }

    /// Offset of the snapshot table.
    pub(crate) fn snapshots(&self) -> u64 {
        self.word(64)
    }

    /// Offset of the bitmap directory.
    pub(crate) fn bitmap_directory(&self) -> u64 {
        let header = self.bytes(0, 4096.min(self.cluster_size() as usize));
        let magic = 0x2385_2875u32.to_be_bytes();
        let at = header.windows(4).position(|window| window == magic).unwrap();
        self.word(at as u64 + 8 + 16)
    }

    /// The verdict of `qemu-img check` with these arguments.
    pub(crate) fn qemu_check(&self, args: &[&str]) -> Verdict {
        let path = self.path();
        let luks = format!("driver=qcow2,file.filename={},encrypt.key-secret=s0", path.display());
        let mut all = vec!["check", "--output=json"];
        all.extend(args);
        if self.u32(32) == 2 {
            all.extend(["--object", LUKS_SECRET, "--image-opts", &luks]);
        } else {
            all.extend(["-f", "qcow2", path.to_str().unwrap()]);
        }
        let output = tool("qemu-img", &all);
        let json = String::from_utf8_lossy(&output.stdout);
        let counts = json.contains("check-errors").then(|| {
            let mut counts = CheckCounts::default();
            counts.check_errors = json_number(&json, "check-errors");
            counts.corruptions = json_number(&json, "corruptions");
            counts.leaks = json_number(&json, "leaks");
            counts.corruptions_fixed = json_number(&json, "corruptions-fixed");
            counts.leaks_fixed = json_number(&json, "leaks-fixed");
            counts.image_end_offset = json_number(&json, "image-end-offset");
            counts.total_clusters = json_number(&json, "total-clusters");
            counts.allocated_clusters = json_number(&json, "allocated-clusters");
            counts.fragmented_clusters = json_number(&json, "fragmented-clusters");
            counts.compressed_clusters = json_number(&json, "compressed-clusters");
            counts
        });
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // QEMU dies of some repairs.
        Verdict { code: output.status.code().unwrap_or(-1), counts, said }
    }

    /// The verdict of our check.
    pub(crate) fn check(&self) -> CheckReport {
        self.check_with(&CheckOptions::default())
    }

    /// The verdict of our check after a repair.
    pub(crate) fn repair(&self, repair: Repair) -> CheckReport {
        self.check_with(&CheckOptions::default().repair(repair))
    }

    pub(crate) fn check_with(&self, options: &CheckOptions) -> CheckReport {
        on_worker(async |worker| check(worker, &self.path(), options).await).unwrap()
    }

    /// That QEMU and we count the same, and how we both end.
    pub(crate) fn assert_same_verdict(&self, what: &str) -> CheckReport {
        self.assert_same_verdict_but(what, |_| false)
    }

    /// The same, without the corruptions that only we look for.
    pub(crate) fn assert_same_verdict_but(
        &self,
        what: &str,
        only_ours: impl Fn(&FindingKind) -> bool,
    ) -> CheckReport {
        let theirs = self.qemu_check(&[]);
        let mut ours = self.check_with(&CheckOptions::default().max_findings(100_000));
        let extra =
            ours.findings.iter().filter(|finding| only_ours(&finding.kind)).map(|finding| finding.times);
        ours.counts.corruptions -= extra.sum::<u64>();
        let counts = theirs.counts.unwrap_or_else(|| panic!("{what}: QEMU gave up: {}", theirs.said));
        let list: Vec<String> = ours.findings.iter().map(ToString::to_string).collect();
        assert_eq!(
            ours.counts,
            counts,
            "{what}: ours != QEMU's\n{}\nQEMU:\n{}",
            list.join("\n"),
            theirs.said
        );
        assert_eq!(i32::from(ours.exit_code()), theirs.code, "{what}");
        ours
    }

    /// That nothing is wrong, by QEMU and by us.
    pub(crate) fn assert_clean(&self, what: &str) {
        let theirs = self.qemu_check(&[]);
        assert_eq!(theirs.code, 0, "{what}: QEMU: {}", theirs.said);
        let report = self.assert_same_verdict(what);
        assert!(report.is_clean(), "{what}");
    }

    /// That both images show the same disk.
    pub(crate) fn assert_same_content(&self, other: &Self, what: &str) {
        let (a, b) = (self.path(), other.path());
        let args = ["compare", "-f", "qcow2", "-F", "qcow2", a.to_str().unwrap(), b.to_str().unwrap()];
        let output = tool("qemu-img", &args);
        assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Runs `work` on a worker of its own.
pub(crate) fn on_worker<T>(work: impl AsyncFnOnce(&Worker) -> T) -> T {
    let engine = if std::env::var_os("ZEBU_TEST_ENGINE").is_some_and(|engine| engine == "threads") {
        Engine::Threads
    } else {
        Engine::Auto
    };
    let worker = Worker::new(&WorkerConfig::default().engine(engine)).unwrap();
    worker.block_on(work(&worker))
}

/// A small generator of reproducible numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
