//! The C interface, installed in a scratch folder, and used by programs of C: plainly, under Valgrind, and with
//! AddressSanitizer.

use crate::install::{self, functions, source};
use crate::test_programs::BUILT;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{cargo, root, target_dir};

/// The version of all symbols there are.
const VERSION: &str = "ZEBU_0.1";
/// The page whose first example in C is tried.
const GUIDE: &str = "docs/guide/c.md";

/// Why the interface can't be tested here, if so.
pub(crate) fn obstacle() -> Option<String> {
    let needed = ["cc", "c++", "nm", "pkg-config", "valgrind", "qemu-img"];
    let missing: Vec<&str> = needed.into_iter().filter(|program| find(program).is_none()).collect();
    (!missing.is_empty())
        .then(|| format!("missing: {}; `cargo xtask setup` installs them", missing.join(", ")))
}

/// How a program of C is built and run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Valgrind,
    /// AddressSanitizer, and linked to the archive.
    Address,
}

impl Way {
    /// The engines that programs use. Valgrind holds all threads up while one waits in io_uring_enter(2).
    fn engines(self) -> &'static [&'static str] {
        if self == Self::Valgrind { &["threads"] } else { &["io_uring", "threads"] }
    }

    /// Rounds of each of the four threads.
    fn rounds(self) -> &'static str {
        if self == Self::Valgrind { "250" } else { "1000" }
    }
}

pub(crate) fn test() -> Outcome {
    // With the features that all tests have, so that little is built that was not before.
    run(cargo().args(["build", "--workspace", "--locked", "--lib", "--tests"]))?;
    let target = target_dir()?;
    // On the disk that the build is on: there, holes are real.
    let scratch = TempDir::with_prefix_in("c-", &target).map_err(|e| format!("{}: {e}", target.display()))?;
    let installed = Installed { prefix: scratch.path().join("prefix"), scratch };
    install::place(&target.join(BUILT), &installed.prefix)?;
    installed.has_the_symbols_of_the_map()?;
    installed.example()?;
    for way in [Way::Plain, Way::Address, Way::Valgrind] {
        println!("{way:?}");
        for engine in way.engines() {
            installed.misuse(way, engine)?;
            installed.rounds(way, engine)?;
        }
    }
    installed.exception()
}

/// The library in a folder of its own.
struct Installed {
    scratch: TempDir,
    prefix: PathBuf,
}

impl Installed {
    /// A folder for the files of a program.
    fn folder(&self, name: &str) -> Outcome<PathBuf> {
        let folder = self.scratch.path().join(name);
        fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        Ok(folder)
    }

    fn has_the_symbols_of_the_map(&self) -> Outcome {
        let mut wanted = functions(&source().join("zebu.map"))?;
        wanted.sort();
        let library = self.prefix.join("lib/libzebu.so");
        let listed = output(Command::new("nm").args(["-D", "--defined-only"]).arg(&library))?;
        let symbols = listed.lines().filter_map(|line| line.split_whitespace().nth(2));
        let symbols = symbols.filter(|name| *name != VERSION);
        let mut found = Vec::new();
        for symbol in symbols {
            let name = symbol.strip_suffix(&format!("@@{VERSION}"));
            found.push(
                name.ok_or_else(|| format!("{}: {symbol} has no version", library.display()))?.to_owned(),
            );
        }
        found.sort();
        if found == wanted { Ok(()) } else { Err(format!("the library has {found:?}, the map {wanted:?}")) }
    }

    /// Asks pkg-config with one of its options.
    fn flags(&self, options: &[&str]) -> Outcome<Vec<String>> {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig")).args(options).arg("zebu");
        Ok(output(&mut command)?.split_whitespace().map(str::to_owned).collect())
    }

