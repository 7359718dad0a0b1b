//! Replies to options, and what is in them.
//!
//! The messages are QEMU's. What it takes for a fault of the server is one here.

use super::error::{ListError, fault};

pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_STARTTLS: u32 = 5;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
/// Set in the types of replies that refuse.
const REP_ERROR: u32 = 1 << 31;
const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;

const INFO_EXPORT: u16 = 0;
pub(super) const INFO_DESCRIPTION: u16 = 2;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// Bytes of a string at most.
const MAX_STRING: usize = 4096;

/// A reply.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) kind: u32,
    pub(super) payload: Vec<u8>,
}

/// Everything that a server tells of an export.
#[derive(Debug, Default)]
pub(super) struct Listed {
    pub(super) name: Vec<u8>,
    pub(super) description: String,
    /// Size and transmission flags; `None` if the server tells no more than names.
    pub(super) size: Option<(u64, u16)>,
    pub(super) blocks: Option<[u32; 3]>,
    pub(super) contexts: Vec<String>,
}

impl Reply {
    /// Whether it is the last reply to an option: `None` if it refuses the option.
    ///
    /// # Errors
    /// It refuses the option, and not because the server does not know it; it ends the option, and has a payload; it is
    /// neither the end nor of the type `expected`.
    pub(super) fn is_end(&self, option: u32, expected: u32) -> Result<Option<bool>, ListError> {
        if self.kind & REP_ERROR != 0 {
            return if self.kind == REP_ERR_UNSUP { Ok(None) } else { Err(self.refusal(option)) };
        }
        if self.kind == REP_ACK {
            return if self.payload.is_empty() {
                Ok(Some(true))
            } else {
                fault("length too long for option end")
            };
        }
        if self.kind != expected {
            let (kind, wanted) = (type_name(self.kind), type_name(expected));
            return fault(format!(
                "Unexpected reply type {} ({kind}), expected {expected} ({wanted})",
                self.kind
            ));
        }
        Ok(Some(false))
    }

    /// Whether it allows an option that has one reply. Not to know the option is no fault, nor is another refusal of an option
    /// that can be done without.
    ///
    /// # Errors
    /// Another type, or a payload.
    pub(super) fn allows(&self, option: u32) -> Result<bool, ListError> {
        let name = option_name(option);
        match self.kind {
            REP_ERR_UNSUP => Ok(false),
            kind if kind & REP_ERROR != 0 && option == OPT_STARTTLS => Err(self.refusal(option)),
            kind if kind & REP_ERROR != 0 => Ok(false),
            REP_ACK if self.payload.is_empty() => Ok(true),
            REP_ACK => fault(format!(
                "Option {option} ('{name}') response length is {} (it should be zero)",
                self.payload.len()
            )),
            kind => fault(format!(
                "Server answered option {option} ({name}) with unexpected reply {kind} ({})",
                type_name(kind)
            )),
        }
    }

    /// Whether it refuses an option.
    pub(super) fn refuses(&self) -> bool {
        self.kind & REP_ERROR != 0
    }

    fn refusal(&self, option: u32) -> ListError {
        let named = format!("option {option} ({})", option_name(option));
        let reason = match self.kind & !REP_ERROR {
            2 => format!("Denied by server for {named}"),
            3 => format!("Invalid parameters for {named}"),
            4 => format!("Server lacks support for {named}"),
            5 => format!("TLS negotiation required before {named}"),
            6 => "Requested export not available".to_owned(),
            7 => format!("Server shutting down before {named}"),
            8 => format!("Server requires INFO_BLOCK_SIZE for {named}"),
            _ => format!("Unknown error code when asking for {named}"),
        };
        let hint = if self.kind == REP_ERR_TLS_REQD { " (Did you forget a valid tls-creds?)" } else { "" };
        let said = if self.payload.is_empty() {
            String::new()
        } else {
            format!("; server reported: {}", text(&self.payload))
        };
        ListError::Server(format!("{reason}{hint}{said}"))
    }

    /// The export of a reply to `OPT_LIST`.
    pub(super) fn export(&self) -> Result<Listed, ListError> {
        let Some((length, rest)) = self.payload.split_first_chunk() else {
            return fault(format!("incorrect option length {}", self.payload.len()));
        };
        let length = u32::from_be_bytes(*length) as usize;
        let Some((name, description)) = rest.split_at_checked(length).filter(|_| length <= MAX_STRING) else {
            return fault("incorrect name length in server's list response");
        };
        if description.len() > MAX_STRING {
            return fault("incorrect description length in server's list response");
        }
        Ok(Listed { name: name.to_vec(), description: text(description), ..Listed::default() })
    }

