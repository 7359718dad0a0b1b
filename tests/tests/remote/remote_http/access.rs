//! Certificates, passwords and proxies.

use super::{convert, flat, source, zebu_with};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use zebu_tests::certificates::certificates;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::WebServer;

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn certificates_are_checked_and_https_is_not_left() {
    let scratch = Scratch::new("http-tls");
    let dir = scratch.path();
    let content = source(dir);
    certificates(dir);
    let server =
        WebServer::start_with(dir, "location /down { return 302 http://127.0.0.1:$server_port/disk.raw; }");
    let plain = server.url("/disk.raw");
    let secure = server.secure_url("/disk.raw");
    for words in
        [&["convert", "-f", "raw", "-O", "raw", &secure, "flat.raw"][..], &["info", "-f", "raw", &secure]]
    {
        let out = zebu(dir, words).exits(1);
        assert!(out.stderr.contains("certificate"), "{out}");
    }
    convert(dir, &["-f", "raw", "--tls-ca", "ca-cert.pem"], &secure).ok();
    assert!(flat(dir) == content);
    let out = zebu_with(dir, &[("SSL_CERT_FILE", "ca-cert.pem")], &["info", "-f", "raw", &secure]);
    out.ok();
    let unchecked = format!("driver=https,url={secure},sslverify=off");
    convert(dir, &["--image-opts"], &unchecked).ok();
    assert!(flat(dir) == content);
    // Another host than the certificate's.
    let other = secure.replace("localhost", "127.0.0.1");
    let out = zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", &other]).exits(1);
    assert!(out.stderr.contains("certificate"), "{out}");
    // TLS to a server without, and the other way round.
    let out = zebu(dir, ["info", "-f", "raw", &plain.replace("http:", "https:")]).exits(1);
    assert_eq!(out.stderr.lines().count(), 1, "{out}");
    let port = server.port();
    let redirects = WebServer::start_with(
        &{
            let below = dir.join("redirects");
            std::fs::create_dir_all(&below).unwrap();
            for name in ["server-cert.pem", "server-key.pem"] {
                std::fs::copy(dir.join(name), below.join(name)).unwrap();
            }
            below
        },
        &format!("location /down {{ return 302 http://127.0.0.1:{port}/disk.raw; }}"),
    );
    let down = redirects.secure_url("/down");
    let out = zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", &down]).exits(1);
    assert!(out.stderr.contains("from https to") && out.stderr.contains("--redirects any"), "{out}");
    zebu(dir, ["info", "-f", "raw", "--tls-ca", "ca-cert.pem", "--redirects", "any", &down]).ok();
}

