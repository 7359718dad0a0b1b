//! Disks in object stores: MinIO, read and written by zebu, with curl and QEMU beside it.

use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use zebu_tests::object_store::ObjectStore;
use zebu_tests::patience::wait_until;
use zebu_tests::program::{find, run_in};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of};
use zebu_tests::web_proxy::{Mishap, WebProxy};

/// Bytes of the disk.
const LEN: usize = 40 << 20;

/// Bytes that don't become shorter.
fn noise(bytes: &mut [u8], mut state: u64) {
    for word in bytes.chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        word.copy_from_slice(&(state ^ state >> 33).to_le_bytes());
    }
}

/// A disk with noise, text and zeroes, as `disk.raw`, `disk.qcow2` and, compressed, `packed.qcow2`.
fn source(dir: &Path) -> Vec<u8> {
    let mut content = vec![0; LEN];
    noise(&mut content[1 << 20..14 << 20], 1);
    for (index, byte) in content[20 << 20..33 << 20].iter_mut().enumerate() {
        *byte = (index / 1000 % 7 * 31) as u8;
    }
    // Clusters of both kinds in turn.
    for cluster in content[34 << 20..38 << 20].chunks_exact_mut(128 << 10) {
        noise(&mut cluster[..64 << 10], 2);
        noise(&mut cluster[64 << 10..100 << 10], 3);
    }
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    for options in ["disk.qcow2", "-c packed.qcow2"] {
        qemu_img(dir, &format!("convert -f raw -O qcow2 disk.raw {options}"));
    }
    content
}

fn qemu_img(dir: &Path, line: &str) -> String {
    let qemu_img = find("qemu-img").expect("qemu-img is missing: `cargo xtask setup` installs it");
    run_in(dir, &qemu_img, line.split_whitespace()).ok().stdout
}

/// The object under `key` is an image that QEMU takes for sound, of the disk in `disk.raw`.
fn judge(store: &ObjectStore, dir: &Path, format: &str, key: &str) {
    let bytes = store.get(key).expect("an object");
    std::fs::write(dir.join("judged"), &bytes).unwrap();
    if format == "qcow2" {
        let told = qemu_img(dir, "check -f qcow2 judged");
        assert!(told.contains("No errors"), "{told}");
    }
    qemu_img(dir, &format!("compare -f raw -F {format} disk.raw judged"));
}

/// Waits until a conversion to `flat.raw` is under way: it has written to its target, which gets its name in the end.
fn wait_for_target(dir: &Path) {
    let is_target = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        let is_named = entry.file_name().to_string_lossy().starts_with(".flat.raw.");
        // It may have its name by now.
        is_named && entry.metadata().is_ok_and(|target| target.blocks() * 512 >= 1 << 20)
    };
    wait_until("a mebibyte of the target", || std::fs::read_dir(dir).unwrap().any(is_target));
}

#[test]
fn objects_are_sources_of_every_command() {
    let scratch = Scratch::new("store-sources");
    let dir = scratch.path();
    let content = source(dir);
    let store = ObjectStore::start(dir);
    for (file, key) in
        [("disk.raw", "dir/disk.raw"), ("disk.qcow2", "disk.qcow2"), ("packed.qcow2", "packed.qcow2")]
    {
        store.put(file, key);
    }
    for (format, key) in [("raw", "dir/disk.raw"), ("qcow2", "disk.qcow2"), ("qcow2", "packed.qcow2")] {
        let name = format!("s3://disks/{key}");
        store.zebu(&["convert", "-f", format, "-O", "raw", &name, "flat.raw"]).ok();
        assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content, "{key}");
    }
    let info = store.zebu(&["info", "--output", "json", "s3://disks/disk.qcow2"]).ok().stdout;
    assert!(info.contains(&format!("\"virtual-size\": {LEN}")) && info.contains("\"s3\""), "{info}");
    for words in [&["map", "--output", "json", "-f", "qcow2"][..], &["measure", "-O", "qcow2"], &["check"]] {
        let told = |name: &str| store.zebu(&[words, &[name]].concat()).ok().stdout;
        assert_eq!(told("s3://disks/disk.qcow2").replace("s3://disks/", ""), told("disk.qcow2"));
    }
    let reads = ["io", "-r", "-f", "raw", "s3://disks/dir/disk.raw", "-c", "read -P 0 0 1M"];
    store.zebu(&reads).ok();
    let line = ["backup", "-f", "raw", "--manifest", "m", "s3://disks/dir/disk.raw", "backup.qcow2"];
    store.zebu(&line).ok();
    store.put("backup.qcow2", "backup.qcow2");
    store.zebu(&["verify", "--manifest", "m", "s3://disks/backup.qcow2"]).ok();
    // Image options, with what goes for web servers.
    let options =
        "driver=qcow2,file.driver=s3,file.url=s3://disks/packed.qcow2,file.memory=8M,file.connections=2";
    store.zebu(&["compare", "--image-opts", options, "driver=raw,file.filename=disk.raw"]).ok();
    for (options, word) in [
        ("driver=s3,url=http://h/x", "begins with s3://"),
        ("driver=s3", "url=s3://BUCKET/KEY"),
        ("driver=s3,url=gs://b/k", "scheme"),
        ("driver=s3,url=s3://b/k,username=u", "environment or a profile"),
    ] {
        let refused = store.zebu(&["info", "--image-opts", options]).exits(1);
        assert!(refused.stderr.contains(word) && refused.stderr.lines().count() == 1, "{refused}");
    }
    let refused = store.zebu(&["io", "-f", "raw", "s3://disks/dir/disk.raw", "-c", "write 0 512"]).exits(1);
    assert!(refused.stderr.contains("Read-only"), "{refused}");
}

