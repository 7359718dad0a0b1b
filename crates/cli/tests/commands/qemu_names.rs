//! The binary under the names of QEMU's programs, beside those programs.

use crate::common::{Ran, qemu, wait_for, wait_for_listener};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory with links of QEMU's names to the binary.
struct Names(tempfile::TempDir);

impl Names {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path()).ok();
        Self(dir)
    }

    fn dir(&self) -> PathBuf {
        let dir = self.0.path().join("work");
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Runs `line` with the links in place of QEMU's programs.
    fn run(&self, line: &str) -> Ran {
        let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
        run(self.0.path().join(program).as_os_str(), rest, &self.dir())
    }
}

fn run(program: &OsStr, line: &str, dir: &Path) -> Ran {
    let output = Command::new(program)
        .args(words(line))
        .current_dir(dir)
        .env_remove("ZEBU_ALLOW_REFS")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn install(dir: &Path) -> Ran {
    let line = format!("install-names '{}'", dir.display());
    run(OsStr::new(env!("CARGO_BIN_EXE_zebu")), &line, Path::new("/"))
}

#[test]
fn links_are_made_once_and_nothing_else_is_replaced() {
    let names = Names::new();
    install(names.0.path()).ok();
    let link = names.0.path().join("qemu-img");
    std::fs::remove_file(&link).unwrap();
    std::fs::write(&link, "a program").unwrap();
    install(names.0.path()).fails_naming(1, &["qemu-img", "exists already: remove it first"]);
    assert_eq!(std::fs::read_to_string(&link).unwrap(), "a program");
    install(Path::new("/nonexistent")).fails_naming(1, &["'/nonexistent/qemu-img'"]);
}

/// The words of a line; what stands between single quotes is one.
fn words(line: &str) -> Vec<String> {
    line.split('\'')
        .enumerate()
        .flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

#[test]
fn scripts_find_the_version_that_they_look_for() {
    let names = Names::new();
    for (program, option) in
        [("qemu-img", "--version"), ("qemu-img", "-V"), ("qemu-io", "--version"), ("qemu-nbd", "-V")]
    {
        let ran = names.run(&format!("{program} {option}")).ok();
        assert!(ran.stdout.starts_with(&format!("{program} version 10.2.2 (zebu ")), "{ran:?}");
    }
    let help = names.run("qemu-img --help").ok().stdout;
    let formats = help.lines().skip_while(|line| *line != "Supported image formats:").skip(2);
    assert!(formats.clone().any(|line| line.starts_with("  ") && line.contains(" qcow2")), "{help}");
}

/// Command lines that both programs take or refuse alike, with the first line of what they say when they fail.
const LINES: &[&str] = &[
    "qemu-img create -q -f qcow2 -f raw -f qcow2 a.qcow2 8M",
    "qemu-img create -q -f qcow2 -o compat=1.1,lazy_refcounts lazy.qcow2 8M",
    "qemu-io -f qcow2 -c 'write -P 7 0 1M' -c 'read -P 7 0 1M' -c quit a.qcow2",
    "qemu-img convert -p -p -t writeback -T none -t none -O raw -O qcow2 a.qcow2 b.qcow2",
    "qemu-img compare -q -q a.qcow2 b.qcow2",
    "qemu-img -T qcow2_* info --out=json -U -U a.qcow2",
    "qemu-img check a.qcow2 -q -f qcow2",
    "qemu-img -- info a.qcow2",
    "qemu-img create -q -f qcow2 x/over.qcow2 -b ../a.qcow2 -F qcow2",
    "qemu-img map --output=json x/over.qcow2",
    "qemu-io -r -f qcow2 -c 'read -P 7 0 64k' x/over.qcow2",
    "qemu-img",
    "qemu-img nosuch",
    "qemu-img create --nosuch a",
    "qemu-img create -x a",
    "qemu-img create",
    "qemu-img info a b",
    "qemu-img compare a",
    "qemu-img info --output",
    "qemu-img info nosuch.qcow2",
    "qemu-io -r -f qcow2 -c 'write 0 4k' a.qcow2",
    "qemu-io -r -f qcow2 -c nosuch a.qcow2",
];

#[test]
fn command_lines_end_as_with_qemu() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dirs = [names.dir(), names.0.path().join("qemu")];
    for dir in &dirs {
        std::fs::create_dir_all(dir.join("x")).unwrap();
    }
    for line in LINES {
        let ours = names.run(line);
        let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
        let theirs = run(OsStr::new(program), rest, &dirs[1]);
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
        if theirs.code != Some(0) {
            assert_eq!(ours.stderr.lines().next(), theirs.stderr.lines().next(), "{line}");
        }
    }
}

/// Command lines whose formats are drivers: each belongs to the image whose option named it. `n.sock` is a server's socket in
/// the same directory.
const DRIVERS: &[&str] = &[
    "qemu-img create -q -f raw n.raw 1M",
    "qemu-img create -q -f raw z.raw 1M",
    "qemu-img convert -f nbd -O qcow2 nbd:unix:n.sock n.qcow2",
    "qemu-img convert -f null-co -O qcow2 null-co:// q.qcow2",
    "qemu-img compare -f raw -F nbd n.raw nbd:unix:n.sock",
    "qemu-img compare -f raw -F nbd n.raw nbd+unix:///?socket=n.sock",
    "qemu-img compare -f raw -F null-co z.raw null-co://",
    "qemu-img compare -f null-co -F blkdebug null-co:// blkdebug::z.raw",
    "qemu-img convert -n -O nbd z.raw nbd:unix:n.sock",
    "qemu-img dd -f nbd if=nbd:unix:n.sock of=dd.raw",
    "qemu-img measure -f nbd -O qcow2 nbd:unix:n.sock",
    "qemu-img info -f nbd n.raw",
    "qemu-img info -f null-co n.raw",
    "qemu-img info -f null-aio null-co://",
    "qemu-img info -f nbd --image-opts driver=raw,file.filename=n.raw",
    "qemu-img convert -n -O nbd n.raw z.raw",
    "qemu-img convert -O null-co n.raw x.raw",
    "qemu-img convert -O blkdebug n.raw x.raw",
    "qemu-img dd -O null-co if=n.raw of=null-co://",
    "qemu-img commit -f nbd n.raw",
    "qemu-img amend -f nbd -o compat=v3 n.raw",
];

#[test]
fn a_driver_is_of_the_image_whose_option_named_it() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dirs = [names.dir(), names.0.path().join("qemu")];
    let mut servers = Vec::new();
    for dir in &dirs {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::File::create(dir.join("served.raw")).unwrap().set_len(1 << 20).unwrap();
        let mut server = Command::new("qemu-nbd");
        server.args(["-t", "-e", "4", "-f", "raw", "-k"]).args([dir.join("n.sock"), dir.join("served.raw")]);
        servers.push(server.spawn().unwrap());
        wait_for_listener(&dir.join("n.sock"));
    }
    for line in DRIVERS {
        let ours = names.run(line);
        let theirs = run(OsStr::new("qemu-img"), line.split_once(' ').unwrap().1, &dirs[1]);
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
        assert_eq!(ours.stderr.lines().next(), theirs.stderr.lines().next(), "{line}");
    }
    for mut server in servers {
        server.kill().unwrap();
        server.wait().unwrap();
    }
}

