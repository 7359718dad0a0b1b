//! The text of `info`: QEMU's lines, and zebu's own below them.

use super::encryption::push_luks;
use super::info_json::{Fragmentation, bitmap_flags, compat_text, full_backing_name};
use super::info_node::{InfoNode, Kind};
use super::json::path_text;
use super::units::size_short;
use zebu_disks::{Program, printable};

use crate::sector_size::unusual;
use std::fmt::Write as _;
use zebu_engine::{EncryptionInfo, ForeignInfo, Qcow2Info, SnapshotInfo};

/// Everything about one image and what it lies in.
pub(crate) fn image_text(dialect: Program, node: &InfoNode, fragmentation: Option<Fragmentation>) -> String {
    let mut out = own_text(dialect, node);
    push_children(dialect, &mut out, node, "");
    let qcow2 = node.image().and_then(|info| info.qcow2.as_ref());
    if let Some(qcow2) = qcow2.filter(|_| !dialect.is_qemu()) {
        let _ = writeln!(out, "full cache size: {}", size_short(qcow2.full_cache_bytes));
        for limitation in &qcow2.limitations {
            let _ = writeln!(out, "limitation: {}", printable(limitation));
        }
    }
    if let Some(Fragmentation { data_bytes, extents }) = fragmentation {
        let _ = writeln!(out, "fragmentation: {} of data in {extents} pieces", size_short(data_bytes));
    }
    out
}

/// The nodes below `node`, which is at `path`, each with an indent of its own.
fn push_children(dialect: Program, out: &mut String, node: &InfoNode, path: &str) {
    for (name, below) in &node.children {
        let path = format!("{path}/{name}");
        let _ = writeln!(out, "Child node '{path}':");
        let mut text = if below.children.is_empty() { leaf_text(below) } else { own_text(dialect, below) };
        push_children(dialect, &mut text, below, &path);
        for line in text.lines() {
            let _ = writeln!(out, "    {line}");
        }
    }
}

/// Lines of a node that nothing lies below.
fn leaf_text(node: &InfoNode) -> String {
    let mut out = format!("filename: {}\nprotocol type: {}\n", printable(&node.filename), node.format);
    let _ = writeln!(out, "file length: {} ({} bytes)", size_short(node.virtual_size), node.virtual_size);
    let _ = writeln!(out, "disk size: {}", actual_size(node));
    if let Kind::File { extent_size_hint: Some(bytes @ 1..) } = node.kind {
        let _ = writeln!(out, "Format specific information:\n    extent size hint: {bytes}");
    }
    out
}

fn actual_size(node: &InfoNode) -> String {
    node.actual_size.map_or_else(|| "unavailable".to_owned(), size_short)
}

/// Lines of a node by itself.
fn own_text(dialect: Program, node: &InfoNode) -> String {
    let mut out = format!("image: {}\nfile format: {}\n", printable(&node.filename), node.format);
    let _ = writeln!(out, "virtual size: {} ({} bytes)", size_short(node.virtual_size), node.virtual_size);
    let _ = writeln!(out, "disk size: {}", actual_size(node));
    let info = node.image();
    if let Some(bytes) = info.and_then(|info| unusual(info.logical_sector_size)) {
        let _ = writeln!(out, "logical sector size: {bytes}");
    }
    let qcow2 = info.and_then(|info| info.qcow2.as_ref());
    let encryption = info.and_then(|info| info.encryption.as_ref());
    if qcow2.is_some_and(|q| q.encryption.is_some()) || encryption.is_some() {
        out.push_str("encrypted: yes\n");
    }
    if let Some(bytes) = node.cluster_size {
        let _ = writeln!(out, "cluster_size: {bytes}");
    }
    if node.dirty == Some(true) {
        out.push_str("cleanly shut down: no\n");
    }
    let Some(info) = info else { return out };
    if let Some(backing) = &info.backing_file {
        let _ = write!(out, "backing file: {}", printable(backing));
        if let Some(path) = full_backing_name(info).filter(|path| path != backing) {
            let _ = write!(out, " (actual path: {})", printable(&path));
        }
        out.push('\n');
    }
    if let Some(format) = &info.backing_format {
        let _ = writeln!(out, "backing file format: {}", printable(format));
    }
    if let Some(qcow2) = qcow2 {
        push_snapshots(&mut out, &qcow2.snapshots);
        out.push_str("Format specific information:\n");
        push_qcow2(&mut out, qcow2, encryption);
    } else if let Some(EncryptionInfo::Luks(luks)) = encryption {
        out.push_str("Format specific information:\n");
        push_luks(&mut out, luks, 4, false);
    }
    if let Some(foreign) = &info.foreign {
        push_foreign(dialect, &mut out, foreign);
    }
    out
}

