//! Encoding replies.

use super::protocol::{EXTENDED_REPLY_MAGIC, NbdErrno, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// Bytes of an error message; the protocol has room for 4096.
const MAX_MESSAGE: usize = 1024;

/// The form of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplyStyle {
    /// An error number; what was read follows.
    Simple,
    /// Chunks with lengths of 32 bits.
    Structured,
    /// Chunks with lengths of 64 bits.
    Extended,
}

/// Which request a reply is to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
}

/// The head of a reply, on the stack.
pub(crate) struct Head {
    bytes: [u8; 48],
    len: usize,
}

impl Head {
    fn new() -> Self {
        Self { bytes: [0; 48], len: 0 }
    }

    fn put<const N: usize>(mut self, bytes: [u8; N]) -> Self {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += N;
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn simple(ticket: Ticket, errno: u32) -> Self {
        Self::new()
            .put(SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(errno.to_be_bytes())
            .put(ticket.cookie.to_be_bytes())
    }

    /// The only or last chunk of a reply, with `len` bytes of content.
    fn last_chunk(style: ReplyStyle, ticket: Ticket, kind: u16, len: u64) -> Self {
        Self::chunk(style, ticket, kind, chunk::DONE, len)
    }

    fn chunk(style: ReplyStyle, ticket: Ticket, kind: u16, flags: u16, len: u64) -> Self {
        let head = Self::new();
        match style {
            ReplyStyle::Extended => head
                .put(EXTENDED_REPLY_MAGIC.to_be_bytes())
                .put(flags.to_be_bytes())
                .put(kind.to_be_bytes())
                .put(ticket.cookie.to_be_bytes())
                .put(ticket.offset.to_be_bytes())
                .put(len.to_be_bytes()),
            ReplyStyle::Simple | ReplyStyle::Structured => head
                .put(STRUCTURED_REPLY_MAGIC.to_be_bytes())
                .put(flags.to_be_bytes())
                .put(kind.to_be_bytes())
                .put(ticket.cookie.to_be_bytes())
                .put((len as u32).to_be_bytes()),
        }
    }
}

/// The header in front of `len` bytes that were read.
pub(crate) fn read_head(style: ReplyStyle, ticket: Ticket, len: u32) -> Head {
    match style {
        ReplyStyle::Simple => Head::simple(ticket, 0),
        _ if len == 0 => Head::last_chunk(style, ticket, chunk::NONE, 0),
        _ => Head::last_chunk(style, ticket, chunk::OFFSET_DATA, u64::from(len) + 8)
            .put(ticket.offset.to_be_bytes()),
    }
}

/// A success without data.
pub(crate) fn done_head(style: ReplyStyle, ticket: Ticket) -> Head {
    match style {
        // Allowed beside structured replies for every command without data, and the shortest.
        ReplyStyle::Simple | ReplyStyle::Structured => Head::simple(ticket, 0),
        ReplyStyle::Extended => Head::last_chunk(style, ticket, chunk::NONE, 0),
    }
}

/// An error, with a message where the style has room for one.
pub(crate) fn error_reply(style: ReplyStyle, ticket: Ticket, errno: NbdErrno, message: &str) -> Vec<u8> {
    if style == ReplyStyle::Simple {
        return Head::simple(ticket, errno as u32).bytes().to_vec();
    }
    let mut len = message.len().min(MAX_MESSAGE);
    while !message.is_char_boundary(len) {
        len -= 1;
    }
    let message = &message.as_bytes()[..len];
    let head = Head::last_chunk(style, ticket, chunk::ERROR, 6 + message.len() as u64);
    let mut reply = head.bytes().to_vec();
    reply.extend((errno as u32).to_be_bytes());
    reply.extend((message.len() as u16).to_be_bytes());
    reply.extend(message);
    reply
}

/// A run of one state, in the form of BLOCK_STATUS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StatusRun {
    /// Bytes.
    pub(crate) len: u64,
    /// Their state in the context.
    pub(crate) flags: u64,
}

/// The chunk of one metadata context.
pub(crate) fn status_chunk(
    style: ReplyStyle,
    ticket: Ticket,
    context: u32,
    runs: &[StatusRun],
    is_last: bool,
) -> Vec<u8> {
    let flags = if is_last { chunk::DONE } else { 0 };
    let count = runs.len() as u64;
    let mut reply;
    if style == ReplyStyle::Extended {
        let head = Head::chunk(style, ticket, chunk::BLOCK_STATUS_EXTENDED, flags, 8 + 16 * count);
        reply = head.bytes().to_vec();
        reply.extend(context.to_be_bytes());
        reply.extend((count as u32).to_be_bytes());
        for run in runs {
            reply.extend(run.len.to_be_bytes());
            reply.extend(run.flags.to_be_bytes());
        }
    } else {
        let head = Head::chunk(style, ticket, chunk::BLOCK_STATUS, flags, 4 + 8 * count);
        reply = head.bytes().to_vec();
        reply.extend(context.to_be_bytes());
        for run in runs {
            reply.extend((run.len as u32).to_be_bytes());
            reply.extend((run.flags as u32).to_be_bytes());
        }
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICKET: Ticket = Ticket { cookie: 0x0102_0304_0506_0708, offset: 0x1000 };

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
    }

    // The expected bytes are put together from the protocol's description, field by field.
    #[test]
    fn reads_have_their_head_in_every_style() {
        let head = |style| hex(read_head(style, TICKET, 0x200).bytes());
        assert_eq!(head(ReplyStyle::Simple), "67446698 00000000 0102030405060708".replace(' ', ""));
        assert_eq!(
            head(ReplyStyle::Structured),
            "668e33ef 0001 0001 0102030405060708 00000208 0000000000001000".replace(' ', "")
        );
        assert_eq!(
            head(ReplyStyle::Extended),
            "6e8a278c 0001 0001 0102030405060708 0000000000001000 0000000000000208 0000000000001000"
                .replace(' ', "")
        );
    }

    #[test]
    fn errors_carry_their_message() {
        let reply = |style| hex(&error_reply(style, TICKET, NbdErrno::NoSpace, "full"));
        assert_eq!(reply(ReplyStyle::Simple), "67446698 0000001c 0102030405060708".replace(' ', ""));
        assert_eq!(
            reply(ReplyStyle::Structured),
            "668e33ef 0001 8001 0102030405060708 0000000a 0000001c 0004 66756c6c".replace(' ', "")
        );
        assert_eq!(
            reply(ReplyStyle::Extended),
            "6e8a278c 0001 8001 0102030405060708 0000000000001000 000000000000000a 0000001c 0004 66756c6c"
                .replace(' ', "")
        );
    }

    #[test]
    fn messages_that_are_too_long_end_with_a_whole_character() {
        for (message, len) in
            [("é".repeat(1000), 1024), (format!("x{}", "é".repeat(1000)), 1023), ("€".repeat(9), 27)]
        {
            let reply = error_reply(ReplyStyle::Structured, TICKET, NbdErrno::Io, &message);
            assert_eq!(reply[24..26], (len as u16).to_be_bytes());
            assert_eq!(std::str::from_utf8(&reply[26..]).unwrap(), &message[..len]);
        }
    }

    #[test]
    fn success_without_data_is_short() {
        assert_eq!(done_head(ReplyStyle::Structured, TICKET).bytes().len(), 16);
        assert_eq!(
            hex(done_head(ReplyStyle::Extended, TICKET).bytes()),
            "6e8a278c 0001 0000 0102030405060708 0000000000001000 0000000000000000".replace(' ', "")
        );
    }

    #[test]
    fn states_are_listed_per_context() {
        let runs = [StatusRun { len: 0x10000, flags: 3 }, StatusRun { len: 0x200, flags: 0 }];
        assert_eq!(
            hex(&status_chunk(ReplyStyle::Structured, TICKET, 7, &runs, false)),
            "668e33ef 0000 0005 0102030405060708 00000014 00000007 00010000 00000003 00000200 00000000"
                .replace(' ', "")
        );
        assert_eq!(
            hex(&status_chunk(ReplyStyle::Extended, TICKET, 7, &runs[..1], true)),
            "6e8a278c 0001 0006 0102030405060708 0000000000001000 0000000000000018 00000007 00000001 \
             0000000000010000 0000000000000003"
                .replace(' ', "")
        );
    }
}