#[test]
fn the_prompt_is_that_of_the_name() {
    let names = Names::new();
    let ran = names.run("qemu-io").ok();
    assert!(ran.stdout.starts_with("qemu-io> "), "{ran:?}");
}

#[test]
fn the_environment_widens_what_an_image_may_name() {
    let names = Names::new();
    let dir = names.dir();
    std::fs::create_dir_all(dir.join("x")).unwrap();
    names.run("qemu-img create -q -f qcow2 a.qcow2 8M").ok();
    names.run("qemu-img create -q -f qcow2 -b ../a.qcow2 -F qcow2 x/over.qcow2").ok();
    let map = |rules: Option<String>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zebu"));
        command.args(["map", "x/over.qcow2"]).current_dir(&dir).env_remove("ZEBU_ALLOW_REFS");
        if let Some(rules) = rules {
            command.env("ZEBU_ALLOW_REFS", rules);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = map(None);
    assert_eq!(code, Some(1));
    assert!(message.contains("--allow-refs dir=") && message.contains("ZEBU_ALLOW_REFS"), "{message}");
    assert!(message.contains("/etc/zebu/refs"), "{message}");
    assert_eq!(map(Some(dir.to_string_lossy().into_owned())), (Some(0), String::new()));
    assert_eq!(map(Some(format!("local,dir={}", dir.display()))), (Some(0), String::new()));
    let (code, message) = map(Some("everything".to_owned()));
    assert_eq!(code, Some(1));
    assert!(message.contains("ZEBU_ALLOW_REFS: 'everything': expected none, local"), "{message}");
}

/// A command line of `qemu_calls.txt`.
struct Call<'a> {
    program: &'a str,
    arguments: String,
    /// Its result, if it makes or changes an image.
    image: Option<&'a str>,
}