/// URLs are signed anew by each process; the object is the same.
#[test]
fn a_cache_knows_an_object_again() {
    let scratch = Scratch::new("store-cache");
    let dir = scratch.path();
    let content = source(dir);
    let store = ObjectStore::start(dir);
    store.put("packed.qcow2", "packed.qcow2");
    let convert = || {
        let words =
            ["convert", "-v", "-O", "raw", "--cache-dir", "cache", "s3://disks/packed.qcow2", "flat.raw"];
        let said = store.zebu(&words).ok().stderr;
        assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
        said
    };
    let first = convert();
    assert!(!first.contains(" 0 bytes fetched"), "{first}");
    let second = convert();
    assert!(second.contains(" 0 bytes fetched"), "{second}");
    // Another version of the object.
    store.put("disk.qcow2", "packed.qcow2");
    let third = convert();
    assert!(!third.contains(" 0 bytes fetched"), "{third}");
}

#[test]
fn a_base_in_a_store_is_opened_if_the_command_line_says_so() {
    let scratch = Scratch::new("store-base");
    let dir = scratch.path();
    source(dir);
    let store = ObjectStore::start(dir);
    store.put("packed.qcow2", "bases/base.qcow2");
    store
        .zebu(&["create", "-f", "qcow2", "-b", "s3://disks/bases/base.qcow2", "-F", "qcow2", "vm.qcow2"])
        .ok();
    let compare = |more: &[&str]| {
        store.zebu(&[&["compare", "-f", "raw", "-F", "qcow2"], more, &["disk.raw", "vm.qcow2"]].concat())
    };
    let refused = compare(&[]).exits(2);
    assert!(
        refused.stderr.contains("--allow-refs") && refused.stderr.contains("s3://disks/bases"),
        "{refused}"
    );
    compare(&["--allow-refs", "prefix=s3://disks/others"]).exits(2);
    compare(&["--allow-refs", "prefix=s3://disks/bases"]).ok();
    compare(&["--allow-refs", "all"]).ok();
    // A relative name in an object is beside it.
    store.put("vm.qcow2", "bases/over.qcow2");
    store.zebu(&["create", "-f", "qcow2", "-u", "-b", "base.qcow2", "-F", "qcow2", "over.qcow2", "40M"]).ok();
    store.put("over.qcow2", "bases/over.qcow2");
    let over = |more: &[&str]| {
        let words =
            [&["compare", "-f", "raw", "-F", "qcow2"], more, &["disk.raw", "s3://disks/bases/over.qcow2"]];
        store.zebu(&words.concat())
    };
    over(&[]).exits(2);
    over(&["--allow-refs", "prefix=s3://disks/bases"]).ok();
    // A server in its sandbox signs and connects as well.
    let variables = store.variables();
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let server = Server::start_with_all(dir, &variables, "-f qcow2 --allow-refs all vm.qcow2");
    qemu_img(dir, &format!("compare -f raw -F raw disk.raw {}", server.uri("")));
    server.stop();
}

