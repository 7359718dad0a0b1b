//! The options of a connection's handshake, asked one after the other.

use super::error::{ListError, fault};
use super::reply::{
    INFO_BLOCK_SIZE, INFO_DESCRIPTION, Listed, OPT_ABORT, OPT_INFO, OPT_LIST, OPT_LIST_META_CONTEXT,
    REP_INFO, REP_META_CONTEXT, REP_SERVER, Reply, option_name,
};
use std::io::{Read, Write};

/// Bytes of a reply at most.
const MAX_REPLY: u32 = 64 << 10;
/// Bytes of all replies together at most, what each takes in memory besides included.
const MAX_REPLIES: usize = 16 << 20;
/// Bytes that a reply takes besides its payload.
const REPLY: usize = 64;

const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;
const REP_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// A connection in its handshake.
pub(super) struct Options<S> {
    stream: S,
    /// Bytes that its replies may still have.
    left: usize,
}

impl<S: Read + Write> Options<S> {
    /// The options of a connection.
    pub(super) fn new(stream: S) -> Self {
        Self { stream, left: MAX_REPLIES }
    }

    /// The connection, whose replies have all come.
    pub(super) fn into_stream(self) -> S {
        self.stream
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], ListError> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Exchanges greetings.
    pub(super) fn begin(&mut self) -> Result<(), ListError> {
        if &self.read::<16>()? != b"NBDMAGICIHAVEOPT" {
            return fault("the server does not speak NBD: its greeting is wrong");
        }
        let flags = u16::from_be_bytes(self.read()?);
        if flags & FIXED_NEWSTYLE == 0 {
            return fault("Server does not support export lists");
        }
        Ok(self.stream.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())?)
    }

    fn send(&mut self, option: u32, payload: &[u8]) -> Result<(), ListError> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        Ok(self.stream.write_all(&bytes)?)
    }

    /// A reply to `option`.
    fn reply(&mut self, option: u32) -> Result<Reply, ListError> {
        let magic = u64::from_be_bytes(self.read()?);
        let of = u32::from_be_bytes(self.read()?);
        let kind = u32::from_be_bytes(self.read()?);
        let length = u32::from_be_bytes(self.read()?);
        if magic != REP_MAGIC {
            return fault("Unexpected option reply magic");
        }
        if of != option {
            return fault(format!(
                "Unexpected option type {of} ({}), expected {option} ({})",
                option_name(of),
                option_name(option)
            ));
        }
        if length > MAX_REPLY {
            return fault(format!("the server's reply to option {option} is too long: {length} bytes"));
        }
        let Some(left) = self.left.checked_sub(length as usize + REPLY) else {
            return fault(format!(
                "the server's replies are too many: they have more than {MAX_REPLIES} bytes"
            ));
        };
        self.left = left;
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(Reply { kind, payload })
    }

    /// Whether the server allows an option without data.
    pub(super) fn asks(&mut self, option: u32) -> Result<bool, ListError> {
        self.send(option, &[])?;
        self.reply(option)?.allows(option)
    }

    /// All exports, by their names alone.
    pub(super) fn names(&mut self) -> Result<Vec<Listed>, ListError> {
        self.send(OPT_LIST, &[])?;
        let mut exports = Vec::new();
        loop {
            let reply = self.reply(OPT_LIST)?;
            match reply.is_end(OPT_LIST, REP_SERVER)? {
                None => return fault("Server does not support export lists"),
                Some(true) => return Ok(exports),
                Some(false) => exports.push(reply.export()?),
            }
        }
    }

    /// Asks for an export's figures; `false` if the server has no such option.
    pub(super) fn describe(&mut self, export: &mut Listed) -> Result<bool, ListError> {
        let mut query = name_query(export);
        query.extend(2_u16.to_be_bytes());
        query.extend(INFO_DESCRIPTION.to_be_bytes());
        query.extend(INFO_BLOCK_SIZE.to_be_bytes());
        self.send(OPT_INFO, &query)?;
        loop {
            let reply = self.reply(OPT_INFO)?;
            match reply.is_end(OPT_INFO, REP_INFO)? {
                None => return Ok(false),
                Some(true) if export.size.is_none_or(|(_, flags)| flags == 0) => {
                    return fault("broken server omitted NBD_INFO_EXPORT");
                }
                Some(true) => return Ok(true),
                Some(false) => reply.add_to(export)?,
            }
        }
    }

    /// Asks for an export's metadata contexts. A refusal leaves it without any.
    pub(super) fn contexts(&mut self, export: &mut Listed) -> Result<(), ListError> {
        let mut query = name_query(export);
        query.extend(0_u32.to_be_bytes());
        self.send(OPT_LIST_META_CONTEXT, &query)?;
        loop {
            let reply = self.reply(OPT_LIST_META_CONTEXT)?;
            if reply.refuses() || reply.is_end(OPT_LIST_META_CONTEXT, REP_META_CONTEXT)? == Some(true) {
                return Ok(());
            }
            export.contexts.push(reply.context()?);
        }
    }

    /// Says that nothing follows.
    pub(super) fn end(&mut self) -> Result<(), ListError> {
        self.send(OPT_ABORT, &[])
    }
}

/// The start of a query about an export.
fn name_query(export: &Listed) -> Vec<u8> {
    let mut query = (export.name.len() as u32).to_be_bytes().to_vec();
    query.extend(&export.name);
    query
}
