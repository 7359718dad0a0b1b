//! See `zebu_fuzz::clients::vhost_request`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::clients::vhost_request(&mut arbitrary::Unstructured::new(bytes));
});