#[test]
fn what_is_wrong_is_said_in_one_line_without_secrets() {
    let scratch = Scratch::new("store-errors");
    let dir = scratch.path();
    std::fs::write(dir.join("small.raw"), vec![7; 4096]).unwrap();
    std::fs::create_dir(dir.join(".aws")).unwrap();
    let store = ObjectStore::start(dir);
    store.put("small.raw", "small.raw");
    let name = "s3://disks/small.raw";
    let no_keys = [("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")];
    for (variables, name, word) in [
        (&[][..], "s3://disks/none", "no such object"),
        (&[], "s3://nobodys/none", "no such bucket"),
        (&[], "s3://disks/", "key is missing"),
        (&[], "gs://disks/x?versionId=3", "versions"),
        (&[("AWS_SECRET_ACCESS_KEY", "hidden")], name, "AWS_SECRET_ACCESS_KEY or the profile is wrong"),
        (&[("AWS_ACCESS_KEY_ID", "unknown")], name, "AWS_ACCESS_KEY_ID or the profile is wrong"),
        (&[("AWS_ACCESS_KEY_ID", "")], name, "AWS_ACCESS_KEY_ID is not"),
        (&no_keys, name, "there are no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (&[("AWS_PROFILE", "nobody")], name, "no profile 'nobody'"),
        (&[("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")], name, "Connection refused"),
        (&[("AWS_ENDPOINT_URL", "http://hidden@127.0.0.1:1")], name, "no user belongs"),
        (&[("AWS_ENDPOINT_URL", "ftp://127.0.0.1")], name, "AWS_ENDPOINT_URL"),
    ] {
        let read = store.zebu_with(variables, &["info", "-f", "raw", name]).exits(1);
        let says = |text: &str| text.contains(word) && text.lines().count() == 1 && !text.contains("hidden");
        assert!(says(&read.stderr), "{word}: {read}");
        if !word.contains("no such object") {
            let written =
                store.zebu_with(variables, &["convert", "-f", "raw", "-O", "raw", "small.raw", name]);
            assert!(says(&written.exits(1).stderr), "{word}");
        }
    }
    // Both are known by a profile, too.
    let lines = "[default]\naws_access_key_id = nobody\naws_secret_access_key = hidden\n[mine]\n\
                 aws_access_key_id = user\naws_secret_access_key = password of the user\n";
    std::fs::write(dir.join(".aws/credentials"), lines).unwrap();
    let config = format!("[profile mine]\nregion = us-east-1\nendpoint_url = {}\n", store.endpoint());
    std::fs::write(dir.join(".aws/config"), config).unwrap();
    let mine =
        [&no_keys[..], &[("AWS_PROFILE", "mine"), ("AWS_ENDPOINT_URL", ""), ("AWS_REGION", "")]].concat();
    store.zebu_with(&mine, &["info", "-f", "raw", name]).ok();
    let refused = store.zebu_with(&no_keys, &["info", "-f", "raw", name]).exits(1);
    assert!(refused.stderr.contains("does not know the access key"), "{refused}");
    // What an object can't be is refused before anything is sent.
    for (words, word) in [
        (&["-n"][..], "-n"),
        (&["-B", "small.raw", "-F", "raw", "-O", "qcow2"], "backing file"),
        (&["-O", "vmdk"], "vmdk"),
        (&["-O", "qcow2", "-o", "preallocation=full"], "preallocation"),
        (&["-O", "qcow2", "-o", "data_file=x"], "data file"),
        (&["-O", "raw", "-o", "preallocation=falloc"], "preallocation"),
        (&["-t", "none"], "-t"),
        (&["--buffer-memory", "4M"], "--buffer-memory"),
        (&["-O", "qcow2", "--copy", "reflink"], "reflink"),
    ] {
        let refused =
            store.zebu(&[&["convert", "-f", "raw"], words, &["small.raw", "s3://disks/refused"]].concat());
        assert!(refused.code == Some(1) && refused.stderr.contains(word), "{refused}");
    }
    let pinned = ["convert", "-f", "raw", "-O", "raw", "small.raw", "s3://disks/refused?versionId=1"];
    assert!(store.zebu(&pinned).exits(1).stderr.contains("versionId"));
    assert_eq!((store.get("refused"), store.uploads("refused")), (None, 0));
}

#[test]
fn images_are_written_as_qemu_reads_them() {
    let scratch = Scratch::new("store-writes");
    let dir = scratch.path();
    source(dir);
    let store = ObjectStore::start(dir);
    for (format, words) in [
        ("raw", &[][..]),
        ("raw", &["-S", "0"]),
        ("qcow2", &[]),
        ("qcow2", &["-S", "0", "-m", "1"]),
        ("qcow2", &["-c"]),
        ("qcow2", &["-c", "-o", "compression_type=zstd", "--buffer-memory", "24M", "-m", "16"]),
        ("qcow2", &["-c", "-o", "cluster_size=2M"]),
        ("qcow2", &["-c", "-o", "cluster_size=4k,refcount_bits=8"]),
        ("qcow2", &["-o", "compat=0.10", "--workers", "3"]),
        ("qcow2", &["-o", "extended_l2=on,cluster_size=128k"]),
        ("qcow2", &["-o", "cluster_size=512"]),
    ] {
        for source in ["disk.raw", "packed.qcow2"] {
            let of = if source == "disk.raw" { "raw" } else { "qcow2" };
            let words =
                [&["convert", "-f", of, "-O", format], words, &[source, "s3://disks/a/made"]].concat();
            store.zebu(&words).ok();
            judge(&store, dir, format, "a/made");
        }
    }
    assert_eq!(store.uploads("a/made"), 0);
    // From a store to a store, several sources, a size, odd lengths, and a disk of nothing.
    store.zebu(&["convert", "-f", "qcow2", "-O", "qcow2", "-c", "s3://disks/a/made", "s3://disks/b"]).ok();
    judge(&store, dir, "qcow2", "b");
    let both = ["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.raw", "s3://disks/both"];
    store.zebu(&both).ok();
    std::fs::write(dir.join("both.qcow2"), store.get("both").unwrap()).unwrap();
    qemu_img(dir, "convert -f raw -O raw disk.raw twice.raw");
    let mut twice = std::fs::read(dir.join("disk.raw")).unwrap();
    twice.extend_from_within(..);
    std::fs::write(dir.join("twice.raw"), &twice).unwrap();
    qemu_img(dir, "compare -f raw -F qcow2 twice.raw both.qcow2");
    for len in [0usize, 512, 65_536, 70_144, 8 << 20, (8 << 20) + 512] {
        std::fs::write(dir.join("odd.raw"), &twice[1 << 20..][..len]).unwrap();
        for format in ["raw", "qcow2"] {
            store.zebu(&["convert", "-f", "raw", "-O", format, "odd.raw", "s3://disks/odd"]).ok();
            std::fs::write(dir.join("odd"), store.get("odd").unwrap()).unwrap();
            qemu_img(dir, &format!("compare -f raw -F {format} odd.raw odd"));
        }
        assert_eq!(std::fs::metadata(dir.join("odd.raw")).unwrap().len(), len as u64);
    }
    let grown = ["convert", "-f", "raw", "-O", "raw", "-o", "size=1M", "odd.raw", "s3://disks/odd"];
    assert!(store.zebu(&grown).exits(1).stderr.contains("smaller"));
    let told =
        store.zebu(&["convert", "-f", "raw", "-O", "raw", "--output", "json", "disk.raw", "s3://disks/odd"]);
    let told: serde_json::Value = serde_json::from_str(&told.ok().stdout).unwrap();
    assert_eq!(told["remote"]["written-bytes"].as_u64(), Some(LEN as u64), "{told}");
}

#[test]
fn what_an_interrupted_upload_has_of_another_disk_is_not_taken() {
    let scratch = Scratch::new("store-other");
    let dir = scratch.path();
    let mut content = vec![0; 120 << 20];
    noise(&mut content, 11);
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    let store = ObjectStore::start(dir);
    let words = ["convert", "-f", "raw", "-O", "raw", "-r", "4M", "disk.raw", "s3://disks/d"];
    let mut child = store.command(&[], &words).spawn().unwrap();
    store.wait_for_parts("d", 3);
    child.kill().unwrap();
    end_of(&mut child);
    assert_eq!(store.uploads("d"), 1);
    // Bytes in the middle of each part are others now, and the disk is shorter.
    content.truncate(100 << 20);
    for byte in content.iter_mut().skip(4 << 20).step_by(8 << 20) {
        *byte ^= 1;
    }
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    let told = store.zebu(&["convert", "-v", "-f", "raw", "-O", "raw", "disk.raw", "s3://disks/d"]).ok();
    assert!(told.stderr.contains("13 parts") && told.stderr.contains(" 0 parts of an interrupted"), "{told}");
    assert!(store.get("d").unwrap() == content);
    assert_eq!(store.uploads("d"), 0);
}

#[test]
fn an_upload_that_fails_is_given_up() {
    let scratch = Scratch::new("store-failures");
    let dir = scratch.path();
    let mut content = vec![0; 80 << 20];
    noise(&mut content, 13);
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    let store = ObjectStore::start(dir);
    // By a signal.
    let words = ["convert", "-f", "raw", "-O", "qcow2", "-r", "2M", "disk.raw", "s3://disks/d"];
    let mut child = store.command(&[], &words).stderr(Stdio::null()).spawn().unwrap();
    store.wait_for_parts("d", 1);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(end_of(&mut child).code(), Some(130));
    assert_eq!((store.get("d"), store.uploads("d")), (None, 0));
    // By a source that can't be read to its end.
    let line = "driver=raw,file.driver=blkdebug,file.image.filename=disk.raw,file.inject-error.0.event=read_aio,\
                file.inject-error.0.sector=120000,file.inject-error.0.errno=5";
    let failed = store.zebu(&["convert", "--image-opts", "-O", "raw", line, "s3://disks/d"]).exits(1);
    assert!(
        failed.stderr.contains("Input/output error") && failed.stderr.contains("120000")
            || failed.stderr.contains("error"),
        "{failed}"
    );
    assert_eq!((store.get("d"), store.uploads("d")), (None, 0));
}

#[test]
fn of_two_uploads_at_once_the_one_that_fails_says_why() {
    let scratch = Scratch::new("store-both");
    let dir = scratch.path();
    let mut content = vec![0; 80 << 20];
    noise(&mut content, 17);
    std::fs::write(dir.join("disk.raw"), &content).unwrap();
    let store = ObjectStore::start(dir);
    let words = ["convert", "-f", "raw", "-O", "qcow2", "-r", "4M", "disk.raw", "s3://disks/d"];
    let mut first = store.command(&[], &words).stderr(Stdio::piped()).spawn().unwrap();
    store.wait_for_parts("d", 2);
    kill_process(Pid::from_child(&first), Signal::STOP).unwrap();
    // It goes on with the parts of the first, and makes the object of them.
    store.zebu(&["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "s3://disks/d"]).ok();
    kill_process(Pid::from_child(&first), Signal::CONT).unwrap();
    assert_eq!(end_of(&mut first).code(), Some(1));
    let mut said = String::new();
    first.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("another upload to the same object") && said.lines().count() == 1, "{said}");
    judge(&store, dir, "qcow2", "d");
}

#[test]
fn an_object_that_changes_is_noticed_and_credentials_may_change() {
    let scratch = Scratch::new("store-changes");
    let dir = scratch.path();
    let content = source(dir);
    std::fs::create_dir(dir.join(".aws")).unwrap();
    let profile = |password: &str| {
        let lines = format!("[default]\naws_access_key_id = user\naws_secret_access_key = {password}\n");
        std::fs::write(dir.join(".aws/credentials"), lines).unwrap();
    };
    profile("password of the user");
    let store = ObjectStore::start(dir);
    store.put("disk.raw", "d.raw");
    std::fs::write(dir.join("other.raw"), vec![1; LEN]).unwrap();
    let of_profile = [("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")];
    // The store may take long to come back.
    let object = "driver=raw,file.driver=s3,file.url=s3://disks/d.raw,file.timeout=600";
    let words = ["convert", "-v", "--image-opts", "-O", "raw", "-S", "0", "-r", "4M", object, "flat.raw"];
    let mut child = store.command(&of_profile, &words).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_target(dir);
    // The credentials are others, and so is the connection.
    profile("another password");
    let store = store.start_again("another password");
    assert!(end_of(&mut child).success());
    assert!(std::fs::read(dir.join("flat.raw")).unwrap() == content);
    std::fs::remove_file(dir.join("flat.raw")).unwrap();

    let mut child = store.command(&[], &words).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_target(dir);
    // It goes on when the object is another.
    let id = Pid::from_child(&child);
    kill_process(id, Signal::STOP).unwrap();
    store.put("other.raw", "d.raw");
    kill_process(id, Signal::CONT).unwrap();
    let code = end_of(&mut child).code();
    let mut told = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut told).unwrap();
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("another than when it was opened") && !dir.join("flat.raw").exists(), "{told}");

    // A version stays what it was.
    let rule = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>";
    std::fs::write(dir.join("rule.xml"), rule).unwrap();
    store.request("PUT", "disks?versioning=", &["--fail", "--upload-file", "rule.xml"]).ok();
    store.put("disk.raw", "v.raw");
    let head =
        store.request("GET", "disks/v.raw", &["--fail", "-D", "-", "--output", "/dev/null"]).ok().stdout;
    let version = head
        .lines()
        .find_map(|line| line.strip_prefix("X-Amz-Version-Id: ").or(line.strip_prefix("x-amz-version-id: ")));
    let version = version.expect("a version").trim().to_owned();
    store.put("other.raw", "v.raw");
    let pinned = format!("s3://disks/v.raw?versionId={version}");
    store.zebu(&["compare", "-f", "raw", "-F", "raw", "disk.raw", &pinned]).ok();
    store.zebu(&["compare", "-f", "raw", "-F", "raw", "other.raw", "s3://disks/v.raw"]).ok();
}

