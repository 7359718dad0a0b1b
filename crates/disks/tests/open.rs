//! The library alone opens what a user names.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use zebu_disks::{Context, DiskError, Disks, Notice, Notices};
use zebu_engine::storage::{IoBuf, Worker, WorkerConfig};
use zebu_engine::{ErrorKind, OpenOptions};

/// Bytes of the disk.
const LEN: usize = 256 << 10;

fn content() -> Vec<u8> {
    (0..LEN).map(|at| (at / 512 % 251) as u8 + 1).collect()
}

/// The bytes of the disk that a name leads to.
fn read(context: &Context, name: impl AsRef<OsStr>) -> Vec<u8> {
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let image = context.open(&worker, name.as_ref(), OpenOptions::default()).unwrap();
    let len = image.virtual_size() as usize;
    let (read, bufs) = worker.block_on(image.read(&worker, 0, IoBuf::zeroed(len).into()));
    read.unwrap();
    let mut bytes = vec![0; len];
    bufs.copy_to(0, &mut bytes);
    worker.block_on(image.close(&worker)).unwrap();
    bytes
}

fn raw_file(dir: &Path) -> PathBuf {
    let path = dir.join("disk.raw");
    std::fs::write(&path, content()).unwrap();
    path
}

#[test]
fn paths_options_and_drivers_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = raw_file(dir.path());
    let context = Context::default();
    assert_eq!(read(&context, &path), content());
    let shown = path.display();
    let json = format!("json:{{'driver': 'raw', 'file': {{'driver': 'file', 'filename': '{shown}'}}}}");
    assert_eq!(read(&context, json), content());
    let part = format!(
        "json:{{'driver': 'raw', 'offset': 512, 'size': 1024, 'file': {{'driver': 'file', 'filename': '{shown}'}}}}"
    );
    assert_eq!(read(&context, part), content()[512..1536]);
}

#[test]
fn packed_files_are_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw.zst");
    let mut packed = vec![0; zstd_safe::compress_bound(LEN)];
    let len = zstd_safe::compress(&mut packed[..], &content(), 3).unwrap();
    std::fs::write(&path, &packed[..len]).unwrap();
    assert_eq!(read(&Context::default(), &path), content());
}

#[test]
fn files_on_web_servers_are_opened_and_their_servers_notices_heard() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hearing = Arc::clone(&heard);
    let notices = Notices::to(move |notice| {
        if let Notice::Unversioned(line) = notice {
            hearing.lock().unwrap().push(line.to_owned());
        }
    });
    let context = Context { disks: Arc::new(Disks::new(notices)), ..Context::default() };
    assert_eq!(read(&context, serve(content())), content());
    assert_eq!(heard.lock().unwrap().len(), 1, "{heard:?}");
    context.disks.close().unwrap();
}

#[test]
fn names_that_lead_nowhere_are_refused_without_their_secrets() {
    let context = Context::default();
    let worker = Worker::new(&WorkerConfig::default()).unwrap();
    let refused =
        |name: &str| context.open(&worker, OsStr::new(name), OpenOptions::default()).map(drop).unwrap_err();
    let error = refused("ssh://user:secret@host/x");
    assert!(matches!(error, DiskError::Name { .. }) && !error.to_string().contains("secret"), "{error}");
    assert!(refused("json:{").to_string().contains("JSON"));
    let missing = refused("/nonexistent/disk.raw");
    assert!(matches!(&missing, DiskError::Engine(error) if error.kind() == ErrorKind::Io), "{missing}");
}

/// Serves a file with ranges, and without versions; its URL.
fn serve(bytes: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/disk.raw", listener.local_addr().unwrap());
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let bytes = bytes.clone();
            thread::spawn(move || answer(client, &bytes));
        }
    });
    url
}

/// Answers one request.
fn answer(client: TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let (mut range, mut lines) = (0..bytes.len(), BufReader::new(client.try_clone()?).lines());
    let is_head = lines.next().transpose()?.is_some_and(|line| line.starts_with("HEAD"));
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some((start, end)) = line.strip_prefix("range: bytes=").and_then(|range| range.split_once('-'))
        {
            let end = end.parse().map_or(bytes.len(), |last: usize| bytes.len().min(last + 1));
            range = start.parse().unwrap_or(0)..end;
        }
    }
    let (start, last, all) = (range.start, range.end - 1, bytes.len());
    let mut client = client;
    write!(
        client,
        "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: {}\r\n",
        range.len()
    )?;
    write!(client, "Accept-Ranges: bytes\r\nContent-Range: bytes {start}-{last}/{all}\r\n\r\n")?;
    if is_head { Ok(()) } else { client.write_all(&bytes[range]) }
}
