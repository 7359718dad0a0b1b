//! The command `demo`: a disk's life in a minute, step by step, beside QEMU where it is installed.

mod crash;
mod web;

use crate::Outcome;
use crate::images::file_system;
use crate::process::{Usage, evict, find, measure_ok, qemu_version, run, shown};
use crate::table::{Table, number};
use crate::workspace::{cargo, target_dir};
use clap::Args;
use crash::Writes;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use web::WebServer;

/// Random writes of the step with a kill, and those of them that are flushed when it comes.
const WRITES: usize = 1000;
const FLUSHED: usize = 600;

/// The options of `demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// The folder that the file system image is made of
    #[arg(long, default_value = "/usr")]
    pub folder: PathBuf,
    /// Where the images are made (a few GiB); default: the target directory
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Size of the disk in MiB, at least 64
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(64..=65536))]
    pub size: u64,
    /// Keep the images
    #[arg(long)]
    pub keep: bool,
    /// Run this zebu, and build none
    #[arg(long, value_name = "FILE")]
    pub zebu: Option<PathBuf>,
}

/// The command `demo`.
pub fn command(args: &DemoArgs) -> Outcome {
    let zebu = match &args.zebu {
        Some(program) => std::path::absolute(program).map_err(|e| format!("{}: {e}", program.display()))?,
        None => built()?,
    };
    let base = args.dir.clone().map_or_else(target_dir, Ok)?;
    let scratch = tempfile::TempDir::with_prefix_in("zebu-demo-", &base)
        .map_err(|e| format!("{}: {e}", base.display()))?;
    let mut demo = Demo {
        dir: scratch.path().to_owned(),
        zebu,
        qemu: find("qemu-img"),
        size: args.size << 20,
        steps: 0,
        table: Table::new(["step", "zebu s", "CPU s", "qemu-img s", "CPU s"]),
    };
    demo.all(&args.folder)?;
    if args.keep {
        println!("\nThe images are kept in {}", scratch.keep().display());
    } else {
        println!("\nThe images are removed; with --keep they stay.");
    }
    Ok(())
}

/// The command, built as it is released. Cargo shows how far it is.
fn built() -> Outcome<PathBuf> {
    println!(
        "Compiling the command zebu for release, with all of its dependencies: some minutes the first time, none the next."
    );
    run(cargo().args(["build", "--release", "--locked", "--package", "zebu-cli"]))?;
    Ok(target_dir()?.join("release/zebu"))
}

/// The steps, and what they need.
struct Demo {
    dir: PathBuf,
    zebu: PathBuf,
    qemu: Option<PathBuf>,
    /// Bytes of the disk.
    size: u64,
    steps: usize,
    table: Table,
}

impl Demo {
    fn all(&mut self, folder: &Path) -> Outcome {
        let begin = Instant::now();
        self.heading(&format!("A disk of {} with the files of {}", mib(self.size), folder.display()));
        file_system(&self.file("disk.raw"), self.size, &[folder])?;
        println!("   disk.raw, an ext4 file system: {} of data", self.allocated("disk.raw")?);

        self.heading("Convert it");
        self.both(
            "convert raw to qcow2",
            "convert -f raw disk.raw disk.qcow2",
            &["disk.raw"],
            Some("convert -f raw -O qcow2 disk.raw qemu.qcow2"),
        )?;
        self.zebu("compare -f raw -F qcow2 disk.raw disk.qcow2")?;

        self.heading("Back it up, compressed");
        self.both(
            "compressed backup, zstd",
            "backup -q --compression-type zstd disk.qcow2 backup.qcow2",
            &["disk.qcow2"],
            Some("convert -f qcow2 -O qcow2 -c -o compression_type=zstd disk.qcow2 qemu.backup.qcow2"),
        )?;
        println!(
            "   disk.qcow2 takes {}, backup.qcow2 {}",
            self.allocated("disk.qcow2")?,
            self.allocated("backup.qcow2")?
        );

        self.heading(&format!("{WRITES} random writes, and a kill in their middle"));
        self.crash()?;

        self.heading("Check what the kill has left, and give back what leaked");
        self.both(
            "check",
            "check -r leaks disk.qcow2",
            &["disk.qcow2"],
            Some("check -q -f qcow2 disk.qcow2"),
        )?;

        self.heading("A snapshot, and back to it");
        self.zebu("snapshot -c before disk.qcow2")?;
        self.zebu("io -c 'write -P 9 0 32M' disk.qcow2")?;
        self.zebu("convert -l before disk.qcow2 before.raw")?;
        self.zebu("snapshot -a before disk.qcow2")?;
        self.zebu("compare disk.qcow2 before.raw")?;

        self.heading("A lazy disk: use the backup at once, from a web server");
        self.lazy_disk()?;

        println!("\n{}", self.table.render());
        match qemu_version() {
            Some(version) => {
                println!("Beside {version}.");
                println!(
                    "One run of each, files out of the page cache; `cargo xtask bench` measures in rounds."
                );
            }
            None => {
                println!("qemu-img is not installed: nothing was done beside it, and its columns are empty.");
            }
        }
        println!("All of it took {:.0} s.", begin.elapsed().as_secs_f64());
        Ok(())
    }

