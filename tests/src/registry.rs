//! Distribution, a registry of images, a server of tokens before it, and skopeo as another client.

use crate::patience::Patience;
use crate::program::{Finished, find, finish, replacing, required, run_in, zebu_program};
use crate::random::Random;
use crate::server::PROXIES;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The password of the user `user` in bcrypt: `secret`.
const HASH: &str = "$2b$04$SMO5JQLgMA9CEp89t5uxFO8aOjiob0.PaQdm1DsjwvfoWpSf3IPpS";
/// The value of a header that user and password make.
pub const BASIC: &str = "Basic dXNlcjpzZWNyZXQ=";

/// The users that a registry lets in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guests {
    /// All.
    All,
    /// The user `user` with the password `secret`.
    User,
}

/// A running registry with its blobs in `registry` of a directory. Killed on drop.
///
/// If `server-cert.pem` and `server-key.pem` are in the directory, it speaks TLS.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    dir: PathBuf,
    port: u16,
}

impl Registry {
    /// Starts it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(dir: &Path, guests: Guests) -> Self {
        let program =
            find("docker-registry").expect("docker-registry is missing: `cargo xtask setup` installs it");
        let log = dir.join("registry.log");
        std::fs::write(dir.join("users"), format!("user:{HASH}\n")).expect("a file");
        // Another program may take a port between our looking and its listening.
        for _ in 0..10 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            let port = port.expect("a port").port();
            std::fs::write(dir.join("registry.yml"), config(dir, port, guests)).expect("a file");
            let file = std::fs::File::create(&log).expect("a file");
            let mut command = Command::new(&program);
            command.arg("serve").arg(dir.join("registry.yml")).env("OTEL_TRACES_EXPORTER", "none");
            command.stdin(Stdio::null()).stdout(file.try_clone().expect("a file")).stderr(file);
            let child = command.spawn().expect("the registry starts");
            let mut registry = Self { child, dir: dir.to_owned(), port };
            let patience = Patience::begin();
            while registry.child.try_wait().expect("a child").is_none() {
                if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                    return registry;
                }
                patience.pause("the registry listens");
            }
        }
        panic!("the registry does not start: {}", std::fs::read_to_string(log).unwrap_or_default());
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The name of an image of it.
    pub fn image(&self, name: &str) -> String {
        format!("oci://127.0.0.1:{}/{name}", self.port)
    }

    /// The requests so far, a line each.
    ///
    /// # Panics
    /// If there is no log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("registry.log")).expect("a log")
    }

    /// The file that has a blob.
    pub fn blob(&self, digest: &str) -> PathBuf {
        let hex = digest.strip_prefix("sha256:").expect("a digest of sha256");
        let blobs = self.dir.join("registry/docker/registry/v2/blobs/sha256");
        blobs.join(&hex[..2]).join(hex).join("data")
    }

    /// Flips a bit of a byte of a blob; twice makes it right again.
    ///
    /// # Panics
    /// If there is no such byte.
    pub fn flip(&self, digest: &str, offset: u64) {
        use std::os::unix::fs::FileExt;
        let file =
            std::fs::OpenOptions::new().read(true).write(true).open(self.blob(digest)).expect("the blob");
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).expect("the byte");
        file.write_all_at(&[byte[0] ^ 1], offset).expect("the byte");
    }

    /// Copies an image by skopeo, which leaves what refers to it.
    pub fn copy(&self, from: &str, to: &str) {
        let port = self.port;
        let tls = "--src-tls-verify=false --dest-tls-verify=false";
        skopeo(
            &self.dir,
            &format!("copy {tls} docker://127.0.0.1:{port}/{from} docker://127.0.0.1:{port}/{to}"),
        );
    }

    /// The manifest or index that has a tag.
    ///
    /// # Panics
    /// If there is none.
    pub fn manifest_of_tag(&self, repository: &str, tag: &str) -> String {
        let tags = self
            .dir
            .join("registry/docker/registry/v2/repositories")
            .join(repository)
            .join("_manifests/tags");
        let digest = std::fs::read_to_string(tags.join(tag).join("current/link")).expect("the tag");
        std::fs::read_to_string(self.blob(&digest)).expect("the manifest")
    }

    /// The first blob of the first manifest in an index.
    ///
    /// # Panics
    /// If there is none.
    pub fn referring_blob(&self, index: &str) -> String {
        let digest_in = |text: &str, list: &str| -> String {
            let document: serde_json::Value = serde_json::from_str(text).expect("a document");
            document[list][0]["digest"].as_str().expect("a digest").to_owned()
        };
        let manifest = self.blob(&digest_in(index, "manifests"));
        digest_in(&std::fs::read_to_string(manifest).expect("the manifest"), "layers")
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn config(dir: &Path, port: u16, guests: Guests) -> String {
    let here = dir.display();
    let mut text = format!(
        "version: 0.1\nlog:\n  level: warn\n  accesslog:\n    disabled: false\nstorage:\n  filesystem:\n    rootdirectory: \
         {here}/registry\nhttp:\n  addr: 127.0.0.1:{port}\n"
    );
    if dir.join("server-cert.pem").exists() {
        let _ =
            writeln!(text, "  tls:\n    certificate: {here}/server-cert.pem\n    key: {here}/server-key.pem");
    }
    if guests == Guests::User {
        let _ = writeln!(text, "auth:\n  htpasswd:\n    realm: registry\n    path: {here}/users");
    }
    text
}

/// A command of zebu in a directory that is also the user's home, where no proxies and no files of others' count.
pub fn command(dir: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(zebu_program());
    command.args(replacing(words)).current_dir(dir).env("HOME", dir);
    let of_user = ["REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"];
    for variable in of_user.into_iter().chain(PROXIES) {
        command.env_remove(variable);
    }
    command
}

/// The same, run to its end.
pub fn zebu(dir: &Path, words: &[&str]) -> Finished {
    finish(command(dir, words))
}

/// Runs skopeo in a directory, without certificates. `line` is split at blanks.
///
/// # Panics
/// If skopeo is missing or fails.
pub fn skopeo(dir: &Path, line: &str) {
    let mut command = Command::new(required("skopeo"));
    command.arg("--insecure-policy").args(line.split_whitespace()).current_dir(dir).env("HOME", dir);
    for variable in PROXIES {
        command.env_remove(variable);
    }
    finish(command).ok();
}

/// Bytes of the disk of [`source`].
pub const LEN: usize = 40 << 20;

/// A disk with noise and zeroes, as `disk.raw` and `disk.qcow2`.
///
/// # Panics
/// If they can't be made.
pub fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN];
    let mut random = Random::new(53);
    for word in content[1 << 20..30 << 20].chunks_exact_mut(8) {
        word.copy_from_slice(&random.bits().to_le_bytes());
    }
    std::fs::write(dir.join("disk.raw"), &content).expect("a file");
    qemu_img(dir, "convert -f raw -O qcow2 disk.raw disk.qcow2");
    content
}

