//! Pushes and pulls that are killed at each kind of request: the next run goes on, and a tag never leads to half an image.
//!
//! `ZEBU_REGISTRY_KILLS` sets the number of kills of each, `ZEBU_SEED` other moments.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use zebu_tests::program::run_in;
use zebu_tests::random::Random;
use zebu_tests::registry::{Guests, LEN, Registry, command, source, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_proxy::{Mishap, WebProxy};

/// Kills of each unless the environment says otherwise.
const KILLS: u64 = 2;

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// The process to kill at a request, and whether the registry still gets that.
#[derive(Default)]
struct Watched {
    requests: AtomicU64,
    victim: Mutex<Option<(rustix::process::Pid, u64, Mishap)>>,
}

impl Watched {
    fn look(&self) -> Mishap {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        let mut victim = self.victim.lock().unwrap();
        match &*victim {
            Some((pid, wanted, mishap)) if number >= *wanted => {
                let (pid, mishap) = (*pid, mishap.clone());
                *victim = None;
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                mishap
            }
            _ => Mishap::None,
        }
    }
}

#[test]
fn killed_pushes_and_pulls_go_on_and_leave_no_half_image() {
    let scratch = Scratch::new("registry-kills");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let watched = Arc::new(Watched::default());
    let proxy = WebProxy::start(registry.port(), {
        let watched = Arc::clone(&watched);
        move |_, _| watched.look()
    });
    let host = proxy.url("").replace("http://", "");
    let mut random = Random::new(number("ZEBU_SEED", 53));
    // Runs a command that is killed at a request; whether it was.
    let mut killed = |words: &[&str], most: u64| {
        watched.requests.store(0, Ordering::SeqCst);
        let mut victim = watched.victim.lock().unwrap();
        let mut child = command(dir, words).spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let mishap = if random.bits().is_multiple_of(2) {
            Mishap::None
        } else {
            Mishap::Answer("503 Busy".to_owned())
        };
        *victim = Some((pid, random.bits() % most, mishap));
        drop(victim);
        let is_killed = child.wait().unwrap().code().is_none();
        *watched.victim.lock().unwrap() = None;
        is_killed
    };
    let mut content = std::fs::read(dir.join("disk.raw")).unwrap();
    let old = registry.image("images/disk:v1");
    zebu(dir, &["push", "disk.raw", &old]).ok();
    std::fs::copy(dir.join("disk.raw"), dir.join("old.raw")).unwrap();
    let mut kills = [0, 0];
    let wanted = number("ZEBU_REGISTRY_KILLS", KILLS);
    for round in 0u64.. {
        if kills.iter().all(|count| *count >= wanted) {
            break;
        }
        // Another disk each time, so that its blobs are not there.
        content[LEN / 2..][..8].copy_from_slice(&round.to_le_bytes());
        std::fs::write(dir.join("disk.raw"), &content).unwrap();
        let name = format!("oci://{host}/images/disk:v1");
        if killed(&["push", "-q", "disk.raw", &name], 14) {
            kills[0] += 1;
        }
        // The tag leads to the earlier disk or to the new one, and either is whole.
        let tag = registry.image("images/disk:v1");
        zebu(dir, &["pull", "-q", &tag, "found.raw"]).ok();
        let found = std::fs::read(dir.join("found.raw")).unwrap();
        assert!(found == content || found == std::fs::read(dir.join("old.raw")).unwrap(), "{round}");
        std::fs::remove_file(dir.join("found.raw")).unwrap();
        zebu(dir, &["push", "-q", "disk.raw", &name]).ok();

        if killed(&["pull", "-q", &name, "pulled.raw"], 16) {
            kills[1] += 1;
            assert!(
                !dir.join("pulled.raw").exists() || std::fs::read(dir.join("pulled.raw")).unwrap() == content
            );
        }
        if !dir.join("pulled.raw").exists() {
            zebu(dir, &["pull", "-q", &name, "pulled.raw"]).ok();
        }
        assert!(std::fs::read(dir.join("pulled.raw")).unwrap() == content, "{round}");
        std::fs::remove_file(dir.join("pulled.raw")).unwrap();
        std::fs::copy(dir.join("disk.raw"), dir.join("old.raw")).unwrap();
    }
    // Nothing is left over.
    let left = run_in(dir, std::path::Path::new("/bin/ls"), ["-A"]).ok().stdout;
    assert!(!left.contains(".part"), "{left}");
}
