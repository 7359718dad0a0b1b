//! Numbers of the protocol that a client needs.

/// First word of a server.
pub(super) const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of a server, and first of every option.
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second word of a server of the old style.
pub(super) const OLD_STYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// First word of a reply to an option.
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request of 28 bytes.
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a request of 32 bytes (extended headers).
pub(super) const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a reply without chunks.
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk.
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of a chunk with extended headers.
pub(super) const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags: options may fail, and the reply to EXPORT_NAME ends without 124 zero bytes.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 1 << 1;

/// Capabilities of an export.
pub(super) mod export {
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Flags of a request.
pub(super) mod command_flag {
    pub(crate) const FUA: u16 = 1;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload (extended headers).
    pub(crate) const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Commands.
pub(super) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Options.
pub(super) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options. Errors have the highest bit.
pub(super) mod option_reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERROR: u32 = 1 << 31;
    pub(crate) const UNSUPPORTED: u32 = ERROR + 1;
    pub(crate) const POLICY: u32 = ERROR + 2;
    pub(crate) const TLS_REQUIRED: u32 = ERROR + 5;
    pub(crate) const UNKNOWN: u32 = ERROR + 6;
    pub(crate) const BLOCK_SIZE_REQUIRED: u32 = ERROR + 8;
}

/// Kinds of information on an export.
pub(super) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Types of chunks.
pub(super) mod chunk {
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const OFFSET_HOLE: u16 = 2;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXTENDED: u16 = 6;
    /// Bit of all types that are errors.
    pub(crate) const ERROR_BIT: u16 = 1 << 15;
    /// Flag: the last chunk of its reply.
    pub(crate) const DONE: u16 = 1;
}

/// The error of a server that is about to end.
pub(super) const ESHUTDOWN: u32 = 108;

/// `base:allocation`: reads as zero.
pub(super) const STATE_ZERO: u64 = 2;
/// `qemu:dirty-bitmap:NAME`: marked.
pub(super) const STATE_DIRTY: u64 = 1;
/// The context of allocation.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
