//! How a recycled cluster is zeroed around a small write: by writing the zeroes with it, by zero-range before it, or as
//! zebu chooses by size and file system.

use super::lab::{Lab, settle};
use super::load::{Load, SMALL, scattering_step};
use crate::Outcome;
use crate::ab::{Sample, Side};
use crate::mount::{Kind, Mounted};
use crate::process::run;

/// Bytes that are filled at once.
const PIECE: u64 = 512 << 20;

/// Bytes of the disk: enough clusters that the writes take long beside the clock's resolution.
fn disk_size(lab: &Lab, cluster: u64) -> u64 {
    if cluster <= 64 << 10 { 1 << 30 } else { lab.sized(512 << 20, 2 << 30) }
}

/// `auto` beside each of the others, by cluster size and file system.
pub(super) fn recycled(lab: &Lab) -> Outcome {
    let clusters: &[(u64, &str)] = lab.sized(
        &[(64 << 10, "64k"), (1 << 20, "1M")],
        &[(16 << 10, "16k"), (64 << 10, "64k"), (256 << 10, "256k"), (1 << 20, "1M"), (2 << 20, "2M")],
    );
    let kinds: &[Kind] = lab.sized(&[Kind::Ext4, Kind::Xfs], &[Kind::Ext4, Kind::Xfs, Kind::Btrfs]);
    for kind in kinds {
        // What btrfs overwrites takes its place a second time.
        let mounted = &lab.file_system(*kind, lab.sized(4, 8) << 30)?;
        for (cluster, text) in clusters {
            let side = |policy: &'static str| {
                let run = move || zeroed_by(lab, mounted, *cluster, text, policy);
                Side { label: policy.into(), run: Box::new(run) as Box<_> }
            };
            let others = ["write", "fallocate"].map(|other| {
                let name =
                    format!("{kind:?}: 4 KiB writes into recycled clusters of {text}, auto beside {other}");
                (name, side(other))
            });
            lab.compare_each(side("auto"), others.into())?;
        }
    }
    Ok(())
}

/// Clusters that held data and are marked as zero keep their place: whoever writes to a part zeroes the rest.
fn zeroed_by(lab: &Lab, mounted: &Mounted, cluster: u64, text: &str, policy: &str) -> Outcome<Sample> {
    mounted.renew()?;
    let disk = disk_size(lab, cluster);
    let image = &mounted.path().join("recycled");
    run(lab
        .zebu()
        .args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={text}")])
        .arg(image)
        .arg(disk.to_string()))?;
    let mut recycle = lab.zebu();
    recycle.args(["io", "-f", "qcow2", "-t", "none"]);
    for what in ["-P 7", "-z"] {
        // Less than 2 GiB at a time.
        for at in (0..disk).step_by(PIECE as usize) {
            recycle.arg("-c").arg(format!("write -q {what} {at} {PIECE}"));
        }
    }
    run(recycle.arg(image))?;
    settle()?;
    let step = scattering_step(disk, cluster);
    let load = Load { block: SMALL, step, count: disk / cluster, depth: 32, write: true };
    let mut command = load.command(&lab.zebu, image);
    command.args(["--zero-policy", policy]);
    load.timed(command)
}
