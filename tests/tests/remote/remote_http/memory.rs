//! Memory that requests take.

use super::flat;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use zebu_tests::program::{find, finish, replacing, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_server::WebServer;

/// The most memory that zebu has for a command, in bytes (getrusage(2)).
fn peak_of(dir: &Path, words: &[&str]) -> u64 {
    let script = "import resource,subprocess,sys\nsubprocess.run(sys.argv[1:],check=True,stdout=subprocess.DEVNULL)\n\
                  print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let mut command = Command::new(find("python3").expect("python3"));
    command.args(["-c", script]).arg(zebu_program()).args(replacing(words)).current_dir(dir);
    finish(command).ok().stdout.trim().parse::<u64>().expect("a number") << 10
}

/// An answer that is larger than the window of it that is kept.
#[test]
fn memory_of_a_server_without_ranges_is_bounded_by_the_option() {
    let scratch = Scratch::new("http-window");
    let dir = scratch.path();
    std::fs::create_dir_all(dir.join("www")).unwrap();
    let bytes: Vec<u8> =
        (0..25u32 << 20).flat_map(|number| number.wrapping_mul(2654435761).to_le_bytes()).collect();
    std::fs::write(dir.join("www/big.raw"), &bytes).unwrap();
    let server = WebServer::start(dir);
    let url = server.url("/whole/big.raw");
    let local = peak_of(dir, &["convert", "-f", "raw", "-O", "raw", "www/big.raw", "flat.raw"]);
    for mib in [8, 64, 96] {
        let memory = format!("{mib}M");
        let words = ["convert", "--http-memory", &memory, "-f", "raw", "-O", "raw", &url, "flat.raw"];
        let found = peak_of(dir, &words);
        assert!(flat(dir) == bytes);
        assert!(found < local + ((mib + 12) << 20), "{mib} MiB: {found} beside {local}");
    }
}

#[test]
fn memory_is_bounded_by_the_option() {
    let scratch = Scratch::new("http-memory");
    let dir = scratch.path();
    std::fs::create_dir_all(dir.join("www")).unwrap();
    let file = std::fs::File::create(dir.join("www/big.raw")).unwrap();
    let piece: Vec<u8> =
        (0..1u32 << 18).flat_map(|number| number.wrapping_mul(2654435761).to_le_bytes()).collect();
    for at in 0..256u64 {
        file.write_all_at(&piece, at << 20).unwrap();
    }
    let server = WebServer::start(dir);
    let peak = |options: &str| {
        let keys = format!("driver=http,url={},{options}", server.url("/big.raw"));
        let words = ["bench", "--image-opts", "-c", "3000", "-d", "32", "-s", "4096", "-S", "131072", &keys];
        peak_of(dir, &words)
    };
    let (small, large) = (peak("memory=4M"), peak("memory=128M,connections=32"));
    println!("peak with 4M: {small}, with 128M: {large}");
    assert!(small < 64 << 20, "{small}");
    assert!(large < small + (140 << 20), "{large}");
}