#[test]
fn a_server_in_its_sandbox_gets_new_credentials() {
    let scratch = Scratch::new("store-sandbox");
    let dir = scratch.path();
    source(dir);
    std::fs::create_dir(dir.join(".aws")).unwrap();
    let store = ObjectStore::start(dir);
    store.put("disk.raw", "d.raw");
    let profile = |password: &str| {
        let lines = format!("[default]\naws_access_key_id = user\naws_secret_access_key = {password}\n");
        std::fs::write(dir.join(".aws/credentials"), lines).unwrap();
    };
    profile("password of the user");
    let variables = store.variables();
    let variables: Vec<(&str, &str)> = variables
        .iter()
        .map(|(name, value)| (*name, if name.contains("ACCESS_KEY") { "" } else { value.as_str() }))
        .collect();
    // With little memory, so that what was read is read again.
    let server =
        Server::start_with_all(dir, &variables, "--read-only --http-memory 4M -f raw s3://disks/d.raw");
    assert!(!server.system_call_filters().is_empty());
    let compare = format!("compare -f raw -F raw disk.raw {}", server.uri(""));
    qemu_img(dir, &compare);
    // The process outside of the sandbox reads the profile again, and signs.
    profile("another password");
    let _store = store.start_again("another password");
    qemu_img(dir, &compare);
    server.stop();
}

