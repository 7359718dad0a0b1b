//! A request of an NBD client: what is executed lies on the disk, and what is refused says how much to skip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zebu_export::nbd::{
    Command, HeaderStyle, MAX_PAYLOAD, RequestHeader, Terms, TransmissionFlags, Verdict, judge,
};

fuzz_target!(|bytes: &[u8]| {
    let Some((setting, bytes)) = bytes.split_first_chunk::<12>() else { return };
    let style = if setting[0] & 1 == 0 { HeaderStyle::Compact } else { HeaderStyle::Extended };
    let flags = u16::from_be_bytes([setting[2], setting[3]]);
    let size = u64::from_be_bytes(setting[4..].try_into().expect("8 bytes"));
    let flags = TransmissionFlags::from_bits_truncate(flags);
    let terms = Terms { style, flags, size, has_contexts: setting[1] & 1 == 0 };
    let mut header = bytes.to_vec();
    if let Some(magic) = header.get_mut(..4) {
        let right = if style == HeaderStyle::Compact { 0x2560_9513u32 } else { 0x21e4_1c71 };
        magic.copy_from_slice(&right.to_be_bytes());
    }
    let Some(header) = RequestHeader::parse(style, &header) else {
        assert!(header.len() < style.header_len());
        return;
    };
    let is_read_only = flags.contains(TransmissionFlags::READ_ONLY);
    let is_on_disk = |len: u64| assert!(header.offset.checked_add(len).is_some_and(|end| end <= size));
    match judge(&header, &terms) {
        Verdict::Execute(Command::Read { len }) => {
            assert!(len <= MAX_PAYLOAD);
            is_on_disk(len.into());
        }
        Verdict::Execute(Command::Write { len, .. }) => {
            assert!(len <= MAX_PAYLOAD && !is_read_only);
            is_on_disk(len.into());
        }
        Verdict::Execute(Command::Trim { len, .. } | Command::WriteZeroes { len, .. }) => {
            assert!(!is_read_only);
            is_on_disk(len);
        }
        Verdict::Execute(Command::Cache { len } | Command::BlockStatus { len, .. }) => is_on_disk(len),
        Verdict::Execute(Command::Flush) | Verdict::Disconnect | Verdict::Broken(_) => {}
        Verdict::Refuse(refusal) => assert!(refusal.skip <= 64 << 20 && !refusal.message.is_empty()),
    }
});
