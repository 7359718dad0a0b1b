//! Images of registries: distribution, read and written by zebu, with skopeo and QEMU beside it.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use zebu_tests::certificates::certificates;
use zebu_tests::nbd_client::Client;
use zebu_tests::program::finish;
use zebu_tests::registry::{
    Guests, LEN, Registry, TokenServer, blob_digest, command, digest, skopeo, source, zebu,
};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::Server;
use zebu_tests::web_proxy::{Mishap, WebProxy};

#[test]
fn what_is_pushed_is_read_by_ranges_wherever_a_name_is_taken() {
    let scratch = Scratch::new("registry-ranges");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let name = registry.image("images/disk:v1");
    let pushed = zebu(dir, &["push", "--output", "json", "disk.qcow2", &name]).ok();
    let pinned = registry.image(&format!("images/disk@{}", digest(&pushed.stdout)));
    let again = zebu(dir, &["push", "--output", "json", "disk.qcow2", &name]).ok();
    assert!(again.stdout.contains("\"was-there\": true"), "{}", again.stdout);

    let info = zebu(dir, &["info", "--output", "json", &name]).ok();
    let info: serde_json::Value = serde_json::from_str(&info.stdout).unwrap();
    assert_eq!((info["format"].as_str(), info["virtual-size"].as_u64()), (Some("qcow2"), Some(LEN as u64)));
    for name in [&name, &pinned] {
        zebu(dir, &["compare", name, "disk.raw"]).ok();
    }
    zebu(dir, &["map", &name]).ok();
    zebu(dir, &["verify", &name]).ok();
    zebu(dir, &["convert", "-O", "raw", &name, "copy.raw"]).ok();
    assert!(std::fs::read(dir.join("copy.raw")).unwrap() == content);
    zebu(dir, &["backup", &name, "backup.qcow2"]).ok();
    zebu(dir, &["compare", "backup.qcow2", "disk.raw"]).ok();

    // With the cache, a second run asks for no byte of the blob but those that tell what it is.
    zebu(dir, &["compare", "--cache-dir", "cache", &name, "disk.raw"]).ok();
    let second = zebu(dir, &["compare", "-v", "--cache-dir", "cache", &name, "disk.raw"]).ok();
    assert!(second.stderr.contains("cache 'cache'"), "{}", second.stderr);
    assert!(!second.stderr.contains("not cached"), "{}", second.stderr);

    let server = Server::start(dir, &format!("--cache-dir cache --overlay own.qcow2 {name}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    for at in (0..LEN).step_by(1 << 20) {
        assert!(client.read(at as u64, 1 << 20).unwrap() == content[at..][..1 << 20], "{at}");
    }
    client.write(0, 0, &[7; 4096]).unwrap();
    drop(client);
    server.stop();
}

#[test]
fn skopeo_reads_what_zebu_pushes_and_zebu_what_skopeo_copies() {
    let scratch = Scratch::new("registry-skopeo");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let port = registry.port();
    // Each kind goes through a layout of zebu's, the registry by skopeo, and a layout of skopeo's.
    for (kind, file) in [("qcow2", "disk.qcow2"), ("raw-zstd", "disk.raw"), ("container-disk", "disk.qcow2")]
    {
        let layout = format!("oci-layout:made-{kind}:v1");
        zebu(dir, &["push", "--as", kind, file, &layout]).ok();
        zebu(dir, &["compare", &layout, "disk.raw"]).ok();
        skopeo(
            dir,
            &format!(
                "copy --dest-tls-verify=false oci:made-{kind}:v1 docker://127.0.0.1:{port}/copied/{kind}:v1"
            ),
        );
        let name = registry.image(&format!("copied/{kind}:v1"));
        zebu(dir, &["compare", &name, "disk.raw"]).ok();
        zebu(dir, &["pull", &name, &format!("pulled-{kind}")]).ok();
        zebu(dir, &["compare", &format!("pulled-{kind}"), "disk.raw"]).ok();
        let pushed = registry.image(&format!("pushed/{kind}:v2"));
        zebu(dir, &["push", "--as", kind, file, &pushed]).ok();
        skopeo(
            dir,
            &format!(
                "copy --src-tls-verify=false docker://127.0.0.1:{port}/pushed/{kind}:v2 oci:back-{kind}:v2"
            ),
        );
        zebu(dir, &["compare", &format!("oci-layout:back-{kind}:v2"), "disk.raw"]).ok();
    }
}

#[test]
fn a_disk_is_converted_into_an_image_of_a_registry() {
    let scratch = Scratch::new("registry-convert");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let (plain, named) = (registry.image("converted/disk:v1"), registry.image("converted/disk:v2"));
    let out = zebu(dir, &["convert", "disk.raw", &plain]).ok();
    assert!(out.stdout.starts_with(&format!("{plain}: sha256:")), "{out}");
    let out = zebu(dir, &["convert", "-O", "raw", "--output", "json", "disk.qcow2", &named]).ok();
    let report: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    assert_eq!(report["image"], named.as_str());
    for image in [plain.as_str(), &named] {
        zebu(dir, &["compare", image, "disk.raw"]).ok();
    }
    // The default is compressed.
    zebu(dir, &["pull", &plain, "pulled"]).ok();
    let info = zebu(dir, &["info", "pulled"]).ok();
    assert!(info.stdout.contains("file format: qcow2") && info.stdout.contains("zstd"), "{info}");
    for (options, why) in
        [(vec!["-n"], "-n"), (vec!["-O", "vmdk"], "another format"), (vec!["-B", "b"], "-B")]
    {
        let out = zebu(dir, &[&["convert"][..], &options, &["disk.raw", &plain]].concat());
        assert!(out.code == Some(1) && out.stderr.contains(why), "{out}");
    }
}

#[test]
fn ranges_are_compared_with_the_hashes_that_a_push_attaches() {
    let scratch = Scratch::new("registry-hashes");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let (name, raw) = (registry.image("images/disk:v1"), registry.image("images/raw:v1"));
    let pushed = zebu(dir, &["push", "--output", "json", "disk.qcow2", &name]).ok();
    zebu(dir, &["push", "disk.raw", &raw]).ok();
    for name in [&name, &raw] {
        zebu(dir, &["compare", "--require-verified", name, "disk.raw"]).ok();
        zebu(dir, &["compare", "--require-verified", "--cache-dir", "cache", name, "disk.raw"]).ok();
    }
    // They refer to the image, and its list has them once, however often it is pushed.
    zebu(dir, &["push", "disk.qcow2", &name]).ok();
    let list = registry.manifest_of_tag("images/disk", &digest(&pushed.stdout).replace(':', "-"));
    assert_eq!(list.matches("application/vnd.zebu.hashes.v1").count(), 1, "{list}");

    // A flipped bit is not read, with a cache that has other blocks neither.
    let blob = blob_digest(dir, "disk.qcow2");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(registry.blob(&blob)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9 << 20).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 9 << 20).unwrap();
    let copy = ["convert", "-O", "raw", &name, "copy.raw"];
    let refused = zebu(dir, &copy).exits(1);
    assert!(refused.stderr.contains("not what its hash says"), "{}", refused.stderr);
    let server = Server::start(dir, &format!("--read-only {name}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    let is_read = |at: usize, read: Result<Vec<u8>, _>| match read {
        Ok(bytes) => {
            assert!(bytes == content[at..][..1 << 16], "{at}");
            true
        }
        Err(_) => false,
    };
    let read = (0..LEN).step_by(1 << 16).filter(|at| is_read(*at, client.read(*at as u64, 1 << 16))).count();
    assert_eq!(read, LEN / (1 << 16) - 1);
    drop(client);
    let told = server.stop_with_messages();
    assert!(told.contains("not what its hash says"), "{told}");
    // What the cache has is right, and need not be fetched.
    zebu(dir, &["compare", "--require-verified", "--cache-dir", "cache", &name, "disk.raw"]).ok();
    file.write_all_at(&byte, 9 << 20).unwrap();
    zebu(dir, &copy).ok();
    assert!(std::fs::read(dir.join("copy.raw")).unwrap() == content);

    // Hashes that are not those of the image are none.
    let hashes = registry.referring_blob(&list);
    std::fs::write(
        registry.blob(&hashes),
        vec![0; std::fs::metadata(registry.blob(&hashes)).unwrap().len() as usize],
    )
    .unwrap();
    let refused = zebu(dir, &["info", &name]).exits(1);
    assert!(
        refused.stderr.contains(&hashes) && refused.stderr.contains("another digest"),
        "{}",
        refused.stderr
    );

    // Who copies an image may leave its hashes.
    let port = registry.port();
    skopeo(
        dir,
        &format!(
            "copy --src-tls-verify=false --dest-tls-verify=false docker://127.0.0.1:{port}/images/raw:v1 \
             docker://127.0.0.1:{port}/copied/raw:v1"
        ),
    );
    let copied = registry.image("copied/raw:v1");
    zebu(dir, &["compare", &copied, "disk.raw"]).ok();
    let refused = zebu(dir, &["info", "--require-verified", &copied]).exits(1);
    assert!(refused.stderr.contains("zebu pull") && refused.stderr.contains("sha256:"), "{}", refused.stderr);
}

#[test]
fn users_and_tls_are_those_of_the_files_that_people_have() {
    let scratch = Scratch::new("registry-users");
    let dir = scratch.path();
    source(dir);
    certificates(dir);
    let registry = Registry::start(dir, Guests::User);
    let host = format!("localhost:{}", registry.port());
    let name = format!("oci://{host}/images/disk:v1");
    let ca = ["--tls-ca", "ca-cert.pem"];
    let push: Vec<&str> = ["push"].into_iter().chain(ca).chain(["disk.qcow2", &name]).collect();
    let compare: Vec<&str> = ["compare"].into_iter().chain(ca).chain([name.as_str(), "disk.raw"]).collect();
    let refused = zebu(dir, &push).exits(1);
    assert!(refused.stderr.contains("docker login"), "{}", refused.stderr);
    // By the files of docker and of podman, and by a helper.
    std::fs::create_dir(dir.join(".docker")).unwrap();
    let docker = dir.join(".docker/config.json");
    std::fs::write(&docker, format!("{{\"auths\":{{\"{host}\":{{\"auth\":\"dXNlcjp3cm9uZw==\"}}}}}}"))
        .unwrap();
    let refused = zebu(dir, &push).exits(1);
    assert!(refused.stderr.contains("401") && !refused.stderr.contains("wrong"), "{}", refused.stderr);
    let entry = format!("{{\"auths\":{{\"{host}\":{{\"auth\":\"dXNlcjpzZWNyZXQ=\"}}}}}}");
    std::fs::write(&docker, &entry).unwrap();
    zebu(dir, &push).ok();
    zebu(dir, &compare).ok();
    std::fs::rename(&docker, dir.join("auth.json")).unwrap();
    zebu(dir, &compare).exits(2);
    let mut by_podman = command(dir, &compare);
    by_podman.env("REGISTRY_AUTH_FILE", dir.join("auth.json"));
    finish(by_podman).ok();
    std::fs::write(&docker, "{\"credsStore\":\"tests\"}").unwrap();
    let helper = dir.join("docker-credential-tests");
    let text = format!(
        "#!/bin/sh\nread host\n[ \"$host\" = {host} ] && echo '{{\"Username\":\"user\",\"Secret\":\"secret\"}}'\n"
    );
    std::fs::write(&helper, text).unwrap();
    std::fs::set_permissions(&helper, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut by_helper = command(dir, &compare);
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap_or_default());
    by_helper.env("PATH", path);
    finish(by_helper).ok();
    let refused = zebu(dir, &compare).exits(2);
    assert!(refused.stderr.contains("docker-credential-tests"), "{}", refused.stderr);
}

#[test]
fn tokens_are_got_for_the_user_and_again_when_they_end() {
    let scratch = Scratch::new("registry-tokens");
    let dir = scratch.path();
    let content = source(dir);
    let registry = Registry::start(dir, Guests::All);
    let tokens = TokenServer::start(300);
    let rule = |tokens: &TokenServer| {
        let tokens = tokens.clone();
        move |_, head: &str| {
            if tokens.is_good(head) { Mishap::None } else { Mishap::Answer(tokens.denial()) }
        }
    };
    let proxy = WebProxy::start(registry.port(), rule(&tokens));
    let host = proxy.url("").replace("http://", "");
    let name = format!("oci://{host}/images/disk:v1");
    std::fs::create_dir(dir.join(".docker")).unwrap();
    let entry = format!("{{\"auths\":{{\"{host}\":{{\"auth\":\"dXNlcjpzZWNyZXQ=\"}}}}}}");
    std::fs::write(dir.join(".docker/config.json"), entry).unwrap();
    zebu(dir, &["push", "disk.qcow2", &name]).ok();
    assert!(tokens.given() > 0 && tokens.given_to_user() == tokens.given());
    // All end after each tenth request.
    let (count, own) = (Arc::new(AtomicUsize::new(0)), tokens.clone());
    proxy.change(move |_, head| {
        if !own.is_good(head) {
            return Mishap::Answer(own.denial());
        }
        if count.fetch_add(1, Ordering::SeqCst) % 10 == 9 {
            own.end_all();
        }
        Mishap::None
    });
    let before = tokens.given();
    zebu(dir, &["convert", "-O", "raw", &name, "copy.raw"]).ok();
    assert!(std::fs::read(dir.join("copy.raw")).unwrap() == content);
    assert!(tokens.given() > before + 1, "{before} {}", tokens.given());
    // A server in its sandbox, which can't read the file any more.
    proxy.change(rule(&tokens));
    let home = dir.to_str().unwrap();
    let server = Server::start_with(dir, ("HOME", home), &format!("--read-only {name}"));
    let mut client = Client::open(server.socket(), "").unwrap();
    for at in (0..LEN).step_by(1 << 20) {
        if at % (8 << 20) == 0 {
            tokens.end_all();
        }
        assert!(client.read(at as u64, 1 << 20).unwrap() == content[at..][..1 << 20], "{at}");
    }
    drop(client);
    server.stop();
}

#[test]
fn a_registry_that_lies_is_told_and_nothing_gets_its_name() {
    let scratch = Scratch::new("registry-lies");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let name = registry.image("images/disk:v1");
    zebu(dir, &["push", "--as", "raw-zstd", "disk.raw", &registry.image("images/packed:v1")]).ok();
    zebu(dir, &["push", "disk.qcow2", &name]).ok();
    zebu(dir, &["push", "disk.raw", &registry.image("images/raw:v1")]).ok();
    let leftover = || {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        entries
            .map(|name| name.to_string_lossy().into_owned())
            .filter(|name| name.contains("target"))
            .collect::<Vec<_>>()
    };
    // A flipped bit in the middle.
    let blob = blob_digest(dir, "disk.qcow2");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(registry.blob(&blob)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 9 << 20).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 9 << 20).unwrap();
    let refused = zebu(dir, &["pull", &name, "target"]).exits(1);
    for word in [name.as_str(), &blob, "another digest"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
    assert_eq!(leftover(), Vec::<String>::new());
    file.write_all_at(&byte, 9 << 20).unwrap();

    // What is on the way: other lengths, digests and media types, redirects, a registry that is busy.
    let proxy = WebProxy::start(registry.port(), |_, _| Mishap::None);
    let through = |image: &str| format!("oci://{}/{image}", proxy.url("").replace("http://", ""));
    let lie = |old: &'static str, new: &'static str, of: &'static str| {
        proxy.change(move |_, head| if head.contains(of) { Mishap::Replace(old, new) } else { Mishap::None });
        let told = zebu(dir, &["pull", &through("images/raw:v1"), "target"]).exits(1).stderr;
        assert_eq!(leftover(), Vec::<String>::new(), "{told}");
        told
    };
    let other = "Docker-Content-Digest: sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\r\nX-Old: ";
    assert!(lie("Docker-Content-Digest: ", other, "manifests/").contains("another digest"));
    assert!(lie("manifest.v1+json", "index.v1+json", "manifests/").contains("media type"));
    assert!(lie("/41943040", "/41943041", "blobs/").contains("the manifest says 41943040"));
    proxy.change(|_, head| {
        if head.contains("manifests/") {
            Mishap::Answer("307 Temporary Redirect\r\nLocation: http://127.0.0.2:1/x?secret".to_owned())
        } else {
            Mishap::None
        }
    });
    let told = zebu(dir, &["info", &through("images/raw:v1")]).exits(1).stderr;
    assert!(told.contains("another server") && !told.contains("secret"), "{told}");
    let count = Arc::new(AtomicUsize::new(0));
    proxy.change(move |_, head| match count.fetch_add(1, Ordering::SeqCst) {
        1 if head.contains("manifests/") => {
            Mishap::Answer("429 Too Many Requests\r\nRetry-After: 1".to_owned())
        }
        4 => Mishap::Answer("503 Service Unavailable\r\nRetry-After: 0".to_owned()),
        _ => Mishap::None,
    });
    zebu(dir, &["pull", &through("images/packed:v1"), "busy"]).ok();
    zebu(dir, &["compare", "busy", "disk.raw"]).ok();
    for (name, word) in [
        (registry.image("images/missing:v1"), "404"),
        (registry.image("images/disk:missing"), "404"),
        (registry.image(&format!("images/disk@{blob}")), "manifest sha256"),
    ] {
        let told = zebu(dir, &["info", &name]).exits(1).stderr;
        assert!(told.contains(word) && told.contains("/images/"), "{told}");
    }
}