    /// Adds a reply to `OPT_INFO` to an export.
    pub(super) fn add_to(&self, export: &mut Listed) -> Result<(), ListError> {
        let Some((kind, rest)) = self.payload.split_first_chunk() else {
            return fault(format!("NBD_REP_INFO length {} is too short", self.payload.len()));
        };
        let bad_size = || format!("remaining export info len {} is unexpected size", rest.len());
        match u16::from_be_bytes(*kind) {
            INFO_EXPORT => {
                let (Some(size), Some((_, flags)), 10) =
                    (rest.first_chunk(), rest.split_last_chunk(), rest.len())
                else {
                    return fault(bad_size());
                };
                let (size, flags) = (u64::from_be_bytes(*size), u16::from_be_bytes(*flags));
                if let Some([smallest, ..]) =
                    export.blocks.filter(|[smallest, ..]| size % u64::from(*smallest) != 0)
                {
                    return fault(format!(
                        "export size {size} is not multiple of minimum block size {smallest}"
                    ));
                }
                export.size = Some((size, flags));
            }
            INFO_BLOCK_SIZE => {
                let (sizes, []) = rest.as_chunks::<4>() else { return fault(bad_size()) };
                let Ok(sizes) = <[[u8; 4]; 3]>::try_from(sizes) else { return fault(bad_size()) };
                export.blocks = Some(block_sizes(sizes.map(u32::from_be_bytes))?);
            }
            INFO_DESCRIPTION if rest.len() > MAX_STRING => {
                return fault("incorrect description length in server's info response");
            }
            INFO_DESCRIPTION => export.description = text(rest),
            _ => {}
        }
        Ok(())
    }

    /// The name of a reply to `OPT_LIST_META_CONTEXT`.
    pub(super) fn context(&self) -> Result<String, ListError> {
        match self.payload.get(4..) {
            Some(name) if !name.is_empty() && name.len() <= MAX_STRING => Ok(text(name)),
            _ => fault(format!(
                "Failed to negotiate meta context, server answered with unexpected length {}",
                self.payload.len()
            )),
        }
    }
}

/// Sizes of blocks that can be.
fn block_sizes([smallest, preferred, largest]: [u32; 3]) -> Result<[u32; 3], ListError> {
    if !smallest.is_power_of_two() {
        return fault(format!("server minimum block size {smallest} is not a power of two"));
    }
    if !preferred.is_power_of_two() || preferred < smallest {
        return fault(format!("server preferred block size {preferred} is not valid"));
    }
    if largest < smallest {
        return fault(format!("server maximum block size {largest} is not valid"));
    }
    Ok([smallest, preferred, largest])
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(super) fn option_name(option: u32) -> &'static str {
    match option {
        OPT_ABORT => "abort",
        OPT_LIST => "list",
        OPT_STARTTLS => "starttls",
        OPT_INFO => "info",
        OPT_STRUCTURED_REPLY => "structured reply",
        OPT_LIST_META_CONTEXT => "list meta context",
        OPT_EXTENDED_HEADERS => "extended headers",
        _ => "<unknown>",
    }
}

fn type_name(kind: u32) -> &'static str {
    match kind {
        REP_ACK => "ack",
        REP_SERVER => "server",
        REP_INFO => "info",
        REP_META_CONTEXT => "meta context",
        _ => "<unknown>",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(payload: &[u8]) -> Result<Listed, String> {
        let mut export = Listed::default();
        let reply = Reply { kind: REP_INFO, payload: payload.to_vec() };
        reply.add_to(&mut export).map_err(|error| error.to_string())?;
        Ok(export)
    }

    fn blocks(sizes: [u32; 3]) -> Result<[u32; 3], String> {
        let sizes = sizes.map(u32::to_be_bytes).concat();
        info(&[&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes].concat()).map(|export| export.blocks.unwrap())
    }

    #[test]
    fn figures_that_can_not_be_are_faults() {
        assert_eq!(blocks([1, 4096, 1 << 25]), Ok([1, 4096, 1 << 25]));
        for (sizes, part) in [
            ([3, 4096, 1 << 25], "minimum block size 3"),
            ([0, 4096, 1 << 25], "minimum block size 0"),
            ([512, 256, 1 << 25], "preferred block size 256"),
            ([512, 5000, 1 << 25], "preferred block size 5000"),
            ([512, 512, 0], "maximum block size 0"),
        ] {
            assert!(blocks(sizes).unwrap_err().contains(part), "{sizes:?}");
        }
        let export = info(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3]).unwrap();
        assert_eq!(export.size, Some((256, 3)));
        let mut uneven = Listed { blocks: Some([512, 512, 512]), ..Listed::default() };
        let reply = Reply { kind: REP_INFO, payload: vec![0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3] };
        assert!(reply.add_to(&mut uneven).unwrap_err().to_string().contains("not multiple"));
        for cut in [&[0][..], &[0, 0, 1], &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 3, 0], &[0, 3, 0, 0, 0, 1]] {
            assert!(info(cut).unwrap_err().contains("len"), "{cut:?}");
        }
    }

    #[test]
    fn strings_have_limits() {
        let listed = |name: usize, description: usize, more: usize| {
            let mut payload = ((name + more) as u32).to_be_bytes().to_vec();
            payload.extend(vec![b'x'; name + description]);
            Reply { kind: REP_SERVER, payload }.export().map_err(|error| error.to_string())
        };
        assert!(listed(4096, 4096, 0).is_ok_and(|export| export.name.len() == 4096));
        for (lengths, part) in [((4097, 0, 0), "name"), ((1, 4097, 0), "description"), ((1, 0, 1), "name")] {
            let error = listed(lengths.0, lengths.1, lengths.2).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let context = |length: usize| Reply { kind: REP_META_CONTEXT, payload: vec![b'x'; length] }.context();
        assert!(context(4 + 4096).is_ok());
        assert!(context(4 + 4097).is_err() && context(4).is_err() && context(1).is_err());
        assert!(info(&[&[0, 2][..], &[b'x'; 4097]].concat()).is_err());
    }
}