    fn heading(&mut self, text: &str) {
        self.steps += 1;
        println!("\n{}. {text}", self.steps);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Bytes that a file takes on its file system.
    fn allocated(&self, name: &str) -> Outcome<String> {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::metadata(self.file(name)).map_err(|e| format!("{name}: {e}"))?;
        Ok(mib(found.blocks() * 512))
    }

    /// A command line of a program, with quotes as a shell has them, in the folder of the images.
    fn line(&self, program: &Path, line: &str) -> Command {
        let mut command = Command::new(program);
        let words = line.split('\'').enumerate().flat_map(|(part, text)| match part % 2 {
            0 => text.split_whitespace().map(str::to_owned).collect(),
            _ => vec![text.to_owned()],
        });
        command.args(words).current_dir(&self.dir);
        command
    }

    /// Runs zebu, and shows what it said.
    fn zebu(&self, line: &str) -> Outcome<Usage> {
        println!("   $ zebu {line}");
        let done = measure_ok(&mut self.line(&self.zebu, line))?;
        for said in done.stdout.lines() {
            println!("     {said}");
        }
        Ok(done)
    }

    /// Runs a step by zebu and by qemu-img, the files that are read out of the page cache.
    fn both(&mut self, name: &str, ours: &str, read: &[&str], theirs: Option<&str>) -> Outcome {
        let evicted = |demo: &Self| read.iter().try_for_each(|file| evict(&demo.file(file)));
        evicted(self)?;
        let own = self.zebu(ours)?;
        let mut cells = [name.to_owned()].into_iter().chain(figures(&own)).collect::<Vec<_>>();
        let mut told = format!("   zebu {:.2} s", own.wall.as_secs_f64());
        if let (Some(program), Some(line)) = (&self.qemu, theirs) {
            evicted(self)?;
            let other = measure_ok(&mut self.line(program, line))?;
            told += &format!(", qemu-img {:.2} s", other.wall.as_secs_f64());
            cells.extend(figures(&other));
        }
        println!("{told}");
        self.table.row(cells);
        Ok(())
    }

    /// Writes at random places; the writer is killed, and what it had flushed is looked for by both programs.
    fn crash(&self) -> Outcome {
        let disk = self.file("disk.qcow2");
        let writes = Writes::random(WRITES, self.size);
        println!(
            "   zebu io writes 4 KiB at random places, with a flush every 10 writes, and is killed by SIGKILL"
        );
        let flushed = writes.send_and_kill(&self.zebu, &disk, FLUSHED)?;
        writes
            .are_there(Command::new(&self.zebu).arg("io"), &disk, flushed)
            .map_err(|e| format!("a write that was flushed is not there: {e}"))?;
        println!("   {flushed} writes were flushed before: zebu finds all of them");
        if let Some(program) = find("qemu-io") {
            writes
                .are_there(&mut Command::new(program), &disk, flushed)
                .map_err(|e| format!("qemu-io does not find a write that was flushed: {e}"))?;
            println!("   qemu-io finds all of them, too");
        }
        writes.finish(&self.zebu, &disk, flushed)?;
        println!("   The other {} are written now", WRITES - flushed);
        Ok(())
    }

    /// Serves the backup from a web server through an overlay, and reads a little of it.
    fn lazy_disk(&self) -> Outcome {
        let web = WebServer::start(&self.file("backup.qcow2"))?;
        let begin = Instant::now();
        let line = format!("serve --nbd unix:lazy.sock --overlay lazy.qcow2 {}", web.url("backup.qcow2"));
        println!("   $ zebu {line}");
        let mut server = Server::start(self.line(&self.zebu, &line))?;
        println!("     ready after {:.2} s", begin.elapsed().as_secs_f64());
        let socket = "'nbd+unix:///?socket=lazy.sock'";
        self.zebu(&format!(
            "io -f raw -c 'read 0 4M' -c 'write -P 3 1M 64k' -c 'read -P 3 1M 64k' -c flush {socket}"
        ))?;
        println!(
            "   {} of the {} on the server were fetched; the write is in lazy.qcow2",
            mib(web.sent()),
            self.allocated("backup.qcow2")?
        );
        server.end()
    }
}

/// Seconds, and seconds of processor time.
fn figures(usage: &Usage) -> [String; 2] {
    [usage.wall, usage.cpu].map(|time| number(time.as_secs_f64()))
}

fn mib(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 10.0 { format!("{mib:.1} MiB") } else { format!("{mib:.0} MiB") }
}

/// A server of zebu's; killed on drop.
struct Server(Child);

impl Server {
    /// Starts it, and waits for its line `ready`.
    fn start(mut command: Command) -> Outcome<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
        let mut server = Self(child);
        let out = server.0.stdout.take().ok_or("no pipe")?;
        let first = BufReader::new(out).lines().next().transpose().map_err(|e| e.to_string())?;
        match first.as_deref() {
            Some("ready") => Ok(server),
            _ => Err(format!("{} does not serve", shown(&command))),
        }
    }

    /// Ends it in good order.
    fn end(&mut self) -> Outcome {
        run(Command::new("kill").arg(self.0.id().to_string()))?;
        let status = self.0.wait().map_err(|e| e.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("zebu serve: {status}")) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended needs nothing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