#[test]
fn an_interrupted_push_and_an_interrupted_pull_go_on() {
    let scratch = Scratch::new("registry-interrupted");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let count = Arc::new(AtomicUsize::new(0));
    let proxy = WebProxy::start(registry.port(), {
        let count = Arc::clone(&count);
        move |_, head| {
            let is_chunk = head.starts_with("PATCH ");
            // The second chunk is taken, and its answer is lost; the fourth one is not.
            match if is_chunk { count.fetch_add(1, Ordering::SeqCst) } else { 0 } {
                1 => Mishap::LostAnswer,
                3 => Mishap::Answer("503 Service Unavailable\r\nRetry-After: 0".to_owned()),
                _ => Mishap::None,
            }
        }
    });
    let name = format!("oci://{}/images/disk:v1", proxy.url("").replace("http://", ""));
    zebu(dir, &["push", "disk.raw", &name]).ok();
    assert!(count.load(Ordering::SeqCst) < 10, "{count:?} chunks");
    // A pull whose connections end after so many bytes each.
    proxy.change(|_, head| if head.contains("/blobs/") { Mishap::CutAfter(600_000) } else { Mishap::None });
    zebu(dir, &["pull", &name, "pulled"]).ok();
    zebu(dir, &["compare", "-f", "raw", "pulled", "disk.raw"]).ok();
    // One that stops, and another one after it.
    let part = format!(".again.{}.part", &blob_digest(dir, "disk.raw")[7..23]);
    let content = std::fs::read(dir.join("disk.raw")).unwrap();
    std::fs::write(dir.join(&part), &content[..10 << 20]).unwrap();
    proxy.change(|_, _| Mishap::None);
    let again = zebu(dir, &["pull", "--output", "json", &name, "again"]).ok();
    assert!(again.stdout.contains("\"resumed-at\": 10485760"), "{}", again.stdout);
    assert!(std::fs::read(dir.join("again")).unwrap() == content && !dir.join(&part).exists());
    // What was there before may be wrong.
    std::fs::write(dir.join(part.replace("again", "third")), vec![1; 5 << 20]).unwrap();
    zebu(dir, &["pull", &name, "third"]).ok();
    assert!(std::fs::read(dir.join("third")).unwrap() == content);
    zebu(dir, &["pull", &name, "third"]).exits(1);
}