#[test]
fn backups_are_objects_and_verified_in_place() {
    let scratch = Scratch::new("store-backups");
    let dir = scratch.path();
    source(dir);
    let store = ObjectStore::start(dir);
    for (number, words) in [
        &["--manifest", "m0"][..],
        &["--manifest", "m1", "--compression-type", "zstd", "--buffer-memory", "32M"],
        &["--manifest", "m2", "--cluster-size", "4k"],
        &["--manifest", "m3", "--cluster-size", "2M"],
        &[],
    ]
    .iter()
    .enumerate()
    {
        let (name, manifest) = (format!("s3://disks/backup{number}"), format!("m{number}"));
        let told =
            store.zebu(&[&["backup", "--output", "json"], *words, &["packed.qcow2", &name]].concat()).ok();
        let told: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
        judge(&store, dir, "qcow2", &format!("backup{number}"));
        assert!(told["disk-hash"].as_str().is_some_and(|hash| hash.len() == 64), "{told}");
        assert_eq!(told["total"].as_u64(), Some(LEN as u64));
        if words.is_empty() {
            continue;
        }
        // The same hashes as a backup in a file.
        store.zebu(&["verify", "--manifest", &manifest, &name]).ok();
        let local = [&["backup", "--output", "json"], *words, &["packed.qcow2", "local"]].concat();
        let local: Vec<&str> =
            local.iter().map(|word| if *word == manifest { "ml" } else { *word }).collect();
        let beside: serde_json::Value = serde_json::from_str(&store.zebu(&local).ok().stdout).unwrap();
        assert_eq!(beside["disk-hash"], told["disk-hash"]);
        for file in ["local", "ml"] {
            std::fs::remove_file(dir.join(file)).unwrap();
        }
    }
    // A flipped bit is found.
    let mut bytes = store.get("backup0").unwrap();
    bytes[3 << 20] ^= 16;
    std::fs::write(dir.join("flipped"), bytes).unwrap();
    store.put("flipped", "flipped");
    store.zebu(&["verify", "--manifest", "m0", "s3://disks/flipped"]).exits(2);
    // Nothing is overwritten, and what can't be had is refused by name.
    let before = store.get("backup0").unwrap();
    for words in
        [&["--compression-type", "zstd"][..], &["--cluster-size", "4k"], &["--compression-level", "1"]]
    {
        let line = [&["backup", "--manifest", "m9"], words, &["disk.qcow2", "s3://disks/backup0"]].concat();
        let again = store.zebu(&line).exits(1);
        assert!(
            again.stderr.contains("exists already") && store.get("backup0").unwrap() == before,
            "{again}"
        );
    }
    // A run that was killed when its object was there had only its manifest to write.
    let words = ["backup", "-v", "--manifest", "m9", "disk.qcow2", "s3://disks/backup0"];
    let again = store.zebu(&words).ok();
    assert!(
        again.stderr.contains(" 0 parts with 0 bytes sent") && store.get("backup0").unwrap() == before,
        "{again}"
    );
    store.zebu(&["verify", "--manifest", "m9", "s3://disks/backup0"]).ok();
    std::fs::remove_file(dir.join("m9")).unwrap();
    for (words, word) in [
        (&["--resume"][..], "--resume"),
        (&["--bitmap", "b"], "--bitmap"),
        (&["--previous", "packed.qcow2", "--previous-manifest", "m0"], "--previous"),
        (&["-t", "none"], "-t"),
    ] {
        let refused = store.zebu(&[&["backup"], words, &["disk.qcow2", "s3://disks/n"]].concat()).exits(1);
        assert!(refused.stderr.contains(word), "{refused}");
    }
    assert!(!dir.join("m9").exists() && store.get("n").is_none());
    // One that is killed has no name, and no manifest; the next one goes on.
    let words = ["backup", "-v", "-f", "raw", "--manifest", "mk", "disk.raw", "s3://disks/killed"];
    let slowly = [&words[..], &["-r", "2M"]].concat();
    let mut child = store.command(&[], &slowly).stderr(Stdio::null()).spawn().unwrap();
    store.wait_for_parts("killed", 2);
    child.kill().unwrap();
    end_of(&mut child);
    assert!(store.get("killed").is_none() && !dir.join("mk").exists());
    store.zebu(&words).ok();
    judge(&store, dir, "qcow2", "killed");
    store.zebu(&["verify", "--manifest", "mk", "s3://disks/killed"]).ok();
    assert_eq!(store.uploads("killed"), 0);
}

