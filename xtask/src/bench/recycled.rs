//! How a recycled cluster is zeroed around a small write: by writing the zeroes with it, by zero-range before it, or as
//! zebu chooses by size and file system.

use super::lab::{Lab, remove, settle};
use super::load::{Load, SMALL, scattering_step};
use crate::Outcome;
use crate::ab::{Sample, Side};
use crate::mount::Kind;
use crate::process::run;
use std::path::Path;

/// Bytes of the disk.
const DISK: u64 = 512 << 20;

/// `auto` beside each of the others, by cluster size and file system.
pub(super) fn recycled(lab: &Lab) -> Outcome {
    let clusters: &[(u64, &str)] = lab.sized(
        &[(64 << 10, "64k"), (1 << 20, "1M")],
        &[(16 << 10, "16k"), (64 << 10, "64k"), (256 << 10, "256k"), (1 << 20, "1M"), (2 << 20, "2M")],
    );
    let kinds: &[Kind] = lab.sized(&[Kind::Ext4, Kind::Xfs], &[Kind::Ext4, Kind::Xfs, Kind::Btrfs]);
    for kind in kinds {
        let mounted = lab.file_system(*kind, 4 << 30)?;
        for (cluster, text) in clusters {
            for other in ["write", "fallocate"] {
                let path = mounted.path().join("recycled");
                let side = |policy: &'static str| {
                    let path = path.clone();
                    let run = move || zeroed_by(lab, &path, *cluster, text, policy);
                    Side { label: policy.into(), run: Box::new(run) as Box<_> }
                };
                let name =
                    format!("{kind:?}: 4 KiB writes into recycled clusters of {text}, auto beside {other}");
                lab.compare(&name, [side("auto"), side(other)])?;
            }
        }
    }
    Ok(())
}

/// Clusters that held data and are marked as zero keep their place: whoever writes to a part zeroes the rest.
fn zeroed_by(lab: &Lab, image: &Path, cluster: u64, text: &str, policy: &str) -> Outcome<Sample> {
    remove(image)?;
    run(lab
        .zebu()
        .args(["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={text}")])
        .arg(image)
        .arg(DISK.to_string()))?;
    let mut recycle = lab.zebu();
    recycle.args(["io", "-f", "qcow2", "-t", "none", "-c"]).arg(format!("write -q -P 7 0 {DISK}"));
    run(recycle.arg("-c").arg(format!("write -q -z 0 {DISK}")).arg(image))?;
    settle()?;
    let count = (DISK / cluster).min(4096);
    let load = Load { block: SMALL, step: scattering_step(DISK, cluster), count, depth: 32, write: true };
    let mut command = load.command(&lab.zebu, image);
    command.args(["--zero-policy", policy]);
    let figures = load.timed(command)?;
    remove(image)?;
    Ok(figures)
}
