//! Uploads to MinIO that are killed: at random moments, at each kind of request, and while the store makes the object.
//!
//! After each kill, nothing or the earlier object has the name, or the new one is there whole. The run that goes on sends only
//! the parts that the store does not list. `ZEBU_UPLOAD_KILLS` sets the number of kills, `ZEBU_SEED` other moments.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zebu_tests::object_store::ObjectStore;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, run_in};
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::web_proxy::{Mishap, WebProxy};

/// Bytes of the disk.
const LEN: usize = 40 << 20;
/// Memory with which parts are as small as a store takes them.
const MEMORY: [&str; 2] = ["--buffer-memory", "28M"];
/// Kills unless the environment says otherwise.
const KILLS: u64 = 12;
/// The number of the part that marks an upload as zebu's.
const MARK: u64 = 10_000;

/// A way to write an object.
struct Kind {
    key: &'static str,
    words: &'static [&'static str],
    is_backup: bool,
}

const KINDS: [Kind; 4] = [
    Kind { key: "k.raw", words: &["convert", "-f", "raw", "-O", "raw"], is_backup: false },
    Kind { key: "k.qcow2", words: &["convert", "-f", "raw", "-O", "qcow2"], is_backup: false },
    Kind { key: "packed.qcow2", words: &["convert", "-f", "raw", "-O", "qcow2", "-c"], is_backup: false },
    Kind { key: "backup.qcow2", words: &["backup", "-f", "raw", "--manifest", "manifest"], is_backup: true },
];

/// The moment of a kill.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// So long after the start.
    Time(Duration),
    /// When the head of this request has come, and perhaps a part of its body.
    Request(usize),
    /// At the request that makes the object of its parts, which the store gets or does not get.
    Completion { arrives: bool },
}

/// Observations of a run on its way to the store.
#[derive(Default)]
struct Watched {
    /// Requests so far.
    requests: AtomicUsize,
    /// Numbers of the parts that were sent, or begun to be, once or again.
    parts: Mutex<BTreeSet<u64>>,
    /// The process to kill, and when.
    victim: Mutex<Option<(rustix::process::Pid, Moment)>>,
}

impl Watched {
    /// Looks at a request; kills if its moment has come.
    fn look(&self, head: &str) -> Mishap {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let part = head.starts_with("PUT ").then(|| part_number(head)).flatten();
        self.parts.lock().unwrap().extend(part.filter(|part| *part != MARK));
        let is_completion = head.starts_with("POST ") && head.contains("uploadId=");
        let mut victim = self.victim.lock().unwrap();
        let Some((pid, moment)) = *victim else { return Mishap::None };
        let (is_now, arrives) = match moment {
            Moment::Time(_) => (false, true),
            Moment::Request(wanted) => (number >= wanted, true),
            Moment::Completion { arrives } => (is_completion, arrives),
        };
        if !is_now {
            return Mishap::None;
        }
        *victim = None;
        // Its end is waited for by its parent: until then, nobody else has its number.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        if arrives { Mishap::None } else { Mishap::Answer("503 Slow Down".to_owned()) }
    }

    fn begin(&self) {
        self.requests.store(0, Ordering::SeqCst);
        self.parts.lock().unwrap().clear();
    }
}

fn part_number(head: &str) -> Option<u64> {
    let rest = head.split("partNumber=").nth(1)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The store behind the proxy, and what runs and is looked at there.
struct Scene<'a> {
    dir: &'a Path,
    store: ObjectStore,
    proxy: WebProxy,
    watched: Arc<Watched>,
}

impl<'a> Scene<'a> {
    fn new(dir: &'a Path) -> Self {
        let store = ObjectStore::start(dir);
        let watched = Arc::new(Watched::default());
        let looking = Arc::clone(&watched);
        let proxy = WebProxy::start(store.port(), move |_, head| looking.look(head));
        Self { dir, store, proxy, watched }
    }