/// Runs qemu-img. `line` is split at blanks.
///
/// # Panics
/// If it is missing or fails.
pub fn qemu_img(dir: &Path, line: &str) {
    run_in(dir, &required("qemu-img"), line.split_whitespace()).ok();
}

/// The digest that `push --output json` tells.
///
/// # Panics
/// If it tells none.
pub fn digest(report: &str) -> String {
    let report: serde_json::Value = serde_json::from_str(report).expect("a report");
    report["digest"].as_str().expect("a digest").to_owned()
}

/// The digest of a file as blobs have it.
///
/// # Panics
/// If there is no such file.
pub fn blob_digest(dir: &Path, file: &str) -> String {
    let told = run_in(dir, &required("sha256sum"), [file]).ok().stdout;
    format!("sha256:{}", told.split_whitespace().next().expect("a sum"))
}

/// A server that gives tokens `t1`, `t2` and so on; it ends with the process.
#[derive(Debug, Clone)]
pub struct TokenServer(Arc<Given>);

#[derive(Debug, Default)]
struct Given {
    port: AtomicUsize,
    tokens: AtomicUsize,
    /// The first one that is good.
    first: AtomicUsize,
    /// Requests with user and password.
    known: AtomicUsize,
}

impl TokenServer {
    /// Starts it. It says of each token that it is good for `seconds`.
    ///
    /// # Panics
    /// If it can't listen.
    pub fn start(seconds: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the server of tokens listens");
        let given = Arc::new(Given::default());
        given.port.store(listener.local_addr().expect("an address").port().into(), Ordering::SeqCst);
        let shared = Arc::clone(&given);
        std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && client.read(&mut byte).is_ok_and(|read| read == 1) {
                    head.push(byte[0]);
                }
                if String::from_utf8_lossy(&head).contains(BASIC) {
                    shared.known.fetch_add(1, Ordering::SeqCst);
                }
                let number = shared.tokens.fetch_add(1, Ordering::SeqCst) + 1;
                let body = format!("{{\"token\":\"t{number}-\",\"expires_in\":{seconds}}}");
                let answer = format!(
                    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                let _ = client.write_all(answer.as_bytes());
            }
        });
        Self(given)
    }

    /// Ends all tokens that it gave.
    pub fn end_all(&self) {
        self.0.first.store(self.0.tokens.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    }

    /// Tokens so far.
    pub fn given(&self) -> usize {
        self.0.tokens.load(Ordering::SeqCst)
    }

    /// Tokens so far that were given to a user with a password.
    pub fn given_to_user(&self) -> usize {
        self.0.known.load(Ordering::SeqCst)
    }

    /// Whether the head of a request has a good token.
    pub fn is_good(&self, head: &str) -> bool {
        let token =
            head.split("Bearer t").nth(1).and_then(|rest| rest.split('-').next()?.parse::<usize>().ok());
        token.is_some_and(|token| token >= self.0.first.load(Ordering::SeqCst))
    }

    /// The answer to a request without one, for a proxy.
    pub fn denial(&self) -> String {
        format!(
            "401 Unauthorized\r\nWWW-Authenticate: Bearer realm=\"http://127.0.0.1:{}/token\",service=\"tests\"",
            self.0.port.load(Ordering::SeqCst)
        )
    }
}