#[test]
fn mirrors_are_asked_first_and_need_not_be_right() {
    let scratch = Scratch::new("registry-mirrors");
    let dir = scratch.path();
    source(dir);
    let registry = Registry::start(dir, Guests::All);
    let name = registry.image("images/disk:v1");
    zebu(dir, &["push", "disk.raw", &name]).ok();
    let proxy = WebProxy::start(registry.port(), |_, _| Mishap::None);
    // The registry itself is nowhere.
    let gone = "oci://127.0.0.1:1/images/disk:v1";
    let refused = zebu(dir, &["info", gone]).exits(1);
    assert!(refused.stderr.contains("127.0.0.1:1"), "{}", refused.stderr);
    let mirror = proxy.url("");
    zebu(dir, &["compare", "-f", "raw", "--mirror", &mirror, gone, "disk.raw"]).ok();
    zebu(dir, &["info", "--mirror", &format!("other.example={mirror}"), gone]).exits(1);
    std::fs::create_dir_all(dir.join("hosts/127.0.0.1:1")).unwrap();
    std::fs::write(dir.join("hosts/127.0.0.1:1/hosts.toml"), format!("[host.\"{mirror}\"]\n")).unwrap();
    let before = proxy.requests();
    zebu(dir, &["pull", "--hosts-dir", "hosts", gone, "by-file"]).ok();
    assert!(proxy.requests() > before);
    // A mirror that is wrong costs time only.
    proxy.change(|_, head| {
        if head.contains("blobs/") { Mishap::Replace("/41943040", "/41943041") } else { Mishap::None }
    });
    zebu(dir, &["pull", "--mirror", &mirror, &name, "in-spite"]).ok();
    zebu(dir, &["compare", "-f", "raw", "in-spite", "disk.raw"]).ok();
}