    fn command(&self, kind: &Kind) -> std::process::Command {
        let name = format!("s3://disks/{}", kind.key);
        let words = [kind.words, &MEMORY, &["disk.raw", &name]].concat();
        let url = self.proxy.url("");
        let mut command = self.store.command(&[("AWS_ENDPOINT_URL", &url)], &words);
        command.stdout(Stdio::null()).stdin(Stdio::null());
        command
    }

    /// Runs to the end; parts that were sent.
    fn finish(&self, kind: &Kind) -> BTreeSet<u64> {
        self.watched.begin();
        let done = self.command(kind).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{}: {said}", kind.key);
        self.watched.parts.lock().unwrap().clone()
    }

    /// Runs and kills; whether it was killed before its end.
    fn kill(&self, kind: &Kind, moment: Moment) -> bool {
        self.watched.begin();
        let mut child = self.command(kind).stderr(Stdio::null()).spawn().unwrap();
        if let Moment::Time(time) = moment {
            std::thread::sleep(time);
            let _ = child.kill();
        } else {
            let pid = rustix::process::Pid::from_child(&child);
            *self.watched.victim.lock().unwrap() = Some((pid, moment));
        }
        let status = child.wait().unwrap();
        *self.watched.victim.lock().unwrap() = None;
        let was_killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(9);
        assert!(was_killed || status.success(), "{status}");
        // What was on its way has come or is given up.
        self.proxy.catch_up();
        wait_until("the connections of a killed process are closed", || self.proxy.open() == 0);
        was_killed
    }

    /// Numbers of the parts that the store has of an upload of zebu's; besides, how many uploads have neither a mark nor a part.
    fn stored(&self, key: &str) -> (Vec<u64>, usize) {
        let list =
            self.store.request("GET", &format!("disks/?prefix={key}&uploads="), &["--fail"]).ok().stdout;
        let (mut found, mut orphans) = (Vec::new(), 0);
        for id in between(&list, "<UploadId>", "</UploadId>") {
            let path = format!("disks/{key}?max-parts=1000&uploadId={id}");
            let list = self.store.request("GET", &path, &["--fail"]).ok().stdout;
            let parts = between(&list, "<PartNumber>", "</PartNumber>");
            let parts: Vec<u64> = parts.iter().map(|number| number.parse().unwrap()).collect();
            if parts.is_empty() {
                orphans += 1;
                continue;
            }
            assert!(parts.contains(&MARK) && found.is_empty(), "{key}: uploads with parts: {list}");
            found = parts.into_iter().filter(|number| *number != MARK).collect();
        }
        (found, orphans)
    }

    fn delete(&self, key: &str) {
        self.store.request("DELETE", &format!("disks/{key}"), &["--fail"]).ok();
    }
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Vec<&'a str> {
    text.split(start).skip(1).filter_map(|rest| rest.split(end).next()).collect()
}

/// Noise, text and zeroes, as `disk.raw`.
fn source(dir: &Path) {
    let mut content = vec![0; LEN];
    Random::new(7).fill(&mut content[1 << 20..34 << 20]);
    for (index, byte) in content[35 << 20..39 << 20].iter_mut().enumerate() {
        *byte = (index / 1000 % 7 * 31) as u8;
    }
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
}

/// An object of a run that nothing interrupted, how many parts and requests it took, and its time.
struct Whole {
    bytes: Vec<u8>,
    parts: usize,
    requests: usize,
    time: Duration,
}

fn whole(scene: &Scene<'_>, kind: &Kind) -> Whole {
    let begin = Instant::now();
    let parts = scene.finish(kind).len();
    let time = begin.elapsed();
    let requests = scene.watched.requests.load(Ordering::SeqCst);
    let bytes = scene.store.get(kind.key).expect("an object");
    std::fs::write(scene.dir.join("judged"), &bytes).unwrap();
    let qemu_img = find("qemu-img").expect("qemu-img is missing: `cargo xtask setup` installs it");
    let format = if kind.key.ends_with("raw") { "raw" } else { "qcow2" };
    let line = format!("compare -f raw -F {format} disk.raw judged");
    run_in(scene.dir, &qemu_img, line.split_whitespace()).ok();
    let _ = std::fs::remove_file(scene.dir.join("manifest"));
    scene.delete(kind.key);
    assert!(parts >= 7, "{}: {parts} parts", kind.key);
    Whole { bytes, parts, requests, time }
}

