//! The parsers of what clients, guests and servers send, on any bytes.

use arbitrary::{Result, Unstructured};
use zebu_export::nbd::{
    ClientOption, Command, HeaderStyle, MAX_NAME, MAX_PAYLOAD, OptionHeader, RequestHeader, Terms,
    TransmissionFlags, Verdict, judge, parse_option,
};
use zebu_export::vhost::{Parts, look_at_ring, parse_header, split_front, split_last_byte};

/// Bytes in which small numbers, the lengths and counts of the protocol, are frequent.
fn counted(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for _ in 0..u.int_in_range(0..=12)? {
        match u.int_in_range(0..=3)? {
            0 => bytes.extend(u.int_in_range(0..=12u32)?.to_be_bytes()),
            1 => bytes.extend(u.int_in_range(0..=4u16)?.to_be_bytes()),
            2 => bytes.extend(u.arbitrary::<u32>()?.to_be_bytes()),
            _ => {
                let len = u.int_in_range(0..=12)?;
                bytes.extend(u.bytes(len)?.iter().map(|byte| byte % 128));
            }
        }
    }
    Ok(bytes)
}

/// An option of an NBD client: any bytes are an option or are refused.
///
/// # Errors
/// The input is used up.
pub fn nbd_option(u: &mut Unstructured<'_>) -> Result<()> {
    // With its magic in place, or nothing else would be looked at.
    let mut head = [0; OptionHeader::LEN];
    u.fill_buffer(&mut head)?;
    head[..8].copy_from_slice(b"IHAVEOPT");
    let header = OptionHeader::parse(&head).expect("has its magic");
    let data = if u.arbitrary()? { counted(u)? } else { u.bytes(u.len())?.to_vec() };
    match parse_option(header.code % 16, &data) {
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
    Ok(())
}

/// Replies to the NBD client: every request has one answer, and none has more than was asked for.
///
/// # Errors
/// The input is used up.
pub fn nbd_reply(u: &mut Unstructured<'_>) -> Result<()> {
    const KINDS: [u16; 8] = [0, 1, 2, 5, 6, 0x8001, 0x8002, 99];
    let style = u.int_in_range(0..=2u8)?;
    let mut bytes = Vec::new();
    for _ in 0..u.int_in_range(0..=8)? {
        let cookie = u.int_in_range(1..=4u64)?;
        let payload = if u.arbitrary()? { counted(u)? } else { vec![1; u.int_in_range(0..=5000)?] };
        if u.ratio(1, 4)? {
            bytes.extend(0x6744_6698u32.to_be_bytes());
            bytes.extend(u.int_in_range(0..=110u32)?.to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            bytes.extend(payload);
            continue;
        }
        let offset = (!u.ratio(1, 4)?).then_some(u.int_in_range(4000..=8200u64)?);
        let len = (payload.len() + offset.map_or(0, |_| 8)) as u64;
        let len = if u.ratio(1, 8)? { u.arbitrary()? } else { len };
        let magic = if style == 2 { 0x6e8a_278cu32 } else { 0x668e_33ef };
        bytes.extend(magic.to_be_bytes());
        bytes.extend(u.int_in_range(0..=1u16)?.to_be_bytes());
        bytes.extend(u.choose(&KINDS)?.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        if style == 2 {
            bytes.extend(offset.unwrap_or(0).to_be_bytes());
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes.extend(offset.into_iter().flat_map(u64::to_be_bytes));
        bytes.extend(payload);
    }
    let found = zebu_remote::nbd::fuzzing::answers(style, &bytes);
    assert!(found.read.is_some_and(|read| read.is_err() || read.is_ok_and(|bytes| bytes.len() == 4096)));
    assert!(found.runs.is_some_and(|runs| runs.is_err() || runs.is_ok_and(|runs| !runs.is_empty())));
    Ok(())
}

/// A response to the HTTP client: what it takes is the range that it asked for, and no part of another.
///
/// # Errors
/// The input is used up.
pub fn http_response(u: &mut Unstructured<'_>) -> Result<()> {
    const HEADERS: [&str; 12] = [
        "Content-Range: bytes 100-199/300",
        "Content-Range: bytes 100-149/300",
        "Content-Range: bytes 0-99/300",
        "Content-Range: bytes 100-199/*",
        "Content-Length: 100",
        "Content-Length: 18446744073709551615",
        "Transfer-Encoding: chunked",
        "Connection: close",
        "Content-Encoding: gzip",
        "ETag: W/\"x\"",
        "Location: //user:pw@other/x",
        "Retry-After: 99999999999999999999",
    ];
    const STATUS: [&str; 9] = ["206", "200", "302", "416", "503", "103", "100", "304", "999"];
    let mut bytes = Vec::new();
    for _ in 0..u.int_in_range(1..=3)? {
        bytes.extend(format!("HTTP/1.{} {} X\r\n", u.int_in_range(0..=1)?, u.choose(&STATUS)?).bytes());
        for _ in 0..u.int_in_range(0..=5)? {
            if u.ratio(1, 4)? {
                let len = u.int_in_range(0..=30)?;
                bytes.extend_from_slice(u.bytes(len)?);
            } else {
                bytes.extend_from_slice(u.choose(&HEADERS)?.as_bytes());
            }
            bytes.extend_from_slice(b"\r\n");
        }
        bytes.extend_from_slice(b"\r\n");
        if u.arbitrary()? {
            bytes.extend(format!("{:x}\r\n", u.int_in_range(0..=300)?).bytes());
        }
        bytes.extend(vec![b'x'; u.int_in_range(0..=300)?]);
    }
    if u.ratio(1, 3)? {
        let at = u.choose_index(bytes.len())?;
        bytes[at] = u.arbitrary()?;
    }
    if let Ok(body) = zebu_remote::http::fuzzing::answer(&bytes) {
        assert!(!body.is_empty() && body.len() <= 100);
    }
    Ok(())
}

/// Values of headers and names of objects: what is read is consistent, and what is shown has no secret.
///
/// # Errors
/// The input is used up.
pub fn http_words(u: &mut Unstructured<'_>) -> Result<()> {
    let len = u.int_in_range(0..=60)?;
    let mut text = String::from_utf8_lossy(u.bytes(len)?).into_owned();
    if u.arbitrary()? {
        text.insert_str(
            0,
            u.choose(&["bytes ", "http://", "https://", "http://[", "http://u:pw@", "bytes 1-"])?,
        );
    }
    if let Some((range, total)) = zebu_remote::http::fuzzing::content_range(&text) {
        assert!(range.is_some() || total.is_some());
        assert!(range.as_ref().is_none_or(|range| range.start < range.end));
        assert!(range.zip(total).is_none_or(|(range, total)| range.end <= total));
    }
    if let Ok(url) = zebu_remote::http::HttpUrl::parse(&text) {
        let shown = url.to_string();
        assert!(
            !shown.contains('@')
                || text.rsplit('/').next().is_some_and(|path| path.contains('@'))
                || text.contains('@')
        );
        let plain = shown.trim_end_matches("?...");
        assert_eq!(
            zebu_remote::http::HttpUrl::parse(plain).map(|again| again.to_string()).as_deref(),
            Ok(plain)
        );
    }
    let _ = (zebu_remote::http::HttpUrl::hide(&text), zebu_remote::nbd::NbdAddress::parse(&text));
    Ok(())
}

/// A request of an NBD client: what is executed lies on the disk in whole blocks, and what is refused says how
/// much to skip.
///
/// # Errors
/// The input is used up.
pub fn nbd_request(u: &mut Unstructured<'_>) -> Result<()> {
    let style = if u.arbitrary()? { HeaderStyle::Compact } else { HeaderStyle::Extended };
    let flags = TransmissionFlags::from_bits_truncate(u.arbitrary()?);
    // Disks of all sizes, not of huge ones only.
    let size = u.arbitrary::<u64>()? >> u.int_in_range(0..=63)?;
    let smallest_block = 1 << u.int_in_range(0..=12)?;
    let terms = Terms { style, flags, size, has_contexts: u.arbitrary()?, smallest_block };
    let len = u.int_in_range(0..=style.header_len())?;
    let mut header = if u.arbitrary()? { u.bytes(len)?.to_vec() } else { request_near(u, style, size)? };
    if let Some(magic) = header.get_mut(..4) {
        let right = if style == HeaderStyle::Compact { 0x2560_9513u32 } else { 0x21e4_1c71 };
        magic.copy_from_slice(&right.to_be_bytes());
    }
    let Some(header) = RequestHeader::parse(style, &header) else {
        assert!(header.len() < style.header_len());
        return Ok(());
    };
    let is_read_only = flags.contains(TransmissionFlags::READ_ONLY);
    let is_on_disk = |len: u64| {
        assert!(header.offset.checked_add(len).is_some_and(|end| end <= size));
        assert!((header.offset | len).is_multiple_of(smallest_block.into()));
    };
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
    Ok(())
}

/// A header of a known command, about a range that ends near the end of the disk or in it.
fn request_near(u: &mut Unstructured<'_>, style: HeaderStyle, size: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    bytes.extend((u.arbitrary::<u16>()? & u.arbitrary::<u16>()? & 0x3f).to_be_bytes());
    bytes.extend(u.int_in_range(0..=8u16)?.to_be_bytes());
    bytes.extend([0; 8]);
    let offset = u.int_in_range(0..=size)?;
    let len = (size - offset).wrapping_add(u.int_in_range(0..=2u64)?).wrapping_sub(1);
    bytes.extend(offset.to_be_bytes());
    if style == HeaderStyle::Compact {
        bytes.extend((len as u32).to_be_bytes());
    } else {
        bytes.extend(len.to_be_bytes());
    }
    Ok(bytes)
}

/// A request of a guest: headers, and parts of memory that are cut into header, data and status.
///
/// # Errors
/// The input is used up.
pub fn vhost_request(u: &mut Unstructured<'_>) -> Result<()> {
    let mut header = [0; 16];
    u.fill_buffer(&mut header)?;
    let _ = parse_header(&header);
    let mut parts = Parts::new();
    for _ in 0..u.int_in_range(0..=20)? {
        let len = if u.arbitrary()? { u.int_in_range(0..=20)? } else { u.arbitrary()? };
        parts.push((u.arbitrary()?, len));
    }
    let len = |parts: &Parts| parts.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
    let whole = len(&parts);
    let mut left = whole;
    if split_last_byte(&mut parts).is_some() {
        left -= 1;
    } else {
        assert_eq!(whole, 0);
    }
    assert_eq!(len(&parts), left);
    match split_front(&mut parts, 16) {
        Some(head) => assert_eq!((len(&head), len(&parts)), (16, left - 16)),
        None => assert!(left < 16),
    }
    Ok(())
}

/// The rings of a guest, with whatever is in its memory: descriptors that make sense more often than chance would.
///
/// # Errors
/// The input is used up.
pub fn vhost_ring(u: &mut Unstructured<'_>) -> Result<()> {
    const TABLE: usize = 0;
    const AVAILABLE: usize = 0x1000;
    let size = *u.choose(&[1u16, 2, 4, 8, 256, 3, 0])?;
    let mut memory = vec![0; 0x3000];
    let descriptors = u.int_in_range(0..=16usize)?;
    for index in 0..descriptors {
        let address: u64 =
            if u.ratio(3, 4)? { 0x1000 + u64::from(u.arbitrary::<u16>()?) } else { u.arbitrary()? };
        let len: u32 = if u.ratio(3, 4)? { u.int_in_range(0..=4096)? } else { u.arbitrary()? };
        // next, write, indirect
        let flags = u.int_in_range(0..=7u16)?;
        let next = if u.ratio(7, 8)? { u.int_in_range(0..=16)? } else { u.arbitrary::<u16>()? };
        let at = TABLE + index * 16;
        memory[at..at + 8].copy_from_slice(&address.to_le_bytes());
        memory[at + 8..at + 12].copy_from_slice(&len.to_le_bytes());
        memory[at + 12..at + 14].copy_from_slice(&flags.to_le_bytes());
        memory[at + 14..at + 16].copy_from_slice(&next.to_le_bytes());
    }
    let offered = u.int_in_range(0..=40u16)?;
    memory[AVAILABLE + 2..AVAILABLE + 4].copy_from_slice(&offered.to_le_bytes());
    for entry in 0..usize::from(size) {
        let head: u16 = if u.ratio(7, 8)? { u.int_in_range(0..=16)? } else { u.arbitrary()? };
        let at = AVAILABLE + 4 + entry * 2;
        memory[at..at + 2].copy_from_slice(&head.to_le_bytes());
    }
    let wild = u.int_in_range(0..=8)?;
    for _ in 0..wild {
        let at = u.int_in_range(0..=memory.len() - 1)?;
        memory[at] = u.arbitrary()?;
    }
    let rings = if u.ratio(7, 8)? { [TABLE as u16, AVAILABLE as u16, 0x2000] } else { u.arbitrary()? };
    let heads: Vec<u16> = (0..descriptors as u16 + 1).collect();
    look_at_ring(&memory, rings, size, &heads);
    Ok(())
}
