//! Disks on servers that this command has opened.

use crate::output::stderr;
use std::sync::{Arc, Mutex, PoisonError};
use zebu::storage::IoError;
use zebu_remote::StatsSnapshot;
use zebu_remote::nbd::{NbdAddress, NbdDisk, NbdOptions};

/// A disk over the network, as the command line describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteName {
    pub(crate) address: NbdAddress,
    pub(crate) options: NbdOptions,
}

/// Disks that were opened. They stay so: a server may take no second connection.
static OPENED: Mutex<Vec<(RemoteName, Arc<NbdDisk>)>> = Mutex::new(Vec::new());

/// A disk on a server; one that is known stays connected.
pub(crate) fn nbd_disk(name: RemoteName) -> Result<Arc<NbdDisk>, IoError> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.iter().find(|(known, _)| *known == name).map(|(_, disk)| Arc::clone(disk));
    if let Some(disk) = known {
        return Ok(disk);
    }
    let disk = Arc::new(NbdDisk::open(name.address.clone(), name.options.clone())?);
    opened.push((name, Arc::clone(&disk)));
    Ok(disk)
}

/// Figures of all disks over the network that this command opened, added up; `None` if there was none.
pub(crate) fn transfers() -> Option<StatsSnapshot> {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.iter().map(|(_, disk)| disk.stats()).reduce(|mut all, one| {
        all.requests += one.requests;
        all.read_bytes += one.read_bytes;
        all.written_bytes += one.written_bytes;
        all.retries += one.retries;
        all.reconnects += one.reconnects;
        all
    })
}

/// Says what went over the network (`-v`), if anything did.
pub(crate) fn tell_transfers() {
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, disk) in opened.iter() {
        let StatsSnapshot { requests, read_bytes, written_bytes, retries, reconnects, .. } = disk.stats();
        let name = disk.name();
        stderr::tell(&format!(
            "{name}: {requests} requests, {read_bytes} bytes read, {written_bytes} bytes written, {retries} retries, \
             {reconnects} reconnections"
        ));
        if let Some(failure) = disk.last_failure() {
            stderr::tell(&format!("{name}: the connection broke: {failure}"));
        }
    }
}
