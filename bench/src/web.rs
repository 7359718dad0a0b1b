//! Servers of files on the network, and a slow link in front of them.

use crate::Outcome;
use crate::process::{find, run};
use crate::workspace::{cargo, target_dir};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a server may take to begin.
const BEGINNING: Duration = Duration::from_secs(60);
/// How long one may take to end.
const ENDING: Duration = Duration::from_secs(2);
/// The slow link: what it adds to a request and its answer, and its rate.
const DELAY_MS: &str = "20";
const MEGABITS: &str = "1000";

/// A server that runs; ended on drop.
pub(crate) struct Daemon(pub(crate) Child);

impl Daemon {
    /// Starts it, and waits until `is_open`.
    pub(crate) fn start(command: &mut Command, is_open: impl Fn() -> bool) -> Outcome<Self> {
        let name = format!("{command:?}");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut daemon = Self(child.map_err(|error| format!("{name}: {error}"))?);
        let begin = Instant::now();
        while !is_open() {
            let is_over = daemon.0.try_wait().is_ok_and(|status| status.is_some());
            if is_over || begin.elapsed() > BEGINNING {
                return Err(format!("{name} does not serve"));
            }
            sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Ends it in good order, so that it keeps what it has to keep.
    pub(crate) fn end(mut self) -> Outcome {
        run(Command::new("kill").arg(self.0.id().to_string()))?;
        self.0.wait().map(drop).map_err(|error| error.to_string())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let is_over = |child: &mut Child| child.try_wait().is_ok_and(|status| status.is_some());
        if is_over(&mut self.0) {
            return;
        }
        // A server with processes of its own has to end them.
        let _ = run(Command::new("kill").arg(self.0.id().to_string()));
        let begin = Instant::now();
        while begin.elapsed() < ENDING && !is_over(&mut self.0) {
            sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that nobody listens on.
pub(crate) fn free_port() -> Outcome<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| error.to_string())?;
    Ok(listener.local_addr().map_err(|error| error.to_string())?.port())
}

/// The origin of what nginx answers with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// Files of a directory.
    Files(&'a Path),
    /// Another server of this machine, at this port.
    Server(u16),
}

/// nginx, which writes a line for each request to `requests` in `here`: method, status, bytes of the body, range. And its port.
pub(crate) fn web_server(here: &Path, origin: Origin<'_>) -> Outcome<(Daemon, u16)> {
    let nginx = find("nginx").ok_or("nginx is missing: `cargo xtask setup` installs it")?;
    let port = free_port()?;
    let shown = here.display();
    let place = match origin {
        Origin::Files(files) => format!("root {};", files.display()),
        Origin::Server(port) => format!(
            "location / {{ proxy_pass http://127.0.0.1:{port}; proxy_http_version 1.1; proxy_buffering off;\n\
             proxy_set_header Host $http_host; proxy_set_header Connection ''; client_max_body_size 0; }}"
        ),
    };
    let config = format!(
        "daemon off; worker_processes 1; user root; pid {shown}/nginx.pid; error_log {shown}/nginx.log;\n\
         events {{ worker_connections 1024; }}\nhttp {{ log_format short '$request_method $status $body_bytes_sent \
         $http_range'; access_log {shown}/requests short; sendfile on; keepalive_requests 1000000;\n\
         client_body_temp_path {shown}/body; proxy_temp_path {shown}/proxied;\n\
         server {{ listen 127.0.0.1:{port} backlog=1024; {place} }} }}\n"
    );
    let path = here.join("nginx.conf");
    fs::write(&path, config).map_err(|error| error.to_string())?;
    let mut command = Command::new(nginx);
    command.arg("-c").arg(&path).arg("-p").arg(here).arg("-e").arg(here.join("nginx.log"));
    let running = Daemon::start(&mut command, || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok())?;
    Ok((running, port))
}

/// The program of the slow link, built.
pub(crate) fn link_program() -> Outcome<PathBuf> {
    let build =
        ["build", "--quiet", "--release", "--locked", "--package", "zebu-tests", "--bin", "slow_link"];
    run(cargo().args(build))?;
    Ok(target_dir()?.join("release/slow_link"))
}

/// A link of 20 ms and 1 Gbit/s to a port of this machine, and its own port.
pub(crate) fn slow_link(program: &Path, server: u16) -> Outcome<(Daemon, u16)> {
    let mut command = Command::new(program);
    command.args([&format!("127.0.0.1:{server}"), DELAY_MS, MEGABITS]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut link = Daemon(child.map_err(|error| format!("{command:?}: {error}"))?);
    let mut line = String::new();
    let stdout = link.0.stdout.take().ok_or("the link says nothing")?;
    BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
    let port = line.trim().parse().map_err(|_| "the link tells no port")?;
    Ok((link, port))
}

/// The user of the store and the password.
pub(crate) const STORE_USER: &str = "measuring";
pub(crate) const STORE_PASSWORD: &str = "measured-store";
/// The bucket that there is.
pub(crate) const BUCKET: &str = "disks";

/// MinIO with its data in `dir`, and its port.
pub(crate) fn minio(dir: &Path) -> Outcome<(Daemon, u16)> {
    let minio = find("minio").ok_or("minio is missing: `cargo xtask setup` builds it")?;
    fs::create_dir_all(dir.join(BUCKET)).map_err(|error| format!("{}: {error}", dir.display()))?;
    let port = free_port()?;
    let mut command = Command::new(minio);
    command.args(["server", "--quiet", "--address", &format!("127.0.0.1:{port}")]).arg(dir);
    command.env("MINIO_ROOT_USER", STORE_USER).env("MINIO_ROOT_PASSWORD", STORE_PASSWORD);
    command.env("MINIO_BROWSER", "off").env("MINIO_UPDATE", "off").env("HOME", dir);
    let running = Daemon::start(command.stderr(Stdio::null()), || is_ready(port).unwrap_or(false))?;
    Ok((running, port))
}

/// The variables by which AWS's tools find the store at a port of this machine.
pub(crate) fn store_variables(port: u16) -> [(&'static str, String); 5] {
    [
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ACCESS_KEY_ID", STORE_USER.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", STORE_PASSWORD.to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_EC2_METADATA_DISABLED", "true".to_owned()),
    ]
}

/// Whether a MinIO serves its buckets by now.
fn is_ready(port: u16) -> std::io::Result<bool> {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    socket.write_all(b"GET /minio/health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    Ok(answer.split(' ').nth(1) == Some("200"))
}