#[test]
fn a_store_that_is_slow_or_loses_answers_is_asked_again() {
    let scratch = Scratch::new("store-mishaps");
    let dir = scratch.path();
    let content = source(dir);
    let store = ObjectStore::start(dir);
    let proxy = WebProxy::start(store.port(), |_, _| Mishap::None);
    let url = proxy.url("");
    let through = [("AWS_ENDPOINT_URL", url.as_str())];
    let slow = || Mishap::Answer("503 Slow Down\r\nRetry-After: 1".to_owned());
    for (number, mishap) in
        [slow(), Mishap::LostAnswer, Mishap::Answer("500 Internal Server Error".to_owned())]
            .into_iter()
            .enumerate()
    {
        let key = format!("slow{number}");
        let name = format!("s3://disks/{key}");
        proxy.change(move |request, _| if request % 3 == 1 { mishap.clone() } else { Mishap::None });
        let words = ["convert", "-v", "-f", "raw", "-O", "qcow2", "disk.raw", &name];
        store.zebu_with(&through, &words).ok();
        judge(&store, dir, "qcow2", &key);
        store.zebu_with(&through, &["compare", "-f", "raw", "-F", "qcow2", "disk.raw", &name]).ok();
    }
    // The answer to the last request is lost: the object is there all the same.
    let ends = |head: &str| head.starts_with("POST ") && head.contains("uploadId=");
    proxy.change(move |_, head| if ends(head) { Mishap::LostAnswer } else { Mishap::None });
    store.zebu_with(&through, &["convert", "-f", "raw", "-O", "raw", "disk.raw", "s3://disks/last"]).ok();
    assert!(store.get("last").unwrap() == content);
    // Every part is refused for good: one line, no object, and nothing is left.
    proxy.change(|_, head| {
        let is_part =
            head.starts_with("PUT ") && head.contains("partNumber=") && !head.contains("partNumber=10000");
        if is_part { Mishap::Answer("403 Forbidden".to_owned()) } else { Mishap::None }
    });
    let words = ["convert", "-f", "raw", "-O", "raw", "disk.raw", "s3://disks/denied"];
    let failed = store.zebu_with(&through, &words).exits(1);
    assert!(failed.stderr.lines().count() == 1 && failed.stderr.contains("403"), "{failed}");
    assert_eq!((store.get("denied"), store.uploads("denied")), (None, 0));
    // A bucket of another region.
    let elsewhere = "301 Moved Permanently\r\nx-amz-bucket-region: eu-north-1".to_owned();
    proxy.change(move |_, _| Mishap::Answer(elsewhere.clone()));
    for words in [&["info", "-f", "raw", "s3://disks/slow0"][..], &words] {
        let failed = store.zebu_with(&through, words).exits(1);
        assert!(
            failed.stderr.contains("AWS_REGION=eu-north-1") && failed.stderr.lines().count() == 1,
            "{failed}"
        );
    }
}