    /// Compiles a program, as the guide says.
    fn compile(&self, program: &Path, compiler: &str, way: Way) -> Outcome<PathBuf> {
        let name = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let made = self.scratch.path().join(format!("{name}-{way:?}"));
        let mut command = Command::new(compiler);
        command.args(["-g", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread"]);
        command.args(self.flags(&["--cflags"])?).arg("-o").arg(&made).arg(program);
        if way == Way::Address {
            let libraries = self.flags(&["--static", "--libs"])?;
            let archive = |flag: String| if flag == "-lzebu" { "-l:libzebu.a".to_owned() } else { flag };
            command.arg("-fsanitize=address").args(libraries.into_iter().map(archive));
        } else {
            command.args(self.flags(&["--libs"])?);
        }
        run(&mut command)?;
        Ok(made)
    }

    /// A command that runs a program.
    fn command(&self, program: &Path, way: Way) -> Command {
        let mut command =
            Command::new(if way == Way::Valgrind { "valgrind".into() } else { OsString::from(program) });
        if way == Way::Valgrind {
            command.args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]);
            command.args(["--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"]).arg(program);
        }
        command.env("LD_LIBRARY_PATH", self.prefix.join("lib"));
        command
    }

    fn program(&self, name: &str, way: Way) -> Outcome<Command> {
        let text = source().join("tests/programs").join(name);
        let compiler = if text.extension() == Some("cc".as_ref()) { "c++" } else { "cc" };
        Ok(self.command(&self.compile(&text, compiler, way)?, way))
    }

    /// The program of the guide copies a disk.
    fn example(&self) -> Outcome {
        let folder = self.folder("example")?;
        let guide = root().join(GUIDE);
        let text = fs::read_to_string(&guide).map_err(|e| format!("{}: {e}", guide.display()))?;
        let example = text.split_once("```c\n").and_then(|(_, rest)| rest.split_once("```"));
        let (example, _) = example.ok_or_else(|| format!("{GUIDE} has no example in C"))?;
        let program = folder.join("example.c");
        fs::write(&program, example).map_err(|e| format!("{}: {e}", program.display()))?;
        let image = folder.join("disk.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2"], &[&image], &["3000000"])?;
        for range in ["write -P 7 70000 5000", "write -P 9 2999000 1000"] {
            run(Command::new("qemu-io").args(["-f", "qcow2", "-c", range]).arg(&image))?;
        }
        let made = self.compile(&program, "cc", Way::Plain)?;
        let copy = folder.join("copy.raw");
        let file = fs::File::create(&copy).map_err(|e| format!("{}: {e}", copy.display()))?;
        run(self.command(&made, Way::Plain).arg(&image).stdout(file))?;
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw"], &[&image, &copy], &[])?;
        let missing = self.command(&made, Way::Plain).arg(folder.join("missing")).status();
        match missing.map_err(|e| e.to_string())?.code() {
            Some(1) => Ok(()),
            code => Err(format!("the example ends with {code:?} for an image that is not there")),
        }
    }

    /// Threads that use a disk, which QEMU judges.
    fn rounds(&self, way: Way, engine: &str) -> Outcome {
        let folder = self.folder(&format!("rounds-{way:?}-{engine}"))?;
        run(self.program("rounds.c", way)?.arg(&folder).args([engine, way.rounds()]))?;
        let image = folder.join("disk.qcow2");
        qemu_img(&["check", "-q", "-f", "qcow2"], &[&image], &[])?;
        qemu_img(&["compare", "-f", "qcow2", "-F", "raw"], &[&image, &folder.join("expected.raw")], &[])
    }

    fn misuse(&self, way: Way, engine: &str) -> Outcome {
        let folder = self.folder(&format!("misuse-{way:?}-{engine}"))?;
        run(self.program("misuse.c", way)?.arg(&folder).arg(engine))?;
        let images = [folder.join("misuse.qcow2"), folder.join("copy.qcow2")];
        qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2"], &[&images[0], &images[1]], &[])
    }

    /// An exception of C++ ends the process.
    fn exception(&self) -> Outcome {
        run(self.program("throws.cc", Way::Plain)?.arg(self.folder("throws")?))
    }
}

fn qemu_img(options: &[&str], files: &[&Path], rest: &[&str]) -> Outcome {
    run(Command::new("qemu-img").args(options).args(files).args(rest))
}
