//! Parsing what a client says before it uses an export. Pure functions: any bytes give an option or a refusal.

use super::protocol::{OPTION_MAGIC, OptionReply, option};

/// Bytes of the longest name (of an export, of a metadata context).
pub const MAX_NAME: usize = 4096;
/// Bytes of an option's data that are looked at; longer ones are skipped and refused.
pub(crate) const MAX_OPTION_DATA: usize = 64 << 10;
/// Metadata contexts that one option may ask for.
const MAX_QUERIES: u32 = 256;

/// The header in front of an option's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHeader {
    /// Number of the option.
    pub code: u32,
    /// Bytes of data that follow.
    pub len: u32,
}

impl OptionHeader {
    /// Bytes of a header.
    pub const LEN: usize = 16;

    /// Reads a header; `None` if it is none.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let mut at = Cursor(bytes);
        if at.u64()? != OPTION_MAGIC {
            return None;
        }
        Some(Self { code: at.u32()?, len: at.u32()? })
    }
}

/// An option and its data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientOption<'a> {
    /// Use the export; no error can be told.
    ExportName(&'a str),
    /// End the session.
    Abort,
    /// Name the exports.
    List,
    /// Begin TLS.
    StartTls,
    /// Describe the export.
    Info(InfoRequest<'a>),
    /// Describe the export and use it.
    Go(InfoRequest<'a>),
    /// Replies may come in chunks.
    StructuredReply,
    /// Name the metadata contexts.
    ListMetaContext(ContextRequest<'a>),
    /// Choose metadata contexts.
    SetMetaContext(ContextRequest<'a>),
    /// Requests and replies have 64-bit lengths.
    ExtendedHeaders,
    /// Any other.
    Unknown(u32),
}

/// Data of INFO and GO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the export.
    pub export: &'a str,
    /// Kinds of information asked for.
    pub kinds: Vec<u16>,
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// Name of the export.
    pub export: &'a str,
    /// Names asked for, and patterns that end in `:`.
    pub queries: Vec<&'a str>,
}

/// Why an option's data is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionRefusal {
    pub(crate) reply: OptionReply,
    /// In words, for the client.
    pub message: &'static str,
}

/// Reads an option's data.
///
/// # Errors
/// It does not have the form that the protocol gives it.
pub fn parse_option(code: u32, data: &[u8]) -> Result<ClientOption<'_>, OptionRefusal> {
    let mut at = Cursor(data);
    let parsed = match code {
        option::EXPORT_NAME => ClientOption::ExportName(name(data)?),
        // Data is allowed here and has no meaning.
        option::ABORT => return Ok(ClientOption::Abort),
        option::LIST => at.ends().map(|()| ClientOption::List)?,
        option::STARTTLS => at.ends().map(|()| ClientOption::StartTls)?,
        option::STRUCTURED_REPLY => at.ends().map(|()| ClientOption::StructuredReply)?,
        option::EXTENDED_HEADERS => at.ends().map(|()| ClientOption::ExtendedHeaders)?,
        option::INFO => ClientOption::Info(info_request(&mut at)?),
        option::GO => ClientOption::Go(info_request(&mut at)?),
        option::LIST_META_CONTEXT => ClientOption::ListMetaContext(context_request(&mut at)?),
        option::SET_META_CONTEXT => ClientOption::SetMetaContext(context_request(&mut at)?),
        code => ClientOption::Unknown(code),
    };
    Ok(parsed)
}

fn invalid(message: &'static str) -> OptionRefusal {
    OptionRefusal { reply: OptionReply::Invalid, message }
}

fn name(bytes: &[u8]) -> Result<&str, OptionRefusal> {
    if bytes.len() > MAX_NAME {
        return Err(OptionRefusal { reply: OptionReply::TooBig, message: "a name has at most 4096 bytes" });
    }
    std::str::from_utf8(bytes).map_err(|_| invalid("a name is not UTF-8"))
}

fn info_request<'a>(at: &mut Cursor<'a>) -> Result<InfoRequest<'a>, OptionRefusal> {
    let export = at.counted_name()?;
    let count = at.u16().ok_or(invalid("the data ends too early"))?;
    let mut kinds = Vec::new();
    for _ in 0..count {
        kinds.push(at.u16().ok_or(invalid("the data ends too early"))?);
    }
    at.ends()?;
    Ok(InfoRequest { export, kinds })
}

fn context_request<'a>(at: &mut Cursor<'a>) -> Result<ContextRequest<'a>, OptionRefusal> {
    let export = at.counted_name()?;
    let count = at.u32().ok_or(invalid("the data ends too early"))?;
    if count > MAX_QUERIES {
        return Err(OptionRefusal { reply: OptionReply::TooBig, message: "at most 256 metadata contexts" });
    }
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(at.counted_name()?);
    }
    at.ends()?;
    Ok(ContextRequest { export, queries })
}

