//! See `zebu_fuzz::clients::http_response`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::clients::http_response(&mut arbitrary::Unstructured::new(bytes));
});
