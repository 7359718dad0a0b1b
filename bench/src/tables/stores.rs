//! Objects in stores: copies to and from MinIO, and the cost of `--verify`.

use crate::Outcome;
use crate::fio::{Ask, fio, fio_once};
use crate::images::noise;
use crate::lab::{Lab, mib, remove};
use crate::metric::{Metric, Sample};
use crate::process::{Usage, find, measure_ok, run};
use crate::run::{Side, sample};
use crate::servers::with_cpu;
use crate::tables::serving::in_order;
use crate::web::{BUCKET, Daemon, Origin, STORE_PASSWORD, STORE_USER, minio, store_variables, web_server};
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

/// A program that copies files to and from a store.
#[derive(Debug, Clone, Copy)]
enum Copier {
    Zebu,
    Mc,
    Aws,
}

impl Copier {
    const ALL: [Self; 3] = [Self::Zebu, Self::Mc, Self::Aws];

    fn name(self) -> &'static str {
        match self {
            Self::Zebu => "zebu",
            Self::Mc => "mc",
            Self::Aws => "aws",
        }
    }

    fn is_there(self) -> bool {
        matches!(self, Self::Zebu) || find(self.name()).is_some()
    }

    /// The name of an object as the program has it.
    fn object(self, key: &str) -> String {
        match self {
            Self::Zebu | Self::Aws => format!("s3://{BUCKET}/{key}"),
            Self::Mc => format!("store/{BUCKET}/{key}"),
        }
    }

    /// A copy of the file or object `from`.
    fn copy(self, lab: &Lab, port: u16, from: &str, to: &str) -> Command {
        let mut command = match self {
            Self::Zebu => {
                let mut command = lab.zebu();
                command.args(["convert", "-f", "raw", "-O", "raw"]);
                command
            }
            Self::Mc => {
                let mut command = Command::new("mc");
                let store = format!("http://{STORE_USER}:{STORE_PASSWORD}@127.0.0.1:{port}");
                command.env("MC_HOST_store", store).env("MC_CONFIG_DIR", lab.file("mc"));
                command.args(["--quiet", "cp"]);
                command
            }
            Self::Aws => {
                let mut command = Command::new("aws");
                command.args(["s3", "cp", "--only-show-errors"]);
                command
            }
        };
        command.args([from, to]).envs(store_variables(port));
        command
    }
}

/// A raw disk of noise to MinIO and from it, by whole processes.
pub(super) fn transfers(lab: &Lab) -> Outcome {
    let gib = 1;
    let source = lab.file("source.raw");
    noise(&source, gib << 30)?;
    let data = lab.file("store");
    let (store, port) = minio(&data)?;
    let copiers: Vec<Copier> = Copier::ALL.into_iter().filter(|copier| copier.is_there()).collect();
    if copiers.len() < 2 {
        return Err(
            "neither mc nor aws is there to be measured beside: go install github.com/minio/mc@latest, \
                    or pip install awscli"
                .to_owned(),
        );
    }
    let from = source.display().to_string();
    let up = |copier: Copier| {
        let (from, source) = (from.clone(), &source);
        let copy = move || copier.copy(lab, port, &from, &copier.object(copier.name()));
        Side::new(copier.name(), move || figures(source, &measure_ok(&mut copy())?))
    };
    lab.row(&format!("convert raw to MinIO, {gib} GiB"), copiers.iter().copied().map(up));
    let key = "source";
    run(&mut Copier::Zebu.copy(lab, port, &from, &Copier::Zebu.object(key)))?;
    let target = lab.file("target.raw");
    let to = target.display().to_string();
    let down = |copier: Copier, until: Until| {
        let (to, source, target) = (to.clone(), &source, &target);
        Side::new(copier.name(), move || {
            let mut usage = measure_ok(&mut copier.copy(lab, port, &copier.object(key), &to))?;
            // zebu's file is durable when it ends.
            if until == Until::IsDurable && !matches!(copier, Copier::Zebu) {
                let sync = measure_ok(Command::new("sync").arg(target))?;
                usage.wall += sync.wall;
                usage.cpu += sync.cpu;
            }
            run(Command::new("cmp").arg(source).arg(target))?;
            remove(target)?;
            figures(source, &usage)
        })
    };
    for until in [Until::Ends, Until::IsDurable] {
        let sides = copiers.iter().map(|copier| down(*copier, until));
        lab.row(&format!("convert raw from MinIO, {gib} GiB, until {}", until.name()), sides);
    }
    store.end()?;
    fs::remove_dir_all(&data).map_err(|error| format!("{}: {error}", data.display()))
}