/// The unread rest of some bytes.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(len)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A name after its length.
    fn counted_name(&mut self) -> Result<&'a str, OptionRefusal> {
        let len = self.u32().ok_or(invalid("the data ends too early"))?;
        if len as usize > MAX_NAME {
            return name(&[0; MAX_NAME + 1]);
        }
        name(self.take(len as usize).ok_or(invalid("a name reaches past the end of the data"))?)
    }

    fn ends(&self) -> Result<(), OptionRefusal> {
        if self.0.is_empty() { Ok(()) } else { Err(invalid("there is more data than the option has")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name after its length.
    fn counted(name: &str) -> Vec<u8> {
        [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat()
    }

    fn refusal(code: u32, data: &[u8]) -> OptionReply {
        parse_option(code, data).expect_err("refused").reply
    }

    #[test]
    fn headers_need_their_magic() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(b"IHAVEOPT");
        bytes[8..].copy_from_slice(&[0, 0, 0, 7, 0, 0, 1, 2]);
        assert_eq!(OptionHeader::parse(&bytes), Some(OptionHeader { code: 7, len: 258 }));
        for at in 0..8 {
            let mut wrong = bytes;
            wrong[at] ^= 1;
            assert_eq!(OptionHeader::parse(&wrong), None);
        }
    }

    #[test]
    fn options_without_data_have_none() {
        for (code, expected) in [
            (option::LIST, ClientOption::List),
            (option::STARTTLS, ClientOption::StartTls),
            (option::STRUCTURED_REPLY, ClientOption::StructuredReply),
            (option::EXTENDED_HEADERS, ClientOption::ExtendedHeaders),
        ] {
            assert_eq!(parse_option(code, b""), Ok(expected));
            assert_eq!(refusal(code, b"x"), OptionReply::Invalid, "{code}");
        }
        assert_eq!(parse_option(option::ABORT, b"because"), Ok(ClientOption::Abort));
        assert_eq!(parse_option(99, b"anything"), Ok(ClientOption::Unknown(99)));
        assert_eq!(parse_option(4, b""), Ok(ClientOption::Unknown(4)), "PEEK_EXPORT was withdrawn");
    }

    #[test]
    fn names_are_bounded_utf8() {
        assert_eq!(parse_option(option::EXPORT_NAME, b"disk"), Ok(ClientOption::ExportName("disk")));
        assert_eq!(parse_option(option::EXPORT_NAME, b""), Ok(ClientOption::ExportName("")));
        assert_eq!(refusal(option::EXPORT_NAME, &[0xff]), OptionReply::Invalid);
        assert_eq!(refusal(option::EXPORT_NAME, &[b'a'; MAX_NAME + 1]), OptionReply::TooBig);
        let long = [&(MAX_NAME as u32 + 1).to_be_bytes()[..], &[b'a'; MAX_NAME + 3]].concat();
        assert_eq!(refusal(option::GO, &long), OptionReply::TooBig);
    }

    #[test]
    fn every_cut_of_go_is_refused() {
        let data = [counted("disk"), vec![0, 2, 0, 3, 0, 1]].concat();
        let expected = InfoRequest { export: "disk", kinds: vec![3, 1] };
        assert_eq!(parse_option(option::GO, &data), Ok(ClientOption::Go(expected.clone())));
        assert_eq!(parse_option(option::INFO, &data), Ok(ClientOption::Info(expected)));
        for len in 0..data.len() {
            assert_eq!(refusal(option::GO, &data[..len]), OptionReply::Invalid, "{len} bytes");
        }
        assert_eq!(refusal(option::GO, &[data, vec![0]].concat()), OptionReply::Invalid);
        assert_eq!(refusal(option::GO, &[0xff; 4]), OptionReply::TooBig);
    }

    #[test]
    fn every_cut_of_a_context_request_is_refused() {
        let data = [counted(""), vec![0, 0, 0, 2], counted("base:allocation"), counted("qemu:")].concat();
        let expected = ContextRequest { export: "", queries: vec!["base:allocation", "qemu:"] };
        let parsed = parse_option(option::SET_META_CONTEXT, &data);
        assert_eq!(parsed, Ok(ClientOption::SetMetaContext(expected)));
        for len in 0..data.len() {
            assert_eq!(refusal(option::LIST_META_CONTEXT, &data[..len]), OptionReply::Invalid, "{len} bytes");
        }
        let many = [counted(""), vec![0xff; 4]].concat();
        assert_eq!(refusal(option::SET_META_CONTEXT, &many), OptionReply::TooBig);
    }
}
