//! MinIO, a server of S3, and curl as another client of it.

use crate::patience::{Patience, wait_until};
use crate::program::{Finished, find, finish, replacing, run_in, zebu_program};
use crate::server::PROXIES;
use rustix::process::{Pid, Signal, kill_process};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The bucket that there is.
pub const BUCKET: &str = "disks";

/// A running MinIO with its data in a directory. Killed on drop.
#[derive(Debug)]
pub struct ObjectStore {
    child: Child,
    dir: PathBuf,
    port: u16,
    user: String,
    password: String,
}

impl ObjectStore {
    /// Starts it, with its data in `dir/store`.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(dir: &Path) -> Self {
        std::fs::create_dir_all(dir.join("store").join(BUCKET)).expect("a directory");
        Self::start_at(dir, None, "user", "password of the user")
    }

    /// Starts it again, at the same place, with another password.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start_again(mut self, password: &str) -> Self {
        self.stop();
        let (dir, port, user) = (self.dir.clone(), self.port, self.user.clone());
        Self::start_at(&dir, Some(port), &user, password)
    }

    fn start_at(dir: &Path, port: Option<u16>, user: &str, password: &str) -> Self {
        let minio = find("minio").expect("minio is missing: `cargo xtask setup` builds it");
        let log = dir.join("minio.log");
        // Another program may take a port between our looking and its listening.
        for _ in 0..10 {
            let port = port.unwrap_or_else(free_port);
            let mut command = Command::new(&minio);
            command
                .args(["server", "--quiet", "--address"])
                .arg(format!("127.0.0.1:{port}"))
                .arg("--certs-dir")
                .arg(dir.join("no-certificates"))
                .arg(dir.join("store"))
                .env("HOME", dir)
                .env("MINIO_ROOT_USER", user)
                .env("MINIO_ROOT_PASSWORD", password)
                .env("MINIO_BROWSER", "off")
                .env("MINIO_UPDATE", "off");
            let file = std::fs::File::create(&log).expect("a file");
            command.stdin(Stdio::null()).stdout(file.try_clone().expect("a file")).stderr(file);
            let child = command.spawn().expect("minio starts");
            let mut store = Self {
                child,
                dir: dir.to_owned(),
                port,
                user: user.to_owned(),
                password: password.to_owned(),
            };
            let patience = Patience::begin();
            while store.child.try_wait().expect("a child").is_none() {
                if store.request("GET", &format!("{BUCKET}/"), &[]).stdout.contains("ListBucketResult") {
                    return store;
                }
                patience.pause("minio answers");
            }
        }
        panic!("minio does not start: {}", std::fs::read_to_string(log).unwrap_or_default());
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Has it answer nobody until it is killed or continued.
    ///
    /// # Panics
    /// If it can't be signalled.
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
    }

    /// Has it answer again.
    ///
    /// # Panics
    /// If it can't be signalled.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = Pid::from_raw(self.child.id() as i32).expect("a process");
        kill_process(id, signal).expect("a signal");
    }

    /// The place of its protocol.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The variables by which AWS's tools find it, and nothing else of the machine's.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ACCESS_KEY_ID", self.user.clone()),
            ("AWS_SECRET_ACCESS_KEY", self.password.clone()),
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_EC2_METADATA_DISABLED", "true".to_owned()),
            ("HOME", self.dir.display().to_string()),
        ]
    }

    /// `zebu` with these words in the store's directory. `other` comes after the store's own variables.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn zebu_with(&self, other: &[(&str, &str)], words: &[&str]) -> Finished {
        finish(self.command(other, words))
    }

    /// The same, not started.
    pub fn command(&self, other: &[(&str, &str)], words: &[&str]) -> Command {
        let mut command = Command::new(zebu_program());
        command
            .args(replacing(words))
            .current_dir(&self.dir)
            .envs(self.variables())
            .envs(other.iter().copied());
        let of_aws = ["AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"];
        for variable in of_aws.into_iter().chain(PROXIES) {
            if !other.iter().any(|(name, _)| *name == variable) {
                command.env_remove(variable);
            }
        }
        command
    }

    /// As [`Self::zebu_with`], with the store's own variables.
    pub fn zebu(&self, words: &[&str]) -> Finished {
        self.zebu_with(&[], words)
    }

    /// A request by curl, which signs it as well. `path` is the bucket and what follows, with a query.
    ///
    /// # Panics
    /// If curl is missing.
    pub fn request(&self, method: &str, path: &str, more: &[&str]) -> Finished {
        let curl = find("curl").expect("curl is missing: `cargo xtask setup` installs it");
        let user = format!("{}:{}", self.user, self.password);
        let url = format!("{}/{path}", self.endpoint());
        let words = [
            "--silent",
            "--show-error",
            "--noproxy",
            "*",
            "--aws-sigv4",
            "aws:amz:us-east-1:s3",
            "--user",
            &user,
            "-X",
            method,
        ];
        run_in(&self.dir, &curl, words.iter().chain(more).chain([&url.as_str()]))
    }

    /// Makes an object of a file.
    ///
    /// # Panics
    /// If that fails.
    pub fn put(&self, file: &str, key: &str) {
        self.request("PUT", &format!("{BUCKET}/{key}"), &["--fail", "--upload-file", file]).ok();
    }

    /// The bytes of an object; `None` if there is none.
    ///
    /// # Panics
    /// If the file for it can't be read.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let file = self.dir.join("downloaded");
        let _ = std::fs::remove_file(&file);
        let done = self.request("GET", &format!("{BUCKET}/{key}"), &["--fail", "--output", "downloaded"]);
        (done.code == Some(0)).then(|| std::fs::read(file).expect("a file"))
    }

    /// How many uploads to a key the store knows that were neither ended nor given up.
    pub fn uploads(&self, key: &str) -> usize {
        let key = key.replace('/', "%2F");
        let list = self.request("GET", &format!("{BUCKET}/?prefix={key}&uploads="), &["--fail"]).ok();
        list.stdout.matches("<UploadId>").count()
    }

    /// Waits until the store has at least `count` parts of an upload to a key, the mark of zebu's included.
    ///
    /// # Panics
    /// If it never has them.
    pub fn wait_for_parts(&self, key: &str, count: usize) {
        wait_until(format_args!("{count} parts of {key}"), || {
            let list =
                self.request("GET", &format!("{BUCKET}/?prefix={key}&uploads="), &["--fail"]).ok().stdout;
            let id = list.split("<UploadId>").nth(1).and_then(|rest| rest.split("</UploadId>").next());
            let parts = id.map_or(0, |id| {
                let path = format!("{BUCKET}/{key}?max-parts=1000&uploadId={id}");
                self.request("GET", &path, &["--fail"]).stdout.matches("<PartNumber>").count()
            });
            parts >= count
        });
    }
}

impl Drop for ObjectStore {
    fn drop(&mut self) {
        self.stop();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}