#[test]
fn killed_uploads_leave_no_half_object_and_the_next_run_sends_what_is_missing() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let kills = number("ZEBU_UPLOAD_KILLS").unwrap_or(KILLS);
    let seed = number("ZEBU_SEED").unwrap_or(11);
    let scratch = Scratch::new("upload-kills");
    let dir = scratch.path();
    source(dir);
    let scene = Scene::new(dir);
    let wholes = KINDS.each_ref().map(|kind| whole(&scene, kind));
    let earlier = vec![7; 1 << 20];
    std::fs::write(dir.join("earlier"), &earlier).unwrap();
    let mut random = Random::new(seed);
    let (mut killed, mut resumed, mut kept, mut sent, mut made, mut orphans) = (0, 0, 0, 0, 0, 0);
    for story in 0.. {
        if killed >= kills {
            break;
        }
        let (kind, whole) = (&KINDS[story % 4], &wholes[story % 4]);
        let has_earlier = !kind.is_backup && random.chance(50);
        if has_earlier {
            scene.store.put("earlier", kind.key);
        }
        let mut is_made = false;
        for attempt in 0..random.between(1, 3) {
            let moment = match random.below(4) {
                // Each kind at the end of its upload first.
                _ if attempt == 0 && story < 8 => Moment::Completion { arrives: story < 4 },
                0 | 1 => Moment::Time(whole.time.mul_f64(random.below(1000) as f64 / 950.0)),
                2 => Moment::Request(random.below(whole.requests as u64) as usize),
                _ => Moment::Completion { arrives: random.chance(50) },
            };
            killed += u64::from(scene.kill(kind, moment));
            let object = scene.store.get(kind.key);
            is_made = object.as_ref() == Some(&whole.bytes);
            let expected = has_earlier.then_some(&earlier);
            let len = object.as_ref().map(Vec::len);
            assert!(is_made || object.as_ref() == expected, "{}: {moment:?}: {len:?} bytes", kind.key);
            assert!(is_made || !dir.join("manifest").exists(), "{}: {moment:?}", kind.key);
            if is_made {
                made += 1;
                break;
            }
        }
        let (stored, _) = scene.stored(kind.key);
        if is_made && !kind.is_backup {
            assert!(stored.is_empty(), "{}: parts of an upload that is over", kind.key);
        }
        // A run that ended has nothing to be gone on with, but for a manifest that its object waits for.
        if !dir.join("manifest").exists() {
            let now = scene.finish(kind);
            let expected = if is_made && kind.is_backup { 0 } else { whole.parts - stored.len() };
            let is_missing = stored.iter().all(|part| !now.contains(part)) && now.len() == expected;
            assert!(is_missing, "{}: {now:?} of {} parts, {stored:?} were there", kind.key, whole.parts);
            resumed += usize::from(!stored.is_empty());
            (kept, sent) = (kept + stored.len(), sent + now.len());
        }
        assert!(scene.store.get(kind.key).as_ref() == Some(&whole.bytes), "{}: another object", kind.key);
        if kind.is_backup {
            let name = format!("s3://disks/{}", kind.key);
            scene.store.zebu(&["verify", "--manifest", "manifest", &name]).ok();
            std::fs::remove_file(dir.join("manifest")).unwrap();
        }
        let (left, without_parts) = scene.stored(kind.key);
        assert!(left.is_empty(), "{}: an upload is left", kind.key);
        orphans = without_parts.max(orphans);
        scene.delete(kind.key);
    }
    println!(
        "{killed} kills; {made} found the object whole; {resumed} runs went on: {kept} parts kept, {sent} sent; \
         at most {orphans} uploads of a key without a part"
    );
    assert!(kept > 0, "no run went on with what another had sent");
}
