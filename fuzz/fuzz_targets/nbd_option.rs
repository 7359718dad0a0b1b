//! See `zebu_fuzz::clients::nbd_option`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::clients::nbd_option(&mut arbitrary::Unstructured::new(bytes));
});