/// The lines below `Format specific information:`.
pub(crate) fn push_qcow2(out: &mut String, info: &Qcow2Info, encryption: Option<&EncryptionInfo>) {
    let v3 = info.version >= 3;
    let _ = writeln!(out, "    compat: {}", compat_text(info));
    let _ = writeln!(out, "    compression type: {}", info.compression.name());
    if v3 {
        let _ = writeln!(out, "    lazy refcounts: {}", info.lazy_refcounts);
    }
    if !info.bitmaps.is_empty() {
        out.push_str("    bitmaps:\n");
        for (index, bitmap) in info.bitmaps.iter().enumerate() {
            let _ = writeln!(out, "        [{index}]:");
            out.push_str("            flags:\n");
            for (number, flag) in bitmap_flags(bitmap).iter().enumerate() {
                let _ = writeln!(out, "                [{number}]: {flag}");
            }
            let _ = writeln!(out, "            name: {}", printable(&bitmap.name));
            let _ = writeln!(out, "            granularity: {}", bitmap.granularity);
            if let Some(bytes) = bitmap.recovered {
                let _ = writeln!(out, "            recovered granularity: {bytes}");
            }
            if let Some(base) = bitmap.base {
                let _ = writeln!(out, "            goes on from backup: {base}");
            }
        }
    }
    if let Some(id) = info.backup_id {
        let _ = writeln!(out, "    backup: {id}");
    }
    if let Some(id) = info.backup_stands_on {
        let _ = writeln!(out, "    stands on backup: {id}");
    }
    if let Some(overlay) = &info.sealed_by {
        let _ = writeln!(out, "    sealed by: {}", printable(&overlay.to_string_lossy()));
    }
    let _ = writeln!(out, "    refcount bits: {}", info.refcount_bits);
    if let Some(format) = info.encryption {
        out.push_str("    encrypt:\n");
        match encryption {
            Some(EncryptionInfo::Luks(luks)) => push_luks(out, luks, 8, true),
            _ => drop(writeln!(out, "        format: {format}")),
        }
    }
    if let Some(file) = &info.data_file {
        let _ = writeln!(out, "    data file: {}", printable(file));
        let _ = writeln!(out, "    data file raw: {}", info.data_file_raw);
    }
    if v3 {
        let _ = writeln!(out, "    corrupt: {}", info.corrupt);
        let _ = writeln!(out, "    extended l2: {}", info.extended_l2);
    }
}

/// The list of `zebu snapshot`; empty if there is nothing to tell.
pub(crate) fn snapshot_list(snapshots: &[SnapshotInfo]) -> String {
    let mut out = String::new();
    push_snapshots(&mut out, snapshots);
    out
}

fn push_foreign(dialect: Program, out: &mut String, foreign: &ForeignInfo) {
    let is_qemu = dialect.is_qemu();
    if foreign.vmdk.is_none() && is_qemu {
        return;
    }
    out.push_str("Format specific information:\n");
    if !is_qemu {
        let _ = writeln!(out, "    variant: {}", foreign.variant);
    }
    let Some(vmdk) = &foreign.vmdk else { return };
    let _ = writeln!(out, "    cid: {}", vmdk.cid);
    let _ = writeln!(out, "    parent cid: {}", vmdk.parent_cid.unwrap_or(u32::MAX));
    let _ = writeln!(out, "    create type: {}", printable(&vmdk.create_type));
    out.push_str("    extents:\n");
    for (index, extent) in vmdk.extents.iter().enumerate() {
        let _ = writeln!(out, "        [{index}]:");
        if extent.is_compressed {
            out.push_str("            compressed: true\n");
        }
        let _ = writeln!(out, "            virtual size: {}", extent.len);
        if let Some(path) = &extent.path {
            let _ = writeln!(out, "            filename: {}", printable(&path_text(path)));
        }
        if let Some(grain) = extent.grain {
            let _ = writeln!(out, "            cluster size: {grain}");
        }
        let _ = writeln!(out, "            format: {}", extent.kind);
    }
}

fn push_snapshots(out: &mut String, snapshots: &[SnapshotInfo]) {
    if snapshots.is_empty() {
        return;
    }
    out.push_str("Snapshot list:\n");
    let _ = writeln!(
        out,
        "{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}",
        "ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"
    );
    for snapshot in snapshots {
        let icount = snapshot.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        let _ = writeln!(
            out,
            "{:<7} {:<16} {:>8} {:>19} {:>15} {icount:>10}",
            printable(&snapshot.id),
            printable(&snapshot.name),
            size_short(snapshot.vm_state_size),
            utc_text(snapshot.date_sec),
            clock_text(snapshot.vm_clock_nsec),
        );
    }
}

/// `hhhh:mm:ss.mmm`.
fn clock_text(nanoseconds: u64) -> String {
    let milliseconds = nanoseconds / 1_000_000;
    let seconds = milliseconds / 1000;
    format!("{:04}:{:02}:{:02}.{:03}", seconds / 3600, seconds / 60 % 60, seconds % 60, milliseconds % 1000)
}

/// `YYYY-MM-DD hh:mm:ss` of a time in seconds since 1970, in UTC: the same text on every machine.
fn utc_text(seconds: u32) -> String {
    let days = u64::from(seconds / 86400);
    let in_day = seconds % 86400;
    // Civil date of a day number, counted from 0000-03-01 so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}", in_day / 3600, in_day / 60 % 60, in_day % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected texts are those of `date -u -d @SECONDS`.
    #[test]
    fn dates_are_gregorian() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (1_709_251_200, "2024-03-01 00:00:00"),
            (1_795_230_847, "2026-11-21 03:14:07"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(utc_text(seconds), text);
        }
    }

    #[test]
    fn the_clock_of_the_machine_has_milliseconds() {
        assert_eq!(clock_text(0), "0000:00:00.000");
        assert_eq!(clock_text(3_723_004_999_999), "0001:02:03.004");
    }
}
