//! NBD over TLS with QEMU's objects: pre-shared keys and rules on clients, between zebu and qemu-nbd, nbdkit, libnbd.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use zebu_tests::both_programs::{both, image_options, install_names, run, serve};
use zebu_tests::certificates::certificates;
use zebu_tests::foreign_server::ForeignServer;
use zebu_tests::program::{Finished, finish, required, run_in, zebu};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;

/// Two users, as psktool writes them.
const KEYS: &str = "qemu:c24e0aa5d3f8b6ad26a0d1c5a1c0e0b09f3c5be80ad1d30c76a1f3c5d4f2e1a0\n\
                    alice:0f1e2d3c4b5a69788796a5b4c3d2e1f0\n";
/// The same users with other keys.
const WRONG_KEYS: &str = "qemu:00112233445566778899aabbccddeeff\nalice:ffeeddccbbaa99887766554433221100\n";

/// Directories `right` and `wrong` with keys, a disk, and zebu under QEMU's names.
fn prepare(dir: &Path) -> Vec<u8> {
    for (name, keys) in [("right", KEYS), ("wrong", WRONG_KEYS)] {
        fs::create_dir(dir.join(name)).unwrap();
        let file = dir.join(name).join("keys.psk");
        fs::write(&file, keys).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    let content: Vec<u8> = (0..2u32 << 20).flat_map(u32::to_le_bytes).collect();
    fs::write(dir.join("source.raw"), &content).unwrap();
    install_names(dir);
    content
}

fn client_object(keys: &str, user: &str) -> String {
    format!("--object tls-creds-psk,id=t,endpoint=client,dir={keys},username={user}")
}

#[test]
fn both_ends_of_qemu_nbd_share_keys() {
    let scratch = Scratch::new("psk");
    let dir = scratch.path();
    let content = prepare(dir);
    for server_program in both(dir, "qemu-nbd") {
        fs::write(dir.join("disk.raw"), vec![0; content.len()]).unwrap();
        // qemu-nbd changes to the root directory, and reads the file of keys for each client.
        let options = format!(
            "--object tls-creds-psk,id=s,endpoint=server,dir={}/right --tls-creds s --shared=8 -f raw disk.raw",
            dir.display()
        );
        let server = serve(dir, &server_program, &options);
        let target = image_options(server.socket());
        for img in both(dir, "qemu-img") {
            for user in ["qemu", "alice"] {
                let line = format!("info {} {target}", client_object("right", user));
                run(dir, &img, &line).ok();
                for (keys, user) in [("wrong", user), ("right", "bob")] {
                    let out =
                        run(dir, &img, &format!("info {} {target}", client_object(keys, user))).exits(1);
                    assert_eq!(out.stderr.lines().count(), 1, "{out}");
                }
            }
            let without = format!("info -f raw nbd:unix:{}", server.socket().display());
            run(dir, &img, &without).exits(1);
        }
        // Each of zebu's programs writes and reads.
        let [_, img] = both(dir, "qemu-img");
        let options = target.replace("--image-opts", "--target-image-opts");
        run(
            dir,
            &img,
            &format!("convert {} -n -f raw source.raw {options}", client_object("right", "alice")),
        )
        .ok();
        assert!(fs::read(dir.join("disk.raw")).unwrap() == content);
        let uri = format!(
            "nbds+unix://alice@/?socket={}&tls-psk-file={}/right/keys.psk",
            server.socket().display(),
            dir.display()
        );
        zebu(dir, ["compare", "-f", "raw", "-F", "raw", &uri, "source.raw"]).ok();
        let [_, io] = both(dir, "qemu-io");
        let line = format!("{} {target} -c read", client_object("right", "qemu"));
        let mut words: Vec<&str> = line.split_whitespace().collect();
        *words.last_mut().unwrap() = "read -P 1 4 1";
        run_in(dir, &io, words).ok();
    }
}

#[test]
fn other_programs_share_keys() {
    let scratch = Scratch::new("psk-others");
    let dir = scratch.path();
    let content = prepare(dir);
    fs::write(dir.join("disk.raw"), vec![0; content.len()]).unwrap();
    let options = "--tls=require --tls-psk=right/keys.psk file disk.raw";
    let theirs = ForeignServer::nbdkit(dir, options);
    let uri = |socket: &Path, keys: &str, user: &str| {
        let (socket, here) = (socket.display(), dir.display());
        format!("nbds+unix://{user}/?socket={socket}&tls-psk-file={here}/{keys}/keys.psk")
    };
    let right = uri(theirs.socket(), "right", "alice@");
    zebu(dir, ["convert", "-n", "-f", "raw", "-O", "raw", "source.raw", &right]).ok();
    zebu(dir, ["compare", "-f", "raw", "-F", "raw", &right, "source.raw"]).ok();
    assert!(fs::read(dir.join("disk.raw")).unwrap() == content);
    for wrong in [uri(theirs.socket(), "wrong", "alice@"), uri(theirs.socket(), "right", "bob@")] {
        let out = zebu(dir, ["info", "-f", "raw", &wrong]).exits(1);
        assert_eq!(out.stderr.lines().count(), 1, "{out}");
    }
    drop(theirs);

    let ours = Server::start(dir, "--queues 2 --tls-psk-file right/keys.psk -f raw disk.raw");
    let nbd = |program: &str, args: &[&str]| run_in(dir, &required(program), args);
    for user in ["alice@", "qemu@"] {
        let right = uri(ours.socket(), "right", user);
        assert!(nbd("nbdinfo", &[&right]).ok().stdout.contains("with TLS"));
        nbd("nbdcopy", &[&right, "back.raw"]).ok();
        assert!(fs::read(dir.join("back.raw")).unwrap() == content);
        zebu(dir, ["compare", "-f", "raw", "-F", "raw", &right, "source.raw"]).ok();
        nbd("nbdinfo", &["--size", &uri(ours.socket(), "wrong", user)]).exits(1);
    }
    nbd("nbdinfo", &["--size", &uri(ours.socket(), "right", "bob@")]).exits(1);
    nbd("nbdinfo", &["--size", &ours.uri("")]).exits(1);
    assert!(ours.stop_with_messages().contains("is sent away: TLS: "));
}

/// A connection that only closes is an error in the server's log.
#[test]
fn commands_say_goodbye_to_servers() {
    let scratch = Scratch::new("psk-goodbye");
    let dir = scratch.path();
    prepare(dir);
    for tls in ["", "--tls=require --tls-psk=right/keys.psk"] {
        let socket = dir.join("nbdkit.sock");
        let mut command = Command::new(required("nbdkit"));
        command.args(["-v", "-f", "-U"]).arg(&socket).args(tls.split_whitespace());
        command.args(["-r", "file", "source.raw"]).current_dir(dir);
        command.stderr(fs::File::create(dir.join("log")).unwrap());
        let server = ForeignServer::spawn(command, socket);
        let uri = if tls.is_empty() {
            server.uri()
        } else {
            let (socket, here) = (server.socket().display(), dir.display());
            format!("nbds+unix://alice@/?socket={socket}&tls-psk-file={here}/right/keys.psk")
        };
        zebu(dir, ["convert", "-f", "raw", "-O", "raw", &uri, "copy.raw"]).ok();
        zebu(dir, ["compare", "-f", "raw", "-F", "raw", &uri, "copy.raw"]).ok();
        // A command that fails, too.
        zebu(dir, ["info", "-f", "qcow2", &uri]).exits(1);
        drop(server);
        let log = fs::read_to_string(dir.join("log")).unwrap();
        assert!(log.matches("client sent NBD_CMD_DISC").count() >= 3, "{log}");
        let errors: Vec<&str> = log.lines().filter(|line| line.contains("error:")).collect();
        // The look whether it listens, and further connections that were not ready when a command was done.
        let early = ["handshake", "reading option", "write: NBD_OPT_"];
        let is_early = |line: &&str| early.iter().any(|words| line.contains(words));
        assert!(errors.iter().all(is_early), "{errors:?}");
    }
}

/// The user is named by the URI, else by the environment, as in libnbd.
#[test]
fn the_environment_names_the_user_that_the_uri_does_not() {
    let scratch = Scratch::new("psk-user");
    let dir = scratch.path();
    prepare(dir);
    let server = ForeignServer::nbdkit(dir, "--tls=require --tls-psk=right/keys.psk -r file source.raw");
    let uri = format!(
        "nbds+unix:///?socket={}&tls-psk-file={}/right/keys.psk",
        server.socket().display(),
        dir.display()
    );
    for (user, code) in [("alice", 0), ("bob", 1)] {
        let mut command = Command::new(zebu_tests::program::zebu_program());
        command.args(["info", "-f", "raw", &uri]).env("LOGNAME", user).env("USER", user).current_dir(dir);
        finish(command).exits(code);
    }
}

#[test]
fn lists_of_exports_come_over_tls() {
    let scratch = Scratch::new("psk-list");
    let dir = scratch.path();
    prepare(dir);
    certificates(dir);
    for server_program in both(dir, "qemu-nbd") {
        for (server, client, hostname) in [
            (
                "tls-creds-psk,id=t,endpoint=server,dir=right",
                "tls-creds-psk,id=t,endpoint=client,dir=right",
                "",
            ),
            (
                "tls-creds-x509,id=t,endpoint=server",
                "tls-creds-x509,id=t,endpoint=client,dir=.",
                "--tls-hostname localhost",
            ),
        ] {
            let credentials = if hostname.is_empty() { "right" } else { "" };
            let options = format!(
                "--object {server},dir={}/{credentials} --tls-creds t --shared=4 -r -x disk -D words -f raw source.raw",
                dir.display()
            );
            let server = serve(dir, &server_program, &options);
            let list =
                format!("-L -k {} --object {client} --tls-creds t {hostname}", server.socket().display());
            let lists = both(dir, "qemu-nbd").map(|nbd| run(dir, &nbd, &list).ok());
            assert!(lists[0].stdout.contains("export: 'disk'"), "{}", lists[0]);
            assert_eq!(lists[0].stdout, lists[1].stdout);
            for wrong in [
                format!("-L -k {}", server.socket().display()),
                list.replace("dir=right", "dir=wrong").replace("localhost", "other"),
            ] {
                for nbd in both(dir, "qemu-nbd") {
                    run(dir, &nbd, &wrong).exits(1);
                }
            }
        }
    }
}

/// The same words as QEMU's, on every line that contradicts itself.
#[test]
fn what_does_not_fit_together_is_refused_as_by_qemu() {
    let scratch = Scratch::new("psk-refused");
    let dir = scratch.path();
    prepare(dir);
    let server = "--object tls-creds-psk,id=t,endpoint=server,dir=right";
    for line in [
        format!("{server} --tls-authz a -k /nowhere/s -f raw source.raw"),
        format!("{server} --tls-hostname h -k /nowhere/s -f raw source.raw"),
        format!("{server} --tls-creds t --tls-hostname h -k /nowhere/s -f raw source.raw"),
        format!("{server} --tls-creds t -L -k /nowhere/s"),
        format!("{server} --tls-creds u -k /nowhere/s -f raw source.raw"),
        "--object tls-creds-psk,id=t,dir=right --tls-creds t -k /nowhere/s -f raw source.raw".to_owned(),
        format!("{} --tls-creds t --tls-authz a -L -k /nowhere/s", client_object("right", "qemu")),
    ] {
        let [theirs, ours] = both(dir, "qemu-nbd").map(|nbd| run(dir, &nbd, &line).exits(1).stderr);
        let text = |said: &str| said.lines().next().unwrap_or_default().to_owned();
        assert_eq!(text(&ours), text(&theirs), "{line}");
    }
    let nowhere = "--object tls-creds-psk,id=t,endpoint=server,dir=nowhere --tls-creds t -k /nowhere/s -f raw source.raw";
    for nbd in both(dir, "qemu-nbd") {
        assert!(run(dir, &nbd, nowhere).exits(1).stderr.contains("nowhere"));
    }
    for (keys, reason) in [("alice", "line 1"), ("alice:xyz", "line 1"), ("", "no key")] {
        fs::write(dir.join("wrong/keys.psk"), keys).unwrap();
        let out = zebu(
            dir,
            ["serve", "--nbd", "unix:s", "--tls-psk-file", "wrong/keys.psk", "-f", "raw", "source.raw"],
        )
        .exits(1);
        assert!(out.stderr.contains("wrong/keys.psk") && out.stderr.contains(reason), "{keys:?}: {out}");
    }
}

/// The first line that a program says on standard error, without its name.
fn first_line(finished: &Finished) -> String {
    let line = finished.stderr.lines().next().unwrap_or_default();
    line.split_once(": ").map_or(line, |(_, said)| said).to_owned()
}

/// A line that is enough for each program, but for the objects.
const LINES: [(&str, &str); 3] = [
    ("qemu-img", "info -f raw source.raw"),
    ("qemu-io", "-r -f raw -c length source.raw"),
    ("qemu-nbd", "-r -f raw -k /nowhere/s source.raw"),
];

/// Though no option names them.
#[test]
fn objects_that_can_not_be_are_refused_as_by_qemu() {
    let scratch = Scratch::new("objects-refused");
    let dir = scratch.path();
    prepare(dir);
    certificates(dir);
    fs::create_dir(dir.join("empty")).unwrap();
    for objects in [
        "secret,id=a,data=x authz-simple,id=a,identity=x",
        "tls-creds-psk,id=a,dir=right authz-list,id=a,policy=allow",
        "secret,id=1a,data=x",
        "authz-simple,id=a/b,identity=x",
        "data=x,id=a",
        "{'id':'a'}",
        "{'qom-type':'authz-simple','id':'a','identity':true}",
        "authz-simple,id=a",
        "authz-simple,id=a,identity=x,other=y",
        "tls-creds-psk,id=a",
        "tls-creds-psk,id=a,dir=nowhere",
        "tls-creds-psk,id=a,dir=right,endpoint=server,username=alice",
        "tls-creds-x509,id=a,dir=",
        "tls-creds-x509,id=a,dir=empty",
        "tls-creds-x509,id=a,dir=empty,endpoint=server",
        "secret,id=a",
    ] {
        let objects = format!("--object {} ", objects.replace(' ', " --object "));
        for (program, line) in LINES {
            let line = if program == "qemu-img" {
                line.replacen("info ", &format!("info {objects}"), 1)
            } else {
                format!("{objects}{line}")
            };
            let [theirs, ours] =
                both(dir, program).map(|program| first_line(&run(dir, &program, &line).exits(1)));
            assert!(ours.starts_with(&theirs), "{program} {line}: {ours:?}, {theirs:?}");
        }
    }
}

#[test]
fn objects_have_every_form_that_qemu_takes() {
    let scratch = Scratch::new("objects");
    let dir = scratch.path();
    prepare(dir);
    for object in [
        "id=a,dir=right,qom-type=tls-creds-psk",
        "{'qom-type':'tls-creds-psk','id':'a','dir':'right','verify-peer':true}",
        "data=hunter2,id=a,qom-type=secret",
        "{\"qom-type\":\"secret\",\"id\":\"a\",\"data\":\"hunter2\"}",
        "authz-simple,id=a,identity=x",
        "{'qom-type':'authz-list','id':'a','rules':[{'match':'x','policy':'deny','format':'glob'}]}",
    ] {
        for program in both(dir, "qemu-img") {
            run(dir, &program, &format!("info --object {object} -f raw source.raw")).ok();
        }
    }
    for (program, _) in LINES {
        for (help, part) in
            [("help", "  tls-creds-psk\n"), ("secret,help", "secret options:\n  data=<string>\n")]
        {
            let command = if program == "qemu-img" { "info " } else { "" };
            for program in both(dir, program) {
                let out = run(dir, &program, &format!("{command}--object {help}")).ok();
                assert!(out.stdout.contains(part), "{out}");
            }
        }
    }
    for object in ["secretdata=hunter2,id=k", "{'data':'hunter2','id':'k'}", "secret,id=k,data=a,hunter2"] {
        let out =
            run(dir, &dir.join("names/qemu-img"), &format!("info --object {object} source.raw")).exits(1);
        assert!(!out.stderr.contains("hunter2"), "{out}");
    }
}

#[test]
fn an_image_that_is_served_may_be_on_another_server_over_tls() {
    let scratch = Scratch::new("psk-chain");
    let dir = scratch.path();
    prepare(dir);
    certificates(dir);
    let here = dir.display();
    let [theirs, _] = both(dir, "qemu-nbd");
    let lower = dir.join("lower.sock");
    let mut command = Command::new(&theirs);
    let options = format!("--object tls-creds-x509,id=s,endpoint=server,dir={here} --tls-creds s -r -f raw");
    command.args(["-t", "--shared=8", "-k"]).arg(&lower).args(options.split(' ')).arg("source.raw");
    command.current_dir(dir);
    let lower = ForeignServer::spawn(command, lower);
    for program in both(dir, "qemu-nbd") {
        // The last of two names counts.
        let target = image_options(lower.socket()).replace("tls-creds=t", "tls-creds=s,file.tls-creds=t");
        let objects = format!(
            "--object tls-creds-psk,id=s,endpoint=server,dir={here}/right --object tls-creds-x509,id=t,endpoint=client,dir={here}"
        );
        let options = format!("{objects} --tls-creds s -r --shared=4 {target},file.tls-hostname=localhost");
        let upper = serve(dir, &program, &options);
        let uri = format!(
            "nbds+unix://alice@/?socket={}&tls-psk-file={here}/right/keys.psk",
            upper.socket().display()
        );
        zebu(dir, ["compare", "-f", "raw", "-F", "raw", &uri, "source.raw"]).ok();
        drop(upper);
        // A Unix socket has no name of a host that the certificate could have.
        let without = run(dir, &program, &format!("{objects} -r -k {here}/other.sock {target}")).exits(1);
        let list = format!("-L -k {} {objects} --tls-creds t", lower.socket().display());
        for out in [without, run(dir, &program, &list).exits(1)] {
            assert!(out.stderr.contains("No hostname for certificate validation"), "{out}");
        }
        let plain = run(dir, &program, &format!("-L -k {}", lower.socket().display())).exits(1);
        assert!(plain.stderr.contains("TLS negotiation required before option 3 (list)"), "{plain}");
    }
}
