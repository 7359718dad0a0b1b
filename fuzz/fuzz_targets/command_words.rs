//! See `zebu_fuzz::words::command`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::words::command(&mut arbitrary::Unstructured::new(bytes));
});