fn calls<'a>(text: &'a str, dir: &Path) -> Vec<Call<'a>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (_, call) = line.split_once(": ").unwrap();
            let (call, image) =
                call.split_once(" => ").map_or((call, None), |(call, image)| (call, Some(image)));
            let (program, arguments) = call.split_once(' ').unwrap_or((call, ""));
            Call { program, arguments: arguments.replace("$PWD", dir.to_str().unwrap()), image }
        })
        .collect()
}

/// The JSON of a report, without what chance decides or how the file system keeps a file, and without where its end lies.
fn report(stdout: &str) -> serde_json::Value {
    fn leave_out(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Object(members) => {
                let by_chance = [
                    "actual-size",
                    "image-end-offset",
                    "offset",
                    "fragmented-clusters",
                    "date-sec",
                    "date-nsec",
                    "cid",
                ];
                for key in by_chance.into_iter().chain(["children"]) {
                    members.remove(key);
                }
                // The directories differ.
                for key in ["filename", "full-backing-filename", "backing-filename"] {
                    if let Some(name) = members.get_mut(key) {
                        let text = name.as_str().unwrap_or_default();
                        *name = text.rsplit('/').next().unwrap_or_default().into();
                    }
                }
                members.values_mut().for_each(leave_out);
            }
            serde_json::Value::Array(items) => items.iter_mut().for_each(leave_out),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(stdout).unwrap_or_default();
    leave_out(&mut value);
    value
}

#[test]
fn callers_get_what_they_get_from_qemu() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dirs = [names.dir(), names.0.path().join("qemu")];
    for dir in &dirs {
        for below in ["images", "instances", "100"] {
            std::fs::create_dir_all(dir.join(below)).unwrap();
        }
    }
    let text = include_str!("qemu_calls.txt");
    let mut differences = Vec::new();
    for (ours, theirs) in calls(text, &dirs[0]).iter().zip(calls(text, &dirs[1])) {
        let line = format!("{} {}", ours.program, ours.arguments);
        let program = names.0.path().join(ours.program);
        let mine = run(program.as_os_str(), &ours.arguments, &dirs[0]);
        let expected = run(OsStr::new(theirs.program), &theirs.arguments, &dirs[1]);
        if mine.code != expected.code {
            differences.push(format!("{line}: {mine:#?} {expected:#?}"));
            continue;
        }
        if line.contains("--out") && report(&mine.stdout) != report(&expected.stdout) {
            differences.push(format!("{line}: {}\n{}", mine.stdout, expected.stdout));
        }
        if let Some(image) = ours.image {
            let pair = dirs.each_ref().map(|dir| format!("'{}'", dir.join(image).display())).join(" ");
            let compared = run(OsStr::new("qemu-img"), &format!("compare {pair}"), &dirs[1]);
            if compared.code != Some(0) {
                differences.push(format!("{line}: the disks of {image} differ: {compared:#?}"));
            }
        }
    }
    assert!(differences.is_empty(), "{} lines differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn a_backing_file_that_is_described_is_told_of_as_a_file() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dir = names.dir();
    names.run("qemu-img create -q -f qcow2 base.qcow2 8M").ok();
    names.run("qemu-io -f qcow2 -c 'write 0 1M' base.qcow2").ok();
    let description = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"base.qcow2"}}"#;
    names.run(&format!("qemu-img create -q -u -f qcow2 -b '{description}' -F qcow2 top.qcow2 8M")).ok();
    for line in
        ["info --backing-chain top.qcow2", "info --backing-chain --output=json top.qcow2", "map top.qcow2"]
    {
        let told = |program: &Path| {
            let output = Command::new(program)
                .args(words(line))
                .current_dir(&dir)
                .env("ZEBU_ALLOW_REFS", "all")
                .output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        };
        assert_eq!(told(&names.0.path().join("qemu-img")), told(Path::new("qemu-img")), "{line}");
    }
}

/// Ends a server by its number when the test ends, if it has not ended.
struct Ended(PathBuf);