#[test]
fn passwords_come_from_files_go_to_their_server_only_and_are_never_shown() {
    let scratch = Scratch::new("http-users");
    let dir = scratch.path();
    source(dir);
    let server = WebServer::start(dir);
    let private = server.url("/private/disk.raw");
    let none = [("NETRC", "/dev/null")];
    let out = zebu_with(dir, &none, &["info", "-f", "raw", &private]).exits(1);
    assert!(out.stderr.contains("401") && out.stderr.contains("netrc"), "{out}");
    std::fs::write(dir.join("netrc"), "machine 127.0.0.1 login user password secret\n").unwrap();
    zebu_with(dir, &[("NETRC", "netrc")], &["info", "-f", "raw", &private]).ok();
    std::fs::create_dir(dir.join("home")).unwrap();
    std::fs::rename(dir.join("netrc"), dir.join("home/.netrc")).unwrap();
    let home = dir.join("home");
    let home = [("NETRC", ""), ("HOME", home.to_str().unwrap())];
    zebu_with(dir, &home, &["info", "-f", "raw", &private]).ok();
    std::fs::write(dir.join("password"), "secret\n").unwrap();
    let keys = format!("driver=http,url={private},username=user,password-file=password");
    zebu_with(dir, &none, &["info", "--image-opts", &keys]).ok();
    let named = private.replace("http://", "http://user:secret@");
    let out = zebu_with(dir, &none, &["info", "-f", "raw", &named]).ok();
    assert!(!out.stdout.contains("secret") && out.stdout.contains(&private), "{out}");
    let wrong = private.replace("http://", "http://user:wr%6fngsecret@") + "?key=secret";
    for words in
        [&["info", "-f", "raw", &wrong][..], &["convert", "-v", "-f", "raw", "-O", "raw", &wrong, "x"]]
    {
        let out = zebu_with(dir, &none, words).exits(1);
        assert!(out.stderr.contains("401") && !out.stderr.contains("secret"), "{out}");
    }
    // Not to where a redirect leads, and a cookie neither.
    let heads = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&heads);
    let other = WebProxy::start(server.port(), move |_, head| {
        seen.lock().unwrap().push_str(head);
        Mishap::None
    });
    let place = other.url("/disk.raw");
    let proxy = WebProxy::start(server.port(), move |_, head| {
        assert!(head.to_ascii_lowercase().contains("authorization: basic") && head.contains("a=b"), "{head}");
        Mishap::Answer(format!("302 Found\r\nLocation: {place}"))
    });
    let url = proxy.url("/x");
    let keys = format!("driver=http,url={url},username=user,password-file=password,cookie=a=b");
    zebu_with(dir, &none, &["info", "--image-opts", &keys]).ok();
    let heads = heads.lock().unwrap().to_ascii_lowercase();
    assert!(!heads.is_empty() && !heads.contains("authorization") && !heads.contains("a=b"), "{heads}");
    // netrc's default is for the server that was named, and not for where it leads.
    std::fs::write(dir.join("default"), "default login user password secret\n").unwrap();
    let asked = Arc::new(Mutex::new(String::new()));
    let seen = Arc::clone(&asked);
    let other = WebProxy::start(server.port(), move |_, head| {
        seen.lock().unwrap().push_str(head);
        Mishap::None
    });
    let place = other.url("/disk.raw");
    let proxy = WebProxy::start(server.port(), move |_, head| {
        assert!(head.to_ascii_lowercase().contains("authorization: basic"), "{head}");
        Mishap::Answer(format!("302 Found\r\nLocation: {place}"))
    });
    zebu_with(dir, &[("NETRC", "default")], &["info", "-f", "raw", &proxy.url("/x")]).ok();
    let asked = asked.lock().unwrap().to_ascii_lowercase();
    assert!(!asked.is_empty() && !asked.contains("authorization"), "{asked}");
    // Nor into an image.
    let out = zebu(dir, ["create", "-f", "qcow2", "-b", &named, "-F", "raw", "top.qcow2"]).exits(1);
    assert!(out.stderr.contains("netrc") && !out.stderr.contains("secret"), "{out}");
    for (key, remedy) in [("password-secret", "password-file"), ("cookie-secret", "cookie")] {
        let out = zebu(dir, ["info", "--image-opts", &format!("driver=http,url={url},{key}=x")]).exits(1);
        assert!(out.stderr.contains(remedy), "{out}");
    }
}

#[test]
fn proxies_of_the_environment_are_used() {
    let scratch = Scratch::new("http-proxy");
    let dir = scratch.path();
    let content = source(dir);
    certificates(dir);
    let server = WebServer::start(dir);
    let tinyproxy = find("tinyproxy").expect("tinyproxy is missing: `cargo xtask setup` installs it");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let config = format!(
        "Port {port}\nListen 127.0.0.1\nTimeout 60\nMaxClients 100\nLogFile \"{}\"\nLogLevel Info\nBasicAuth user secret\n",
        dir.join("proxy.log").display()
    );
    std::fs::write(dir.join("proxy.conf"), config).unwrap();
    let child = Command::new(tinyproxy).arg("-d").arg("-c").arg(dir.join("proxy.conf")).spawn().unwrap();
    let _running = Killed(child);
    wait_until("tinyproxy listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let proxy = format!("http://user:secret@127.0.0.1:{port}");
    let (plain, secure) = (server.url("/disk.raw"), server.secure_url("/disk.raw"));
    let asked = |word: &str| {
        let log = std::fs::read_to_string(dir.join("proxy.log")).unwrap();
        log.lines().filter(|line| line.contains(word)).count()
    };
    let convert = |url: &str| {
        ["convert", "-f", "raw", "-O", "raw", "--tls-ca", "ca-cert.pem", url, "flat.raw"].map(str::to_owned)
    };
    for (variable, url, word) in [("http_proxy", &plain, "GET http"), ("https_proxy", &secure, "CONNECT")] {
        let words = convert(url);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        zebu_with(dir, &[(variable, &proxy), ("no_proxy", "")], &words).ok();
        assert!(flat(dir) == content && asked(word) > 0, "{variable}");
        let before = asked(word);
        zebu_with(dir, &[(variable, &proxy), ("no_proxy", "localhost,127.0.0.0/8")], &words).ok();
        assert_eq!(asked(word), before);
        let wrong = proxy.replace("secret", "wrong");
        let out = zebu_with(dir, &[(variable, &wrong), ("no_proxy", "")], &words).exits(1);
        assert!(out.stderr.contains("401") || out.stderr.contains("407"), "{out}");
        assert!(!out.stderr.contains("wrong"), "{out}");
    }
    let socks = [("all_proxy", "socks5://127.0.0.1:1"), ("no_proxy", "")];
    let out = zebu_with(dir, &socks, &["info", "-f", "raw", &plain]).exits(1);
    assert!(out.stderr.contains("all_proxy"), "{out}");
}
