//! The calls of a program on one file, seen by strace.

use crate::Outcome;
use crate::lab::Lab;
use crate::metric::{Metric, Sample};
use crate::process::{find, measure_ok};
use std::path::Path;
use std::process::Command;

/// Runs the command under strace and counts its calls on `file`, by what they do. io_uring hides them: the command has to
/// run its requests on threads.
pub(crate) fn calls_on(lab: &Lab, command: &Command, file: &Path) -> Outcome<Sample> {
    let strace = find("strace").ok_or("strace is missing: run `cargo xtask setup`")?;
    // A file for each thread: in one for all, a call that another's comes in between has no result beside its arguments.
    let logs = tempfile::TempDir::with_prefix_in("strace-", &lab.dir).map_err(|e| e.to_string())?;
    let mut traced = Command::new(strace);
    traced.args(["-ff", "-qq", "-y", "-ttt", "-e"]);
    traced.arg(
        "trace=read,write,pread64,pwrite64,preadv,pwritev,preadv2,pwritev2,fallocate,ftruncate,fdatasync,fsync",
    );
    traced.arg("-o").arg(logs.path().join("thread")).arg(command.get_program()).args(command.get_args());
    measure_ok(&mut traced)?;
    let said = |e: std::io::Error| format!("{}: {e}", logs.path().display());
    let mut text = String::new();
    for log in std::fs::read_dir(logs.path()).map_err(said)? {
        text += &std::fs::read_to_string(log.map_err(said)?.path()).map_err(said)?;
    }
    // Each line begins with its time, in as many digits as any other.
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    Ok(calls(&lines, file.file_name().unwrap_or_default().to_string_lossy().as_ref()))
}

/// Calls on `file` in the lines of strace; of the writes, those that are not of whole blocks of 4 KiB, and those that are
/// out of order. (The name of a new file may be a temporary one, with more before and behind.)
fn calls(lines: &[&str], file: &str) -> Sample {
    let (mut reads, mut writes, mut unaligned, mut syncs, mut others) = (0.0, 0.0, 0.0, 0.0, 0.0);
    let (mut out_of_order, mut end) = (0.0, None);
    for line in lines {
        let Some((name, rest)) = line.split_once('(') else { continue };
        let on_file = rest.split_once('<').and_then(|(_, rest)| rest.split_once('>')).map(|(path, _)| path);
        if !on_file.and_then(|path| path.rsplit('/').next()).is_some_and(|base| base.contains(file)) {
            continue;
        }
        if name.contains("read") {
            reads += 1.0;
        } else if name.contains("write") {
            writes += 1.0;
            let result = line.rsplit("= ").next().and_then(|n| n.trim().parse::<u64>().ok());
            // The offset is the last argument, but for the flags of the calls that end in 2.
            let arguments = rest.rsplit_once(')').map(|(arguments, _)| arguments).unwrap_or_default();
            let back = usize::from(name.ends_with('2'));
            let offset = arguments.rsplit(", ").nth(back).and_then(|n| n.parse::<u64>().ok());
            let whole = |n: Option<u64>| n.is_none_or(|n| n.is_multiple_of(4096));
            if !(whole(result) && whole(offset)) {
                unaligned += 1.0;
            }
            if let (Some(offset), Some(written)) = (offset, result) {
                if end != Some(offset) {
                    out_of_order += 1.0;
                }
                end = Some(offset + written);
            }
        } else if name.contains("sync") {
            syncs += 1.0;
        } else {
            others += 1.0;
        }
    }
    vec![
        (Metric::TargetReads, reads),
        (Metric::TargetWrites, writes),
        (Metric::UnalignedWrites, unaligned),
        (Metric::OutOfOrderWrites, out_of_order),
        (Metric::TargetSyncs, syncs),
        (Metric::TargetOthers, others),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_on_the_target_are_counted() {
        let log = "pwritev(7</a/.ours.zebu-1a2b3c>, [{iov_base=\"<\", iov_len=65536}], 1, 65536) = 65536\n\
                   pread64(5</a/part.raw>, \"x\", 1048576, 0) = 1048576\n\
                   pwrite64(7</a/.ours.zebu-1a2b3c>, \"..\"..., 4096, 512) = 4096\n\
                   1764450000.000001 pwritev2(7</a/ours>, [{iov_len=100}], 1, 4096, 0) = 100\n\
                   preadv(7</a/ours>, [{iov_len=512}], 1, 0) = 512\n\
                   pwrite64(7</a/ours>, \"()\"..., 4096, 100) = 4096\n\
                   pwrite64(7</a/ours>, \"next\", 100, 4196) = 100\n\
                   fallocate(7</a/ours>, 0, 0, 65536) = 0\n\
                   fdatasync(7</a/ours>) = 0\n\
                   fdatasync(5</a/part.raw>) = 0\n";
        let lines: Vec<&str> = log.lines().collect();
        let figures: Vec<f64> = calls(&lines, "ours").into_iter().map(|(_, value)| value).collect();
        assert_eq!(figures, [1.0, 5.0, 4.0, 4.0, 1.0, 1.0]);
    }
}