impl Drop for Ended {
    fn drop(&mut self) {
        if let Ok(number) = std::fs::read_to_string(&self.0) {
            let _ = Command::new("kill").arg(number.trim()).status();
        }
    }
}

#[test]
fn qemu_nbd_serves_in_the_background_and_lists_what_it_serves() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dir = names.dir();
    names.run("qemu-img create -q -f qcow2 a.qcow2 1M").ok();
    let (socket, number) = (dir.join("socket"), dir.join("number"));
    let _ended = Ended(number.clone());
    let serve = format!(
        "qemu-nbd -t --fork --pid-file={} -k {} -x name -D text -f qcow2 a.qcow2",
        number.display(),
        socket.display()
    );
    let ran = names.run(&serve).ok();
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), ("", ""));
    let list = format!("-L -k {}", socket.display());
    let ours = names.run(&format!("qemu-nbd {list}")).ok();
    assert_eq!(ours, run(OsStr::new("qemu-nbd"), &list, &dir).ok());
    let uri = format!("nbd+unix:///name?socket={}", socket.display());
    run(OsStr::new("qemu-io"), &format!("-f raw -c 'write -P 5 0 64k' {uri}"), &dir).ok();
    let process = std::fs::read_to_string(&number).unwrap();
    assert!(Command::new("kill").arg(process.trim()).status().unwrap().success());
    // It has ended as well where nobody has asked for its exit code yet.
    let runs = || {
        let state = std::fs::read_to_string(Path::new("/proc").join(process.trim()).join("stat"));
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    wait_for("the server to end", || !runs());
    std::fs::remove_file(&number).unwrap();
    assert!(!socket.exists());
    names.run("qemu-io -f qcow2 -c 'read -P 5 0 64k' a.qcow2").ok();
}

/// The server in the background reads its key where its caller's standard input is, as QEMU's does.
#[test]
fn qemu_nbd_in_the_background_takes_a_key_from_standard_input() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dir = names.dir();
    let secret = "--object secret,id=key,data=first";
    let options = "-o encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    names.run(&format!("qemu-img create -q -f qcow2 {secret} {options} a.qcow2 1M")).ok();
    let _ended = Ended(dir.join("number"));
    let mut server = Command::new(names.0.path().join("qemu-nbd"))
        .args(["-t", "--fork", "--object", "secret,id=key,file=/dev/stdin", "--image-opts"])
        .arg("driver=qcow2,encrypt.key-secret=key,file.filename=a.qcow2")
        .args(["--pid-file", "number", "-k"])
        .arg(dir.join("socket"))
        .current_dir(&dir)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut server.stdin.take().unwrap(), b"first").unwrap();
    assert!(server.wait().unwrap().success());
    let uri = format!("nbd+unix:///?socket={}", dir.join("socket").display());
    run(OsStr::new("qemu-io"), &format!("-f raw -c 'write -P 5 0 64k' {uri}"), &dir).ok();
}

/// Serves `a.raw` until a client has run `commands`.
fn serve_raw_once(names: &Names, options: &[&str], commands: &str) {
    let dir = names.dir();
    let socket = dir.join("socket");
    let mut server = Command::new(names.0.path().join("qemu-nbd"))
        .args(options)
        .args(["-f", "raw", "a.raw", "-k"])
        .arg(&socket)
        .current_dir(&dir)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_listener(&socket);
    let client = format!("-f raw -d unmap {commands} nbd+unix:///?socket={}", socket.display());
    run(OsStr::new("qemu-io"), &client, &dir).ok();
    assert_eq!(server.wait().unwrap().code(), Some(0));
}

#[test]
fn qemu_nbd_ends_with_its_last_client_and_keeps_the_image_with_a_temporary_overlay() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    names.run("qemu-img create -q -f raw a.raw 1M").ok();
    serve_raw_once(&names, &["-s"], "-c 'write -P 5 0 64k' -c 'read -P 5 0 64k'");
    assert_eq!(std::fs::read(names.dir().join("a.raw")).unwrap(), vec![0; 1 << 20]);
}

