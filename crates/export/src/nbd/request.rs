//! Parsing and checking requests. Pure functions: any header gives a command, a refusal, or the end of the session.

use super::protocol::{
    CommandFlags, EXTENDED_REQUEST_MAGIC, NbdErrno, REQUEST_MAGIC, TransmissionFlags, command,
};

/// Bytes of data that one request may carry or ask for.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// A payload of a refused request up to this size is skipped; with a longer one the session ends.
const MAX_SKIPPED: u64 = 64 << 20;

/// The form of request headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderStyle {
    /// 28 bytes, lengths of 32 bits.
    Compact,
    /// 32 bytes, lengths of 64 bits.
    Extended,
}

impl HeaderStyle {
    /// Bytes of a header.
    pub fn header_len(self) -> usize {
        match self {
            HeaderStyle::Compact => 28,
            HeaderStyle::Extended => 32,
        }
    }
}

/// A header as it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags, known or not.
    pub flags: u16,
    /// Number of the command.
    pub command: u16,
    /// The client's name for the request.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RequestHeader {
    /// Reads a header; `None` if the bytes are none, or too few.
    pub fn parse(style: HeaderStyle, bytes: &[u8]) -> Option<Self> {
        let u16_at = |at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (magic, len) = match style {
            HeaderStyle::Compact => (REQUEST_MAGIC, u64::from(u32_at(24)?)),
            HeaderStyle::Extended => (EXTENDED_REQUEST_MAGIC, u64_at(24)?),
        };
        (u32_at(0)? == magic).then_some(())?;
        Some(Self { flags: u16_at(4)?, command: u16_at(6)?, cookie: u64_at(8)?, offset: u64_at(16)?, len })
    }
}

/// The terms by which a request is judged.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Form of the headers.
    pub style: HeaderStyle,
    /// Capabilities of the export, as they were told to the client.
    pub flags: TransmissionFlags,
    /// Bytes of the disk now.
    pub size: u64,
    /// Whether metadata contexts were chosen.
    pub has_contexts: bool,
    /// Bytes, a power of two, of which offsets and lengths are multiples.
    pub smallest_block: u32,
}

/// Whether space is kept, and what slowness is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zeroing {
    /// Space stays allocated.
    pub keep: bool,
    /// Must be faster than writing, or fail at once.
    pub fast: bool,
}

/// A request in good order. Ranges lie on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Send the bytes.
    Read {
        /// Bytes, at most [`MAX_PAYLOAD`].
        len: u32,
    },
    /// Write the payload.
    Write {
        /// Bytes of payload, at most [`MAX_PAYLOAD`].
        len: u32,
        /// Durable when it completes.
        fua: bool,
    },
    /// Make what completed durable.
    Flush,
    /// Give up the range.
    Trim {
        /// Bytes.
        len: u64,
        /// Durable when it completes.
        fua: bool,
    },
    /// Read ahead.
    Cache {
        /// Bytes.
        len: u64,
    },
    /// Make the range read as zero.
    WriteZeroes {
        /// Bytes.
        len: u64,
        /// How.
        zeroing: Zeroing,
        /// Durable when it completes.
        fua: bool,
    },
    /// Tell what the range is made of.
    BlockStatus {
        /// Bytes, at least 1.
        len: u64,
        /// Only the first extent.
        one: bool,
    },
}

/// The treatment of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Do it.
    Execute(Command),
    /// Refuse it, after `skip` bytes of payload.
    Refuse(Refusal),
    /// End the session, as the client asked.
    Disconnect,
    /// End the session: where the next request would begin is not known, or too far away.
    Broken(&'static str),
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    pub(crate) errno: NbdErrno,
    /// Bytes of payload that follow the header.
    pub skip: u64,
    /// In words, for the client.
    pub message: &'static str,
}

/// Judges a request.
pub fn judge(header: &RequestHeader, terms: &Terms) -> Verdict {
    let flags = CommandFlags::from_bits_retain(header.flags);
    let has_payload_flag = terms.style == HeaderStyle::Extended && flags.contains(CommandFlags::PAYLOAD_LEN);
    let payload = if header.command == command::WRITE || has_payload_flag { header.len } else { 0 };
    if payload > MAX_SKIPPED {
        return Verdict::Broken("a payload of more than 64 MiB");
    }
    match judge_command(header, flags, terms, has_payload_flag) {
        Ok(None) => Verdict::Disconnect,
        Ok(Some(command)) => Verdict::Execute(command),
        Err((errno, message)) => Verdict::Refuse(Refusal { errno, skip: payload, message }),
    }
}

