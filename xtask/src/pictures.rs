//! Pictures of the documents, made from what they show: `docs/pictures`.

use clap::Args;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::{cargo, root, target_dir};

/// Lines of zebu that make a disk worth looking at: a base that is compressed, an overlay with data and zeroes, and a plain image
/// whose clusters came in no order.
const DISKS: [&str; 9] = [
    "create -q plain.qcow2 256M",
    "io plain.qcow2 -c 'write -q -P 1 0 48M' -c 'write -q -P 2 96M 40M' -c 'write -q -P 3 208M 16M'",
    "convert -c -o compression_type=zstd plain.qcow2 base.qcow2",
    "create -q -b base.qcow2 -F qcow2 disk.qcow2",
    "io disk.qcow2 -c 'write -q -P 4 8M 12M' -c 'write -q -z 32M 24M' -c 'write -q -P 5 120M 30M'",
    "map --picture --svg map.svg disk.qcow2",
    "create -q aged.qcow2 256M",
    "io aged.qcow2 -c 'write -q -P 1 128M 64M' -c 'write -q -P 2 0 40M' -c 'write -q -P 3 200M 40M' -c 'write -q -P 4 64M 48M'",
    "map --picture --host --svg map-host.svg aged.qcow2",
];

/// Pixels of a PNG, wide enough for a page at 1280.
const WIDTH: &str = "1200";

/// The options of `pictures`.
#[derive(Args)]
pub(crate) struct PicturesArgs {
    /// Where they are written; default: docs/pictures
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run this zebu, and build none
    #[arg(long, value_name = "FILE")]
    zebu: Option<PathBuf>,
}

/// The command `pictures`.
pub(crate) fn command(args: &PicturesArgs) -> Outcome {
    let drawer = find("rsvg-convert").ok_or("rsvg-convert is missing: apt install librsvg2-bin")?;
    let out = args.out.clone().unwrap_or_else(|| root().join("docs/pictures"));
    std::fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    let zebu = if let Some(program) = &args.zebu {
        std::path::absolute(program).map_err(|e| format!("{}: {e}", program.display()))?
    } else {
        run(cargo().args(["build", "--locked", "--package", "zebu-cli"]))?;
        target_dir()?.join("debug/zebu")
    };
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    for line in DISKS {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec \"$0\" {line}")]).arg(&zebu).current_dir(scratch.path());
        output(&mut shell)?;
    }
    let plot = root().join("bench/results/headline.svg");
    for (name, drawn) in [
        ("map", scratch.path().join("map.svg")),
        ("map-host", scratch.path().join("map-host.svg")),
        ("figures", plot),
    ] {
        png(&drawer, &drawn, &out.join(name).with_extension("png"))?;
    }
    Ok(())
}

/// Draws an SVG document.
fn png(drawer: &Path, from: &Path, to: &Path) -> Outcome {
    run(Command::new(drawer).args(["--width", WIDTH, "--keep-aspect-ratio"]).arg(from).arg("-o").arg(to))?;
    println!("{}", to.display());
    Ok(())
}