#[test]
fn qemu_nbd_serves_the_socket_that_was_passed_on() {
    if !qemu() || Command::new("systemd-socket-activate").arg("--version").output().is_err() {
        eprintln!("skipped: there is no systemd-socket-activate");
        return;
    }
    let names = Names::new();
    names.run("qemu-img create -q -f raw a.raw 1M").ok();
    let dir = names.dir();
    let program = names.0.path().join("qemu-nbd");
    for (number, options) in
        [&[][..], &["-k", "/s"], &["-p", "1"], &["-b", "h"], &["--fork"]].iter().enumerate()
    {
        let socket = dir.join(format!("socket{number}"));
        let mut server = Command::new("systemd-socket-activate")
            .arg("-l")
            .arg(&socket)
            .arg(&program)
            .args(*options)
            .args(["-f", "raw", "a.raw"])
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if options.is_empty() {
            wait_for_listener(&socket);
            let client = format!("-f raw -c 'write -P 5 0 64k' nbd+unix:///?socket={}", socket.display());
            run(OsStr::new("qemu-io"), &client, &dir).ok();
        } else {
            wait_for("a connection", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
        }
        assert_eq!(server.wait().unwrap().code(), Some(i32::from(!options.is_empty())), "{options:?}");
    }
    assert_eq!(std::fs::read(dir.join("a.raw")).unwrap()[..64 << 10], vec![5; 64 << 10]);
}

#[test]
fn qemu_nbd_gives_space_back_only_where_it_is_told_to() {
    use std::os::unix::fs::MetadataExt;
    if !qemu() {
        return;
    }
    let names = Names::new();
    let image = names.dir().join("a.raw");
    for (options, commands, is_smaller) in [
        (&[][..], "-c 'discard 0 512k'", false),
        (&["--discard=unmap"], "-c 'discard 0 512k'", true),
        (&["--discard=unmap"], "-c 'write -P 0 0 512k'", false),
        (&["--discard=unmap", "--detect-zeroes=unmap"], "-c 'write -P 0 0 512k'", true),
    ] {
        std::fs::write(&image, vec![7; 1 << 20]).unwrap();
        std::fs::File::open(&image).unwrap().sync_all().unwrap();
        let before = image.metadata().unwrap().blocks();
        serve_raw_once(&names, options, commands);
        std::fs::File::open(&image).unwrap().sync_all().unwrap();
        let after = image.metadata().unwrap().blocks();
        assert_eq!(after < before, is_smaller, "{options:?} {commands}: {before} {after}");
    }
}

/// Services limit memory, processor time and descriptors of the programs that they call.
#[test]
fn programs_run_within_the_limits_of_services() {
    let names = Names::new();
    let limited = |limits: &str, line: &str| {
        run(OsStr::new("prlimit"), &format!("{limits} -- {}/{line}", names.0.path().display()), &names.dir())
    };
    let limits =
        ["--as=1073741824 --cpu=30", "--nofile=64", "--nofile=32 --memlock=0", "--stack=65536", "--nproc=1"];
    for limits in limits {
        for line in [
            "qemu-img create -q -f qcow2 a.qcow2 64T",
            "qemu-io -f qcow2 -c 'write -P 1 1T 64k' a.qcow2",
            "qemu-img info --output=json a.qcow2",
            "qemu-img convert -f qcow2 -O qcow2 a.qcow2 b.qcow2",
            "qemu-img check b.qcow2",
            "qemu-img compare a.qcow2 b.qcow2",
        ] {
            let ran = limited(limits, line);
            assert_eq!(ran.code, Some(0), "{limits} {line}: {ran:#?}");
        }
    }
}

#[test]
fn programs_run_with_their_standard_descriptors_closed() {
    let names = Names::new();
    names.run("qemu-img create -q -f qcow2 a.qcow2 1M").ok();
    for line in ["convert -f qcow2 -O raw a.qcow2 b.raw", "check -q a.qcow2", "resize -q a.qcow2 2M"] {
        let script = format!("exec {}/qemu-img {line} <&- >&- 2>&-", names.0.path().display());
        let status = Command::new("sh").args(["-c", &script]).current_dir(names.dir()).status().unwrap();
        assert_eq!(status.code(), Some(0), "{line}");
    }
    assert_eq!(std::fs::read(names.dir().join("b.raw")).unwrap(), vec![0; 1 << 20]);
}

/// Has a command run where io_uring is refused, as in containers (seccomp_unotify(2), `SECCOMP_RET_ERRNO`).
fn without_uring(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    let filter = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut program = vec![filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for call in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register] {
        program.push(filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call as u32));
        program.push(filter(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    }
    program.push(filter(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW));
    let install = move || {
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
        // SAFETY: prctl(2) reads the program, which lives until it has returned.
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    // SAFETY: the child calls prctl(2) alone, which is async-signal-safe.
    unsafe { command.pre_exec(install) };
}

#[test]
fn programs_run_where_io_uring_is_refused() {
    let names = Names::new();
    names.run("qemu-img create -q -f qcow2 a.qcow2 8M").ok();
    for line in [
        "qemu-io -f qcow2 -c 'write -P 1 0 64k' a.qcow2",
        "qemu-img convert -f qcow2 -O raw a.qcow2 b.raw",
        "qemu-img compare -f qcow2 -F raw a.qcow2 b.raw",
        "qemu-io --image-opts -c 'read 0 4k' driver=qcow2,file.driver=blkdebug,file.image.filename=a.qcow2",
    ] {
        let (program, rest) = line.split_once(' ').unwrap();
        let mut command = Command::new(names.0.path().join(program));
        without_uring(command.args(words(rest)).current_dir(names.dir()));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
    }
}

/// Runs a script in a mount namespace of its own; `None` where this user may not.
fn in_mount_namespace(names: &Names, script: &str) -> Option<Ran> {
    if !Command::new("unshare").args(["-m", "true"]).output().is_ok_and(|output| output.status.success()) {
        return None;
    }
    let output = Command::new("unshare")
        .args(["-m", "sh", "-ec", script])
        .env("B", names.0.path())
        .current_dir(names.dir())
        .output()
        .unwrap();
    Some(Ran {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

#[test]
fn programs_run_without_proc() {
    let names = Names::new();
    names.run("qemu-img create -q -f qcow2 a.qcow2 8M").ok();
    let script = "umount -l /proc
        $B/qemu-io -f qcow2 -c 'write -P 1 0 64k' a.qcow2
        $B/qemu-img convert -f qcow2 -O qcow2 a.qcow2 b.qcow2
        $B/qemu-io -f qcow2 -s -c 'write -P 2 0 64k' b.qcow2
        $B/qemu-img compare a.qcow2 b.qcow2
        $B/qemu-img info --output=json b.qcow2
        $B/qemu-nbd --fork -k $PWD/s -f qcow2 a.qcow2
        $B/qemu-io -c 'read -P 1 0 64k' nbd+unix:///?socket=$PWD/s";
    if let Some(ran) = in_mount_namespace(&names, script) {
        assert_eq!(ran.code, Some(0), "{ran:#?}");
        assert!(!ran.stdout.contains("verification failed"), "{ran:#?}");
    }
}

#[test]
fn nothing_but_the_image_is_written_on_a_read_only_root() {
    let names = Names::new();
    names.run("qemu-img create -q -f qcow2 a.qcow2 8M").ok();
    let script = "mount --bind . . && mount -o remount,ro,bind . && cd $PWD
        $B/qemu-img info a.qcow2 && $B/qemu-img check -q a.qcow2
        $B/qemu-io -r -f qcow2 -c 'read 0 64k' a.qcow2
        ! $B/qemu-io -f qcow2 -c 'write 0 64k' a.qcow2
        ! $B/qemu-img create -q -f qcow2 never.qcow2 1M";
    if let Some(ran) = in_mount_namespace(&names, script) {
        assert_eq!(ran.code, Some(0), "{ran:#?}");
        let told: Vec<&str> = ran.stderr.lines().collect();
        assert!(
            told.len() == 2 && told.iter().all(|line| line.contains("Read-only file system")),
            "{told:?}"
        );
    }
}

/// Scripts look for options in these lists.
#[test]
fn lists_of_options_are_those_of_qemu() {
    let names = Names::new();
    if !qemu() {
        return;
    }
    names.run("qemu-img create -f qcow2 there.qcow2 1M").ok();
    for line in [
        "create -f qcow2 -o help",
        "create -f qcow2 -o help new",
        "create -f qcow2 -o cluster_size=4k,help new",
        "create -f qcow2 -o backing_file=there.qcow2 -o ,help new 1M",
        "create -f qcow2 -o backing_file=there.qcow2, -o help new 1M",
        "create -f raw -o help",
        "create -f raw -o ? new",
        "create -f bochs -o help",
        "convert -O qcow2 -o help",
        "convert -O qcow2 -o help there.qcow2 new",
        "convert -O vvfat there.qcow2 new",
        "convert -C -S 4k there.qcow2 new",
        "convert -C -c -O qcow2 there.qcow2 new",
        "convert -C --salvage there.qcow2 new",
        "amend -f qcow2 -o help",
        "amend -f qcow2 -o cluster_size=4k -o help there.qcow2",
        "amend -f qcow2 -o ,, -o help there.qcow2",
        "amend -f qcow2 -o backing_file=new there.qcow2",
        "amend -f bochs -o help",
    ] {
        let ours = names.run(&format!("qemu-img {line}"));
        let theirs = run(OsStr::new("qemu-img"), line, &names.dir());
        let printed = |ran: &Ran| format!("{}\n{}", ran.stdout, ran.stderr);
        assert_eq!((ours.code, printed(&ours)), (theirs.code, printed(&theirs)), "{line}");
        assert!(!names.dir().join("new").exists(), "{line}: makes nothing");
    }
}

#[test]
fn each_command_has_its_help() {
    let names = Names::new();
    for command in
        ["amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd", "info", "map"]
            .into_iter()
            .chain(["measure", "rebase", "resize", "snapshot"])
    {
        for option in ["--help", "-h"] {
            let ran = names.run(&format!("qemu-img {command} {option}"));
            assert!(ran.code == Some(0) && ran.stdout.contains("Usage:"), "{command} {option}: {ran:?}");
        }
    }
}

#[test]
fn what_has_no_effect_in_qemu_has_none() {
    let names = Names::new();
    let run = |line: &str| names.run(line);
    run("qemu-img create -f qcow2 a.qcow2 8M").ok();
    run("qemu-img create -f qcow2 -b a.qcow2 -F qcow2 over.qcow2").ok();
    run("qemu-img convert -O qcow2 -o size=16M a.qcow2 b.qcow2").ok();
    let info = run("qemu-img info b.qcow2");
    assert!(info.stdout.contains("virtual size: 8 MiB"), "{info:?}");
    run("qemu-img rebase -U -b a.qcow2 -F qcow2 over.qcow2").ok();
    run("qemu-img rebase -c -u -b a.qcow2 -F qcow2 over.qcow2").ok();
    run("qemu-img convert -n -B a.qcow2 -F qcow2 -O qcow2 over.qcow2 b.qcow2").ok();
    run("qemu-img info --image-opts driver=qcow2,file.filename=a.qcow2,cache.direct=on,cache.no-flush=on")
        .ok();
}

#[test]
fn what_qemu_refuses_is_refused() {
    let names = Names::new();
    names.run("qemu-img create -f qcow2 a.qcow2 8M").ok();
    for (line, code, words) in [
        ("convert -O qcow2 -B a.qcow2 -F qcow2 a.qcow2 a.qcow2 b.qcow2", 1, "multiple input images"),
        (
            "convert -n --target-image-opts -O qcow2 a.qcow2 driver=qcow2,file.filename=a.qcow2",
            1,
            "mutually exclusive",
        ),
        (
            "info --image-opts driver=qcow2,file.filename=a.qcow2,detect-zeroes=unmap",
            1,
            "detect-zeroes to unmap",
        ),
        ("compare -f bogus a.qcow2 a.qcow2", 2, "bogus"),
        ("compare -T bogus a.qcow2 a.qcow2", 2, "bogus"),
    ] {
        let ran = names.run(&format!("qemu-img {line}"));
        assert!(ran.code == Some(code) && ran.stderr.contains(words), "{line}: {ran:?}");
    }
    let ran = names.run("qemu-io -s -r -c 'write 0 4k' a.qcow2");
    assert!(ran.code == Some(1) && ran.stderr.contains("Block node is read-only"), "{ran:?}");
}

#[test]
fn qemu_io_reads_formats_that_it_does_not_write() {
    let names = Names::new();
    names.run("qemu-img create -f qcow2 a.qcow2 1M").ok();
    names.run("qemu-io -c 'write -P 7 0 4k' a.qcow2").ok();
    names.run("qemu-img convert -O vdi a.qcow2 a.vdi").ok();
    names.run("qemu-io -c 'read -P 7 0 4k' a.vdi").ok();
    let ran = names.run("qemu-io -c 'write 0 4k' a.vdi");
    assert!(ran.stderr.contains("write failed") || ran.stdout.contains("write failed"), "{ran:?}");
}

/// A reader that has found its word leaves.
#[test]
fn the_help_is_written_at_once() {
    let names = Names::new();
    for program in ["qemu-img --help", "qemu-io --help", "qemu-nbd --help", "qemu-img convert --help"] {
        let line = format!(
            "set -o pipefail; for i in 1 2 3 4 5 6 7 8; do '{}'/{program} | grep -q Usage || exit 1; done",
            names.0.path().display()
        );
        let status = Command::new("bash").args(["-c", &line]).status().unwrap();
        assert!(status.success(), "{program}");
    }
}

/// Services refuse a VMDK whose kind they are not told.
#[test]
fn a_vmdk_is_told_of_as_by_qemu() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let theirs = |line: &str| run(OsStr::new("qemu-img"), line, &names.dir());
    theirs("create -f qcow2 a.qcow2 8M").ok();
    for (subformat, is_one_file) in [
        ("monolithicSparse", true),
        ("streamOptimized", true),
        ("monolithicFlat", false),
        ("twoGbMaxExtentSparse", false),
    ] {
        theirs(&format!("convert -O vmdk -o subformat={subformat} a.qcow2 {subformat}.vmdk")).ok();
        let line = format!("info --output=json {subformat}.vmdk");
        let json = |ran: Ran| serde_json::from_str::<serde_json::Value>(&ran.stdout).unwrap();
        let (ours, theirs_json) = (json(names.run(&format!("qemu-img {line}"))), json(theirs(&line)));
        let kind = |value: &serde_json::Value| value["format-specific"]["data"]["create-type"].clone();
        assert_eq!(kind(&ours), subformat);
        if is_one_file {
            assert_eq!(ours, theirs_json, "{subformat}");
            let line = format!("info {subformat}.vmdk");
            assert_eq!(names.run(&format!("qemu-img {line}")).stdout, theirs(&line).stdout);
        } else {
            let extent = |value: &serde_json::Value| {
                let extent = &value["format-specific"]["data"]["extents"][0];
                ["filename", "format", "virtual-size"].map(|key| extent[key].clone())
            };
            assert_eq!(extent(&ours), extent(&theirs_json), "{subformat}");
        }
    }
}

/// As Cinder and libvirt call it.
#[test]
fn a_hash_beside_any_generator_of_vectors_is_taken() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    std::fs::write(names.dir().join("key"), "secret").unwrap();
    let theirs = |line: &str| run(OsStr::new("qemu-img"), line, &names.dir());
    let secret = "--object secret,id=s,file=key";
    for (number, iv) in
        ["plain64,ivgen-hash-alg=sha256", "essiv,ivgen-hash-alg=sha256", "essiv"].into_iter().enumerate()
    {
        let options = format!("cipher-alg=aes-256,cipher-mode=xts,iter-time=10,key-secret=s,ivgen-alg={iv}");
        let create = format!("create -q -f luks {secret} -o {options}");
        let (file, other) = (format!("ours{number}"), format!("theirs{number}"));
        names.run(&format!("qemu-img {create} {file} 1M")).ok();
        theirs(&format!("{create} {other} 1M")).ok();
        let opened = |file: &str| format!("driver=luks,key-secret=s,file.filename={file}");
        names.run(&format!("qemu-io {secret} --image-opts -c 'write -P 7 1k 9k' {}", opened(&other))).ok();
        let read = format!("{secret} --image-opts -c 'read -P 7 1k 9k' {}", opened(&other));
        let theirs_read = run(OsStr::new("qemu-io"), &read, &names.dir());
        assert!(
            theirs_read.code == Some(0) && !theirs_read.stdout.contains("failed"),
            "{iv}: {theirs_read:?}"
        );
        let write = format!("{secret} --image-opts -c 'write -P 9 1k 9k' {}", opened(&file));
        run(OsStr::new("qemu-io"), &write, &names.dir()).ok();
        let ran = names.run(&format!("qemu-io {secret} --image-opts -c 'read -P 9 1k 9k' {}", opened(&file)));
        assert!(ran.code == Some(0) && !ran.stdout.contains("failed"), "{iv}: {ran:?}");
        names.run(&format!("qemu-img info {other}")).ok();
    }
}

#[test]
fn options_of_luks_are_listed_for_luks() {
    let names = Names::new();
    let create = names.run("qemu-img create -f luks -o help new").ok().stdout;
    assert!(create.contains("cipher-alg=") && !create.contains("cluster_size"), "{create}");
    let amend = names.run("qemu-img amend -f luks -o help new").ok().stdout;
    assert!(amend.contains("  new-secret=") && !amend.contains("compat"), "{amend}");
}
