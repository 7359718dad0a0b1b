//! An option of an NBD client: any bytes are an option or are refused.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_export::nbd::{ClientOption, MAX_NAME, OptionHeader, parse_option};

fuzz_target!(|bytes: &[u8]| {
    let Some((head, data)) = bytes.split_first_chunk::<{ OptionHeader::LEN }>() else { return };
    // With its magic in place, or nothing else would be looked at.
    let mut head = *head;
    head[..8].copy_from_slice(b"IHAVEOPT");
    let header = OptionHeader::parse(&head).expect("has its magic");
    match parse_option(header.code % 16, data) {
        Ok(ClientOption::ExportName(name)) => assert!(name.len() <= MAX_NAME),
        Ok(ClientOption::Info(request) | ClientOption::Go(request)) => {
            assert!(request.export.len() + 2 * request.kinds.len() <= data.len());
        }
        Ok(ClientOption::ListMetaContext(request) | ClientOption::SetMetaContext(request)) => {
            assert!(request.queries.len() <= 256);
            assert!(request.queries.iter().all(|query| query.len() <= MAX_NAME));
        }
        Ok(_) => {}
        Err(refusal) => assert!(!refusal.message.is_empty()),
    }
});
