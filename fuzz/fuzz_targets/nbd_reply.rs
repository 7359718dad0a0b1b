//! See `zebu_fuzz::clients::nbd_reply`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::clients::nbd_reply(&mut arbitrary::Unstructured::new(bytes));
});
