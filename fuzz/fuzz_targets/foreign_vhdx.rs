//! See `zebu_fuzz::foreign::damaged`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_foreign::Format;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::foreign::damaged(Format::Vhdx, &mut arbitrary::Unstructured::new(bytes));
});