/// The end of a measured copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    Ends,
    IsDurable,
}

impl Until {
    fn name(self) -> &'static str {
        match self {
            Self::Ends => "each program ends",
            Self::IsDurable => "the file is durable",
        }
    }
}

/// Figures of a copy of `source`.
fn figures(source: &Path, usage: &Usage) -> Outcome<Sample> {
    let mut figures = vec![(Metric::MibPerSecond, mib(source)? / usage.wall.as_secs_f64())];
    figures.extend(sample(usage));
    Ok(figures)
}

/// Bytes of the disk that is verified.
const VERIFIED: u64 = 512 << 20;

/// Reads of a server with a cache, cold and warm, with and without `--verify`.
pub(super) fn verified(lab: &Lab) -> Outcome {
    let files = lab.file("www");
    fs::create_dir_all(&files).map_err(|error| error.to_string())?;
    let source = files.join("data.raw");
    noise(&source, VERIFIED)?;
    let manifest = lab.file("data.manifest");
    let copy = lab.file("copy.qcow2");
    run(lab.zebu().args(["backup", "-q", "-f", "raw", "--manifest"]).arg(&manifest).arg(&source).arg(&copy))?;
    remove(&copy)?;
    let (_web, port) = web_server(&lab.dir, Origin::Files(&files))?;
    let url = format!("http://127.0.0.1:{port}/data.raw");
    let side = |verify: Option<&Path>, load: Load| {
        let (url, verify) = (url.clone(), verify.map(Path::to_owned));
        let who = if verify.is_some() { "zebu, --verify" } else { "zebu" };
        Side::new(who, move || {
            let cache = lab.file("cache");
            let start = || serve(lab, &cache, &url, verify.as_deref());
            let _ = fs::remove_dir_all(&cache);
            if load != Load::Cold {
                let (server, target) = start()?;
                fio_once(in_order("read"), VERIFIED, &words(&target))?;
                server.end()?;
            }
            let (server, target) = start()?;
            let figures = with_cpu(&server.0, || match load {
                Load::Cold | Load::Warm => fio_once(in_order("read"), VERIFIED, &words(&target)),
                Load::Random => fio(Ask::random("randread", 32), VERIFIED, lab.sized(2, 5), &words(&target)),
            })?;
            server.end()?;
            fs::remove_dir_all(&cache).map_err(|error| error.to_string())?;
            Ok(figures)
        })
    };
    for (load, name) in [
        (Load::Cold, "verified: 1 MiB sequential reads, cold cache"),
        (Load::Warm, "verified: 1 MiB sequential reads, warm cache"),
        (Load::Random, "verified: 4 KiB random reads, depth 32, warm cache"),
    ] {
        lab.row(name, [side(None, load), side(Some(&manifest), load)]);
    }
    remove(&source)
}

/// How a disk is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// In order, of the web server.
    Cold,
    /// In order, of the cache, which a server before it has filled.
    Warm,
    /// At random, of the cache.
    Random,
}

/// A server with a cache; it and fio's name of it.
fn serve(lab: &Lab, cache: &Path, url: &str, verify: Option<&Path>) -> Outcome<(Daemon, String)> {
    let socket = lab.file("verified.sock");
    let _ = fs::remove_file(&socket);
    let mut command = lab.zebu();
    command.args(["serve", "--read-only", "-f", "raw", "--nbd", &format!("unix:{}", socket.display())]);
    command.arg("--cache-dir").arg(cache);
    if let Some(manifest) = verify {
        command.arg("--verify").arg(manifest);
    }
    let server = Daemon::start(command.arg(url), || UnixStream::connect(&socket).is_ok())?;
    Ok((server, format!("--uri=nbd+unix:///?socket={}", socket.display())))
}

fn words(target: &str) -> [&str; 2] {
    ["--ioengine=nbd", target]
}
