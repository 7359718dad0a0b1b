//! Numbers of the NBD protocol (`doc/proto.md` of the reference implementation).

use bitflags::bitflags;

/// First word of a server.
pub(crate) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of a server, and first of every option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of a reply to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request of 28 bytes.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a request of 32 bytes (extended headers).
pub(crate) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a reply without chunks.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk.
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of a chunk with extended headers.
pub(crate) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

bitflags! {
    /// Flags that both sides send before the first option. (A server's word has 16 bits, a client's 32.)
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct HandshakeFlags: u32 {
        /// Options may fail.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The reply to EXPORT_NAME ends without 124 zero bytes.
        const NO_ZEROES = 1 << 1;
    }

    /// Capabilities of an export.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writing is refused.
        const READ_ONLY = 1 << 1;
        /// FLUSH is understood.
        const SEND_FLUSH = 1 << 2;
        /// The flag FUA is understood.
        const SEND_FUA = 1 << 3;
        /// TRIM is understood.
        const SEND_TRIM = 1 << 5;
        /// WRITE_ZEROES is understood.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// The flag DF is understood.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers what completed on all.
        const CAN_MULTI_CONN = 1 << 8;
        /// CACHE is understood.
        const SEND_CACHE = 1 << 10;
        /// The flag FAST_ZERO is understood.
        const SEND_FAST_ZERO = 1 << 11;
    }

    /// Flags of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) struct CommandFlags: u16 {
        /// Durable when it completes.
        const FUA = 1 << 0;
        /// Zeroed space stays allocated.
        const NO_HOLE = 1 << 1;
        /// The reply to a read is one chunk.
        const DF = 1 << 2;
        /// The reply to BLOCK_STATUS has one extent.
        const REQ_ONE = 1 << 3;
        /// Zeroing fails rather than to take as long as writing.
        const FAST_ZERO = 1 << 4;
        /// The length is that of a payload (extended headers).
        const PAYLOAD_LEN = 1 << 5;
    }
}

/// Commands.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Options.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Kinds of information on an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// How an option is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OptionReply {
    Ack = 1,
    Server = 2,
    Info = 3,
    MetaContext = 4,
    Unsupported = (1 << 31) + 1,
    Policy = (1 << 31) + 2,
    Invalid = (1 << 31) + 3,
    #[cfg_attr(not(feature = "tls"), allow(dead_code))] // only a server with a certificate needs it
    TlsRequired = (1 << 31) + 5,
    Unknown = (1 << 31) + 6,
    BlockSizeRequired = (1 << 31) + 8,
    TooBig = (1 << 31) + 9,
    ExtendedHeadersRequired = (1 << 31) + 10,
}

/// Types of chunks.
pub(crate) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXTENDED: u16 = 6;
    pub(crate) const ERROR: u16 = (1 << 15) + 1;
    /// Flag: the last chunk of its reply.
    pub(crate) const DONE: u16 = 1;
}

/// Errors of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum NbdErrno {
    NotPermitted = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    Overflow = 75,
    NotSupported = 95,
}

/// `base:allocation`: no space is allocated.
pub(crate) const STATE_HOLE: u64 = 1;
/// `base:allocation`: reads as zero.
pub(crate) const STATE_ZERO: u64 = 2;
/// In the context of a dirty bitmap: it was written.
pub(crate) const STATE_DIRTY: u64 = 1;
