//! Random writes, a kill in their middle, and what is left of them.

use crate::Outcome;
use crate::process::{output, shown};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Bytes of a write.
const BLOCK: u64 = 4096;
/// Writes between two flushes.
const BETWEEN_FLUSHES: usize = 10;

/// Writes to a disk: the byte that fills each block.
pub(super) struct Writes(BTreeMap<u64, u8>);

impl Writes {
    /// So many writes to different places of a disk of `size` bytes, the same ones every time.
    pub(super) fn random(count: usize, size: u64) -> Self {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut blocks = BTreeMap::new();
        while (blocks.len() as u64) < (count as u64).min(size / BLOCK) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let random = state.wrapping_mul(0x2545_F491_4F6C_DD1D);
            blocks.insert((random >> 8) % (size / BLOCK) * BLOCK, 1 + (random % 250) as u8);
        }
        Self(blocks)
    }

    /// The writes in an order that is not that of the disk.
    fn in_order(&self) -> Vec<(u64, u8)> {
        let mut writes: Vec<(u64, u8)> = self.0.iter().map(|(offset, byte)| (*offset, *byte)).collect();
        writes.sort_by_key(|(offset, byte)| (*byte, *offset));
        writes
    }

    /// Sends them to `zebu io`, with a flush every few, and kills it when `most` are flushed, with others under way.
    /// Gives the number of those that were flushed.
    pub(super) fn send_and_kill(&self, zebu: &Path, disk: &Path, most: usize) -> Outcome<usize> {
        let mut command = Command::new(zebu);
        command.args(["io", "-f", "qcow2"]).arg(disk).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("cannot run {}: {e}", shown(&command)))?;
        let (Some(mut input), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("no pipes".to_owned());
        };
        let mut answers = BufReader::new(answers).lines();
        let mut flushed = 0;
        for some in self.in_order().chunks(BETWEEN_FLUSHES) {
            let line = |(offset, byte): &(u64, u8)| format!("write -q -P {byte} {offset} {BLOCK}\n");
            let mut lines: String = some.iter().map(line).collect();
            let is_last = flushed + some.len() > most;
            if !is_last {
                // `length` answers with a line, when the others are done.
                lines.push_str("flush\nlength\n");
            }
            input.write_all(lines.as_bytes()).map_err(|e| e.to_string())?;
            if is_last {
                break;
            }
            match answers.next() {
                Some(Ok(_)) => flushed += some.len(),
                _ => return Err(format!("zebu io ended before it was killed, after {flushed} writes")),
            }
        }
        child.kill().and_then(|()| child.wait()).map_err(|e| e.to_string())?;
        Ok(flushed)
    }

    /// Reads the first `count` back by `program`, zebu or qemu-io, which compares them.
    pub(super) fn are_there(&self, program: &mut Command, disk: &Path, count: usize) -> Outcome {
        program.args(["-r", "-f", "qcow2"]);
        for (offset, byte) in self.in_order().into_iter().take(count) {
            program.arg("-c").arg(format!("read -q -P {byte} {offset} {BLOCK}"));
        }
        let said = output(program.arg(disk)).map_err(|e| e.lines().last().unwrap_or_default().to_owned())?;
        if said.contains("failed") { Err(said) } else { Ok(()) }
    }

    /// Does those that are left after the first `done`.
    pub(super) fn finish(&self, zebu: &Path, disk: &Path, done: usize) -> Outcome {
        let mut command = Command::new(zebu);
        command.args(["io", "-f", "qcow2"]);
        for (offset, byte) in self.in_order().into_iter().skip(done) {
            command.arg("-c").arg(format!("write -q -P {byte} {offset} {BLOCK}"));
        }
        output(command.args(["-c", "flush"]).arg(disk)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_as_many_as_asked_for_and_the_same_every_time() {
        let (one, two) = (Writes::random(1000, 64 << 20), Writes::random(1000, 64 << 20));
        assert_eq!(one.in_order(), two.in_order());
        assert_eq!(one.0.len(), 1000);
        assert!(one.0.keys().all(|offset| offset % BLOCK == 0 && *offset < 64 << 20));
        assert_eq!(Writes::random(1000, 8 * BLOCK).0.len(), 8);
    }
}