#[test]
fn empty_objects_are_read_and_endpoints_have_no_query() {
    let scratch = Scratch::new("store-empty");
    let dir = scratch.path();
    let store = ObjectStore::start(dir);
    std::fs::write(dir.join("empty.raw"), "").unwrap();
    store.zebu(&["convert", "-f", "raw", "-O", "raw", "empty.raw", "s3://disks/empty"]).ok();
    for more in [&[][..], &["--cache-dir", "cache"]] {
        let words =
            [&["convert", "-f", "raw", "-O", "raw"], more, &["s3://disks/empty", "back.raw"]].concat();
        store.zebu(&words).ok();
        assert_eq!(std::fs::read(dir.join("back.raw")).unwrap(), b"");
        std::fs::remove_file(dir.join("back.raw")).unwrap();
    }
    // The list of buckets would be the disk.
    let endpoint = format!("{}/?a=b", store.endpoint());
    let refused = store.zebu_with(
        &[("AWS_ENDPOINT_URL", endpoint.as_str())],
        &["convert", "-f", "raw", "-O", "raw", "s3://disks/empty", "back.raw"],
    );
    assert!(refused.code == Some(1) && refused.stderr.contains("AWS_ENDPOINT_URL: no query"), "{refused}");
}

#[test]
fn a_backup_replaces_no_object_that_was_made_meanwhile() {
    let scratch = Scratch::new("store-meanwhile");
    let dir = scratch.path();
    source(dir);
    std::fs::write(dir.join("small.raw"), vec![7; 3 << 20]).unwrap();
    std::fs::write(dir.join("other"), "another object").unwrap();
    let store = Arc::new(ObjectStore::start(dir));
    let proxy = WebProxy::start(store.port(), |_, _| Mishap::None);
    let url = proxy.url("");
    for (disk, key) in [("disk.raw", "many-parts"), ("small.raw", "one-part")] {
        let name = format!("s3://disks/{key}");
        let words = ["backup", "-f", "raw", "--manifest", "m", disk, &name];
        // When the first data are on their way to the store, which had no object.
        let (meanwhile, is_made) = (Arc::clone(&store), Arc::new(AtomicBool::new(false)));
        let made = Arc::clone(&is_made);
        proxy.change(move |_, head| {
            let is_data = head.starts_with("PUT ") && !head.contains("partNumber=10000");
            if is_data && !made.swap(true, Ordering::SeqCst) {
                meanwhile.put("other", key);
            }
            Mishap::None
        });
        let done = store.zebu_with(&[("AWS_ENDPOINT_URL", &url)], &words).exits(1);
        let said = done.stderr;
        assert!(is_made.load(Ordering::SeqCst), "{said}");
        assert!(
            said.contains(&name) && said.contains("made meanwhile") && said.lines().count() == 1,
            "{said}"
        );
        assert_eq!(store.get(key).unwrap(), b"another object");
        assert!(store.uploads(key) == 0 && !dir.join("m").exists());
        // Without another object, it is made.
        store.request("DELETE", &format!("disks/{key}"), &["--fail"]).ok();
        store.zebu(&["backup", "-f", "raw", "--manifest", "m", disk, &name]).ok();
        store.zebu(&["verify", "--manifest", "m", &name]).ok();
        std::fs::remove_file(dir.join("m")).unwrap();
    }
    // It lives as long as the process, and the store must not.
    proxy.change(|_, _| Mishap::None);
}

#[test]
fn an_upload_to_a_store_that_does_not_answer_ends_at_a_signal() {
    let scratch = Scratch::new("store-silent");
    let dir = scratch.path();
    let mut content = vec![0; 48 << 20];
    noise(&mut content, 3);
    std::fs::write(dir.join("noise.raw"), content).unwrap();
    let store = ObjectStore::start(dir);
    let words = ["backup", "-r", "4M", "-f", "raw", "--manifest", "m", "noise.raw", "s3://disks/silent"];
    let proxy = WebProxy::start(store.port(), |_, _| Mishap::None);
    let url = proxy.url("");
    let mut child =
        store.command(&[("AWS_ENDPOINT_URL", &url)], &words).stderr(Stdio::null()).spawn().unwrap();
    store.wait_for_parts("silent", 2);
    store.suspend();
    let before = proxy.requests();
    wait_until("the store is asked and does not answer", || proxy.requests() > before);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    // By the signal, which is what ends it: the store is asked for much longer.
    let code = end_of(&mut child).code();
    assert!(code == Some(130) && !dir.join("m").exists(), "{code:?}");
    store.resume();
    assert!(store.get("silent").is_none());
}
