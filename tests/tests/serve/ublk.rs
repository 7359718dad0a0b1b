//! Block devices of a kernel, in a guest whose kernel has them.

use std::path::Path;
use zebu_tests::device_guest::DeviceGuest;
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::{Scratch, cache};

/// Kills of a server whose device is in use; `ZEBU_KILLS` has another number.
const KILLS: &str = "12";

/// Boots a guest that does what these words say.
fn guest_does(words: &[&str]) {
    if Qemu::find().is_none() {
        return;
    }
    let scratch = Scratch::new("ublk");
    let program = Path::new(env!("CARGO_BIN_EXE_in_guest"));
    let guest = DeviceGuest::prepare(&cache("device-guest"), scratch.path(), program)
        .unwrap_or_else(|missing| panic!("{missing}"));
    let said = guest.run(words, None).unwrap_or_else(|what| panic!("{what}"));
    eprintln!("{said}");
}

#[test]
fn a_device_is_made_used_and_removed() {
    guest_does(&["devices"]);
}

#[test]
fn a_file_system_survives_the_kills_of_its_server() {
    let kills = std::env::var("ZEBU_KILLS").unwrap_or_else(|_| KILLS.to_owned());
    guest_does(&["recovery", "ublk", &kills]);
}

#[test]
fn a_device_of_nbd_is_connected_used_and_disconnected() {
    guest_does(&["nbd"]);
}

#[test]
fn a_file_system_on_nbd_survives_the_kills_of_its_server() {
    // Requests of a killed server wait for half a minute.
    guest_does(&["recovery", "nbd", "2"]);
}