type Refused = (NbdErrno, &'static str);

/// The command, or `None` if it is to end the session.
fn judge_command(
    header: &RequestHeader,
    flags: CommandFlags,
    terms: &Terms,
    has_payload_flag: bool,
) -> Result<Option<Command>, Refused> {
    let known = match header.command {
        command::READ => CommandFlags::DF,
        command::WRITE => CommandFlags::FUA | CommandFlags::PAYLOAD_LEN,
        command::WRITE_ZEROES => CommandFlags::FUA | CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
        command::BLOCK_STATUS => CommandFlags::REQ_ONE,
        command::TRIM | command::CACHE | command::FLUSH => CommandFlags::empty(),
        command::DISCONNECT => return Ok(None),
        _ => return Err((NbdErrno::Invalid, "the command is unknown")),
    };
    // FUA is allowed on every command, with no meaning where nothing is written.
    if !(known | CommandFlags::FUA).contains(flags) || (has_payload_flag && header.command != command::WRITE)
    {
        return Err((NbdErrno::Invalid, "the command does not have these flags"));
    }
    if flags.contains(CommandFlags::PAYLOAD_LEN) && terms.style == HeaderStyle::Compact {
        return Err((NbdErrno::Invalid, "PAYLOAD_LEN needs extended headers"));
    }
    let writes = matches!(header.command, command::WRITE | command::WRITE_ZEROES | command::TRIM);
    if writes && terms.flags.contains(TransmissionFlags::READ_ONLY) {
        return Err((NbdErrno::NotPermitted, "the export is read-only"));
    }
    let (len, fua) = (header.len, flags.contains(CommandFlags::FUA));
    let is_on_disk = header.offset.checked_add(len).is_some_and(|end| end <= terms.size);
    if !is_on_disk && header.command != command::FLUSH {
        // A trim asks for no space.
        let takes_space = matches!(header.command, command::WRITE | command::WRITE_ZEROES);
        let errno = if takes_space { NbdErrno::NoSpace } else { NbdErrno::Invalid };
        return Err((errno, "the request reaches past the end of the disk"));
    }
    let is_aligned = (header.offset | len).is_multiple_of(terms.smallest_block.into());
    if !is_aligned && header.command != command::FLUSH {
        return Err((NbdErrno::Invalid, "the request is not of whole blocks"));
    }
    let payload = || match u32::try_from(len) {
        Ok(len) if len <= MAX_PAYLOAD => Ok(len),
        _ if header.command == command::READ => {
            // The other error belongs to reads that may ask for one chunk.
            let in_one_chunk = terms.flags.contains(TransmissionFlags::SEND_DF);
            let errno = if in_one_chunk { NbdErrno::Overflow } else { NbdErrno::Invalid };
            Err((errno, "at most 32 MiB are read at once"))
        }
        _ => Err((NbdErrno::Invalid, "at most 32 MiB are written at once")),
    };
    Ok(Some(match header.command {
        command::READ => Command::Read { len: payload()? },
        command::WRITE => Command::Write { len: payload()?, fua },
        command::TRIM => Command::Trim { len, fua },
        command::CACHE => Command::Cache { len },
        command::WRITE_ZEROES => {
            let zeroing = Zeroing {
                keep: flags.contains(CommandFlags::NO_HOLE),
                fast: flags.contains(CommandFlags::FAST_ZERO),
            };
            Command::WriteZeroes { len, zeroing, fua }
        }
        command::BLOCK_STATUS if !terms.has_contexts => {
            return Err((NbdErrno::Invalid, "no metadata context was chosen"));
        }
        command::BLOCK_STATUS if len == 0 => {
            return Err((NbdErrno::Invalid, "there is no status of no bytes"));
        }
        command::BLOCK_STATUS => Command::BlockStatus { len, one: flags.contains(CommandFlags::REQ_ONE) },
        _ => Command::Flush,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn terms(style: HeaderStyle) -> Terms {
        let flags = TransmissionFlags::HAS_FLAGS;
        Terms { style, flags, size: SIZE, has_contexts: true, smallest_block: 1 }
    }

    fn header(command: u16, flags: u16, offset: u64, len: u64) -> RequestHeader {
        RequestHeader { flags, command, cookie: 5, offset, len }
    }

    fn refused(verdict: Verdict) -> (NbdErrno, u64) {
        match verdict {
            Verdict::Refuse(refusal) => (refusal.errno, refusal.skip),
            other => panic!("not refused: {other:?}"),
        }
    }

    #[test]
    fn headers_of_both_forms_are_read() {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 1, 0, 7]);
        bytes.extend(9u64.to_be_bytes());
        bytes.extend(0x0102_0304_0506_0708u64.to_be_bytes());
        let mut extended = bytes.clone();
        extended[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        bytes.extend(0xffff_fffeu32.to_be_bytes());
        extended.extend(0x1_0000_0000u64.to_be_bytes());
        let expected = RequestHeader {
            flags: 1,
            command: 7,
            cookie: 9,
            offset: 0x0102_0304_0506_0708,
            len: 0xffff_fffe,
        };
        assert_eq!(RequestHeader::parse(HeaderStyle::Compact, &bytes), Some(expected));
        let expected = RequestHeader { len: 1 << 32, ..expected };
        assert_eq!(RequestHeader::parse(HeaderStyle::Extended, &extended), Some(expected));
        for (style, bytes) in [(HeaderStyle::Compact, &bytes), (HeaderStyle::Extended, &extended)] {
            for len in 0..bytes.len() {
                assert_eq!(RequestHeader::parse(style, &bytes[..len]), None, "{len} bytes");
            }
            for at in 0..4 {
                let mut wrong = bytes.clone();
                wrong[at] ^= 0x80;
                assert_eq!(RequestHeader::parse(style, &wrong), None);
            }
        }
        assert_eq!(RequestHeader::parse(HeaderStyle::Compact, &extended), None);
        assert_eq!(RequestHeader::parse(HeaderStyle::Extended, &bytes), None);
    }

    #[test]
    fn requests_in_good_order_are_executed() {
        let fua = CommandFlags::FUA.bits();
        for (header, expected) in [
            (header(0, 0, SIZE - 1, 1), Command::Read { len: 1 }),
            (header(0, CommandFlags::DF.bits(), 0, 32 << 20), Command::Read { len: 32 << 20 }),
            (header(0, 0, SIZE, 0), Command::Read { len: 0 }),
            (header(1, fua, 0, 4096), Command::Write { len: 4096, fua: true }),
            (header(3, 0, 0, 0), Command::Flush),
            (header(4, fua, 0, SIZE), Command::Trim { len: SIZE, fua: true }),
            (header(5, 0, 0, SIZE), Command::Cache { len: SIZE }),
            (
                header(6, CommandFlags::NO_HOLE.bits() | CommandFlags::FAST_ZERO.bits(), 0, SIZE),
                Command::WriteZeroes { len: SIZE, zeroing: Zeroing { keep: true, fast: true }, fua: false },
            ),
            (header(7, CommandFlags::REQ_ONE.bits(), 0, SIZE), Command::BlockStatus { len: SIZE, one: true }),
        ] {
            assert_eq!(judge(&header, &terms(HeaderStyle::Compact)), Verdict::Execute(expected));
        }
        assert_eq!(judge(&header(2, 0, 0, 0), &terms(HeaderStyle::Compact)), Verdict::Disconnect);
    }

    #[test]
    fn ranges_past_the_end_are_refused_and_their_payload_skipped() {
        let terms = terms(HeaderStyle::Compact);
        for command in [0, 4, 5, 6, 7] {
            let expected = if command == 6 { NbdErrno::NoSpace } else { NbdErrno::Invalid };
            for (offset, len) in
                [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1), (u64::MAX, u64::MAX), (0, SIZE + 1)]
            {
                assert_eq!(refused(judge(&header(command, 0, offset, len), &terms)), (expected, 0));
            }
        }
        assert_eq!(refused(judge(&header(1, 0, SIZE, 512), &terms)), (NbdErrno::NoSpace, 512));
        assert_eq!(refused(judge(&header(1, 0, u64::MAX, 512), &terms)), (NbdErrno::NoSpace, 512));
    }

    #[test]
    fn too_much_data_is_refused_or_ends_the_session() {
        let terms = terms(HeaderStyle::Compact);
        let most = u64::from(MAX_PAYLOAD);
        assert_eq!(refused(judge(&header(0, 0, 0, most + 1), &terms)), (NbdErrno::Invalid, 0));
        let flags = terms.flags | TransmissionFlags::SEND_DF;
        let in_one_chunk = Terms { flags, ..terms };
        assert_eq!(refused(judge(&header(0, 0, 0, most + 1), &in_one_chunk)), (NbdErrno::Overflow, 0));
        assert_eq!(refused(judge(&header(1, 0, 0, most + 1), &terms)), (NbdErrno::Invalid, most + 1));
        assert!(matches!(judge(&header(1, 0, 0, (64 << 20) + 1), &terms), Verdict::Broken(_)));
    }

    #[test]
    fn unknown_commands_and_flags_are_refused() {
        let compact = terms(HeaderStyle::Compact);
        for command in [8, 9, 0x7fff, 0xffff] {
            assert_eq!(refused(judge(&header(command, 0, 0, 512), &compact)), (NbdErrno::Invalid, 0));
        }
        for command in 0..=7 {
            if command == command::DISCONNECT {
                continue;
            }
            let skip = if command == command::WRITE { 512 } else { 0 };
            for bit in 6..16 {
                let verdict = judge(&header(command, 1 << bit, 0, 512), &compact);
                assert_eq!(refused(verdict), (NbdErrno::Invalid, skip), "command {command}, bit {bit}");
            }
            assert!(matches!(
                judge(&header(command, CommandFlags::FUA.bits(), 0, 512), &compact),
                Verdict::Execute(_)
            ));
        }
        let not_its_own = [(0, 1 << 1), (0, 1 << 3), (1, 1 << 2), (4, 1 << 1), (6, 1 << 2), (7, 1 << 4)];
        for (command, flags) in not_its_own {
            assert_eq!(refused(judge(&header(command, flags, 0, 512), &compact)).0, NbdErrno::Invalid);
        }
    }

    #[test]
    fn payload_flags_are_for_extended_headers() {
        let flag = CommandFlags::PAYLOAD_LEN.bits();
        let (compact, extended) = (terms(HeaderStyle::Compact), terms(HeaderStyle::Extended));
        assert_eq!(
            judge(&header(1, flag, 0, 512), &extended),
            Verdict::Execute(Command::Write { len: 512, fua: false })
        );
        assert_eq!(refused(judge(&header(1, flag, 0, 512), &compact)), (NbdErrno::Invalid, 512));
        assert_eq!(refused(judge(&header(0, flag, 0, 512), &compact)), (NbdErrno::Invalid, 0));
        // A payload that the command does not have must be skipped all the same.
        assert_eq!(refused(judge(&header(0, flag, 0, 512), &extended)), (NbdErrno::Invalid, 512));
        assert!(matches!(judge(&header(0, flag, 0, 1 << 40), &extended), Verdict::Broken(_)));
        assert_eq!(
            judge(&header(4, 0, 0, SIZE), &extended),
            Verdict::Execute(Command::Trim { len: SIZE, fua: false })
        );
    }

    #[test]
    fn requests_are_of_whole_blocks_where_these_were_agreed_on() {
        let terms = Terms { smallest_block: 4096, ..terms(HeaderStyle::Compact) };
        for command in [0, 1, 4, 5, 6, 7] {
            for (offset, len) in [(512, 4096), (4096, 512), (1, 1), (SIZE - 4096, 4095)] {
                let skip = if command == command::WRITE { len } else { 0 };
                let verdict = judge(&header(command, 0, offset, len), &terms);
                assert_eq!(refused(verdict), (NbdErrno::Invalid, skip), "command {command}");
            }
            let verdict = judge(&header(command, 0, SIZE - 4096, 4096), &terms);
            assert!(matches!(verdict, Verdict::Execute(_)), "command {command}");
            // Past the end is past the end, as without blocks.
            let past = refused(judge(&header(command, 0, SIZE, 512), &terms)).0;
            assert_eq!(past, if matches!(command, 1 | 6) { NbdErrno::NoSpace } else { NbdErrno::Invalid });
        }
        assert_eq!(judge(&header(3, 0, 0, 0), &terms), Verdict::Execute(Command::Flush));
        assert_eq!(judge(&header(3, 0, 1, 1), &terms), Verdict::Execute(Command::Flush));
    }

    #[test]
    fn what_the_export_does_not_allow_is_refused() {
        let read_only = Terms { flags: TransmissionFlags::READ_ONLY, ..terms(HeaderStyle::Compact) };
        for command in [1, 4, 6] {
            assert_eq!(refused(judge(&header(command, 0, 0, 512), &read_only)).0, NbdErrno::NotPermitted);
        }
        for command in [0, 3, 5, 7] {
            assert!(matches!(judge(&header(command, 0, 0, 512), &read_only), Verdict::Execute(_)));
        }
        let without = Terms { has_contexts: false, ..terms(HeaderStyle::Compact) };
        assert_eq!(refused(judge(&header(7, 0, 0, 512), &without)).0, NbdErrno::Invalid);
        assert_eq!(refused(judge(&header(7, 0, 0, 0), &terms(HeaderStyle::Compact))).0, NbdErrno::Invalid);
    }
}
