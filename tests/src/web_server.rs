//! nginx with files of a directory, for the tests of disks on web servers.

use crate::patience::{Patience, wait_for};
use crate::program::find;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running nginx. Killed on drop.
///
/// It serves the directory `www` under `/`; under `/private/` for the user `user` with the password `secret`; under
/// `/whole/` without ranges; and has redirects: `/moved/NAME` to `/NAME`, `/loop` to itself.
#[derive(Debug)]
pub struct WebServer {
    child: Child,
    dir: PathBuf,
    port: u16,
    secure_port: u16,
}

impl WebServer {
    /// Starts it in `dir`. If `server-cert.pem` and `server-key.pem` are there, it listens for TLS as well.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(dir: &Path) -> Self {
        Self::start_with(dir, "")
    }

    /// The same, with more lines for its server.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start_with(dir: &Path, more: &str) -> Self {
        let nginx = find("nginx").expect("nginx is missing: `cargo xtask setup` installs it");
        std::fs::create_dir_all(dir.join("www")).expect("a directory");
        std::fs::write(dir.join("users"), "user:{PLAIN}secret\n").expect("a file");
        let mut failure = String::new();
        // Another program may take a port between our looking and its listening.
        for _ in 0..10 {
            let [port, secure_port] = free_ports();
            std::fs::write(dir.join("nginx.conf"), config(dir, port, secure_port, more)).expect("a file");
            let mut command = Command::new(&nginx);
            command
                .arg("-c")
                .arg(dir.join("nginx.conf"))
                .arg("-p")
                .arg(dir)
                .arg("-e")
                .arg(dir.join("error.log"));
            let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
            let mut server =
                Self { child: child.expect("nginx starts"), dir: dir.to_owned(), port, secure_port };
            let patience = Patience::begin();
            while server.child.try_wait().expect("a child").is_none() {
                if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
                    return server;
                }
                patience.pause("nginx listens");
            }
            failure = std::fs::read_to_string(dir.join("error.log")).unwrap_or_default();
        }
        panic!("nginx does not start: {failure}");
    }

    /// The URL of a path that begins with `/`.
    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// The same over TLS, for the host that certificates have.
    pub fn secure_url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.secure_port)
    }

    /// Its port without TLS.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The requests so far: a line each, with the status, the user and the request.
    ///
    /// # Panics
    /// If there is no log.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("access.log")).expect("a log")
    }

    /// The same, with every request that was answered by now: the line of one is written when its last byte is out, so that
    /// all are there when that of a later request is. That one is for `/later`.
    ///
    /// # Panics
    /// If nothing comes into the log.
    pub fn whole_log(&self) -> String {
        let later = |log: &str| log.matches("GET /later ").count();
        let before = later(&self.log());
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("nginx listens");
        stream.write_all(b"GET /later HTTP/1.0\r\n\r\n").expect("nginx reads");
        wait_for("the last request in nginx's log", || Some(self.log()).filter(|log| later(log) > before))
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port"));
    listeners.map(|listener| listener.local_addr().expect("an address").port())
}

fn config(dir: &Path, port: u16, secure_port: u16, more: &str) -> String {
    let here = dir.display();
    let mut text = format!(
        "daemon off; master_process off; worker_rlimit_nofile 4096; user root; pid {here}/nginx.pid;\n\
         error_log {here}/error.log;\nevents {{ worker_connections 1024; }}\nhttp {{\n\
         log_format short '$status $remote_user \"$request\" \"$http_range\"';\naccess_log {here}/access.log short;\n"
    );
    for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"] {
        let _ = writeln!(text, "{kind}_temp_path {here}/temporary-{kind};");
    }
    let _ = write!(
        text,
        "sendfile on; keepalive_requests 100000;\nserver {{\nlisten 127.0.0.1:{port} backlog=1024;\nroot {here}/www;\n"
    );
    if dir.join("server-cert.pem").exists() {
        let _ = writeln!(
            text,
            "listen 127.0.0.1:{secure_port} ssl; ssl_certificate {here}/server-cert.pem; \
             ssl_certificate_key {here}/server-key.pem;"
        );
    }
    let _ = write!(
        text,
        "location /private/ {{ auth_basic private; auth_basic_user_file {here}/users; alias {here}/www/; }}\n\
         location /whole/ {{ max_ranges 0; alias {here}/www/; }}\n\
         location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}\n\
         location /loop {{ return 301 /loop; }}\n{more}\n}} }}\n"
    );
    text
}
