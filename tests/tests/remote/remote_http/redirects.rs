//! Redirects, and the places that names in images lead to.

use super::{convert, flat, source};
use std::process::Command;
use std::sync::{Arc, Mutex};
use zebu_tests::program::{find, finish, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::web_proxy::{Mishap, WebProxy};
use zebu_tests::web_server::WebServer;

#[test]
fn redirects_are_followed_once_and_places_that_expire_are_looked_up_again() {
    let scratch = Scratch::new("http-moved");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    convert(dir, &["-f", "raw"], &server.url("/moved/disk.raw")).ok();
    assert!(flat(dir) == content);
    let log = server.whole_log();
    assert_eq!(log.lines().filter(|line| line.contains("/moved/")).count(), 1, "{log}");
    // The place is good for some requests; then the server tells another.
    let uses = Arc::new(Mutex::new((0, 0)));
    let counted = Arc::clone(&uses);
    let proxy = WebProxy::start(server.port(), move |_, head| {
        let mut state = counted.lock().unwrap();
        if head.starts_with("GET /named") {
            state.0 += 1;
            state.1 = 0;
            return Mishap::Answer(format!("302 Found\r\nLocation: /disk.raw?place={}", state.0));
        }
        state.1 += 1;
        let is_old = !head.contains(&format!("place={} ", state.0));
        if is_old || state.1 > 6 { Mishap::Answer("403 Forbidden".to_owned()) } else { Mishap::None }
    });
    convert(dir, &["-f", "raw"], &proxy.url("/named")).ok();
    assert!(flat(dir) == content);
    assert!(uses.lock().unwrap().0 > 1, "it was looked up again");
    for (path, word) in [("/loop", "10 redirects"), ("/ftp", "scheme"), ("/nowhere", "redirect")] {
        let proxy = WebProxy::start(server.port(), |_, head| match head {
            _ if head.starts_with("GET /ftp") => {
                Mishap::Answer("302 Found\r\nLocation: ftp://127.0.0.1/x".to_owned())
            }
            _ if head.starts_with("GET /nowhere") => Mishap::Answer("302 Found".to_owned()),
            _ => Mishap::None,
        });
        let out = zebu(dir, ["info", "-f", "raw", &proxy.url(path)]).exits(1);
        assert!(out.stderr.contains(word) || out.stderr.contains("302"), "{path}: {out}");
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
    }
}

#[test]
fn an_image_leads_to_a_web_server_only_if_the_user_says_so() {
    let scratch = Scratch::new("http-refs");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start(dir);
    let proxy = WebProxy::start(server.port(), |_, _| Mishap::None);
    let base = proxy.url("/disk.raw");
    // Named on the command line it is opened, and its size is taken.
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", "top.qcow2"]).ok();
    let info = zebu(dir, ["info", "top.qcow2"]).ok().stdout;
    assert!(info.contains("24 MiB") && info.contains(&base), "{info}");
    let before = proxy.connections();
    let other = server.url("/");
    for options in [
        &[][..],
        &["--allow-refs", "local"],
        &["--allow-refs", "dir=/"],
        &["--allow-refs", &format!("prefix={other}")],
        &["--allow-refs", "prefix=http://127.0.0.1"],
    ] {
        let out = convert(dir, options, "top.qcow2").exits(1);
        assert!(out.stderr.contains("--allow-refs prefix=URL"), "{out}");
    }
    zebu(dir, ["check", "top.qcow2"]).ok();
    assert_eq!(proxy.connections(), before, "nobody connected");
    for options in [&["--allow-refs", "all"][..], &["--allow-refs", &format!("prefix={}", proxy.url("/"))]] {
        convert(dir, options, "top.qcow2").ok();
        assert!(flat(dir) == content);
    }
    // An overlay on a server, whose backing file is beside it.
    let line =
        ["create", "-q", "-u", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", "www/top.qcow2", "24M"];
    zebu(dir, line).ok();
    let top = proxy.url("/top.qcow2");
    assert!(convert(dir, &[], &top).exits(1).stderr.contains("--allow-refs"));
    convert(dir, &["--allow-refs", &format!("prefix={}", proxy.url("/"))], &top).ok();
    assert!(flat(dir) == content);
    // The base of a new image, of which only the difference is written.
    zebu(dir, ["convert", "-O", "qcow2", "-B", &base, "-F", "raw", "www/disk.qcow2", "diff.qcow2"]).ok();
    convert(dir, &["--allow-refs", "all"], "diff.qcow2").ok();
    assert!(flat(dir) == content);
    let options = format!(
        "driver=qcow2,file.filename=top.qcow2,backing.driver=raw,backing.file.driver=http,backing.file.url={base}"
    );
    convert(dir, &["--image-opts"], &options).ok();
    assert!(flat(dir) == content);
}

/// Runs the test of the name `name` again, in a network of its own that has a public and a private address.
fn in_own_network(name: &str) -> bool {
    if std::env::var_os("ZEBU_OWN_NETWORK").is_some() {
        return true;
    }
    let this = std::env::current_exe().unwrap();
    let script = "ip link set lo up && ip address add 9.9.9.9/32 dev lo && exec \"$@\"";
    let mut command = Command::new(find("unshare").expect("unshare is missing: it is in util-linux"));
    // Below another root directory the system gives no user namespace. Root needs none.
    command.args((!rustix::process::geteuid().is_root()).then_some("-r"));
    command.args(["-n", "sh", "-e", "-c", script, "sh"]).arg(this);
    command.args(["--exact", name, "--nocapture"]).env("ZEBU_OWN_NETWORK", "1");
    let ran = finish(command).ok().stdout;
    assert!(ran.contains("1 passed"), "no test has the name {name}: {ran}");
    false
}

#[test]
fn a_redirect_from_a_public_to_a_private_address_is_refused() {
    if !in_own_network("remote_http::redirects::a_redirect_from_a_public_to_a_private_address_is_refused") {
        return;
    }
    let scratch = Scratch::new("http-private");
    let dir = scratch.path();
    let content = source(dir);
    let server = WebServer::start_with(
        dir,
        "listen 9.9.9.9:80; location /inside { return 302 http://127.0.0.1:$server_port/disk.raw; }\n\
         location /alias { return 302 http://localhost/disk.raw; }\n\
         location /own { return 302 http://9.9.9.9/disk.raw; }",
    );
    let inside = server.url("/disk.raw");
    let redirect = |path: &str, options: &[&str]| {
        let mut words = vec!["-f", "raw"];
        words.extend(options);
        convert(dir, &words, &format!("http://9.9.9.9{path}"))
    };
    redirect("/own", &[]).ok();
    assert!(flat(dir) == content);
    for path in ["/inside", "/alias"] {
        let before = server.whole_log().lines().filter(|line| line.contains("/disk.raw")).count();
        let out = redirect(path, &[]).exits(1);
        assert!(out.stderr.contains("private") && out.stderr.contains("--redirects any"), "{out}");
        let after = server.whole_log().lines().filter(|line| line.contains("/disk.raw")).count();
        assert_eq!(before, after, "nobody asked there");
    }
    // One that is named is opened wherever it is, and may lead to others like it.
    convert(dir, &["-f", "raw"], &inside).ok();
    convert(dir, &["-f", "raw"], &server.url("/own")).ok();
    assert!(flat(dir) == content);
}
