//! The conversation before the first request.

use super::config::NbdConfig;
use super::contexts::{Context, Contexts};
use super::inbox::Inbox;
use super::option::{
    ClientOption, ContextRequest, InfoRequest, MAX_OPTION_DATA, OptionHeader, OptionRefusal, parse_option,
};
use super::peers::Peer;
use super::protocol::{
    HandshakeFlags, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionReply, SERVER_MAGIC, TransmissionFlags, info,
    option,
};
use super::reply::ReplyStyle;
use super::request::{HeaderStyle, MAX_PAYLOAD};
use super::transport::Transport;
use crate::export::Export;
use crate::exports::Exports;
use std::io;
use std::sync::Arc;
use zebu_engine::Access;
use zebu_engine::storage::{IoBuf, Worker};

/// The longest data of an option that is skipped to answer with an error; with more the session ends.
const MAX_SKIPPED_OPTION: u32 = 1 << 20;
/// Block size that suits every image, whose logical blocks may be as large.
const PREFERRED_BLOCK: u32 = 4096;

/// The result of a handshake.
#[derive(Debug, Clone)]
pub(crate) struct Agreement {
    pub(crate) export: Arc<Export>,
    pub(crate) flags: TransmissionFlags,
    pub(crate) requests: HeaderStyle,
    pub(crate) replies: ReplyStyle,
    pub(crate) contexts: Contexts,
    /// Bytes of which the client's requests are multiples, as it knows.
    pub(crate) smallest_block: u32,
}

/// A handshake under way.
pub(crate) struct Handshake<'a> {
    worker: &'a Worker,
    transport: Transport,
    config: &'a NbdConfig,
    exports: &'a Exports,
    peer: &'a Peer,
    client: HandshakeFlags,
    replies: ReplyStyle,
    /// The contexts chosen, and for which export.
    contexts: Option<(Arc<Export>, Contexts)>,
}

/// The next step after an option.
enum Next {
    Option,
    Serve(Box<Agreement>),
    Close,
}

fn violation(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl<'a> Handshake<'a> {
    pub(crate) fn new(
        worker: &'a Worker,
        transport: &Transport,
        exports: &'a Exports,
        config: &'a NbdConfig,
        peer: &'a Peer,
    ) -> Self {
        Self {
            worker,
            transport: transport.clone(),
            config,
            exports,
            peer,
            client: HandshakeFlags::empty(),
            replies: ReplyStyle::Simple,
            contexts: None,
        }
    }

    /// Talks until an export is chosen; `None` if the client leaves in good order.
    ///
    /// # Errors
    /// The connection breaks, or the client does not speak the protocol.
    pub(crate) async fn run(&mut self, inbox: &mut Inbox) -> io::Result<Option<Agreement>> {
        let ours = HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES;
        let mut hello = SERVER_MAGIC.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend((ours.bits() as u16).to_be_bytes());
        self.send(&hello).await?;
        let Some(flags) = take::<4>(inbox).await? else { return Ok(None) };
        self.client = HandshakeFlags::from_bits(u32::from_be_bytes(flags))
            .ok_or_else(|| violation("the client set unknown handshake flags"))?;
        let mut data = Vec::new();
        loop {
            let Some(header) = take::<{ OptionHeader::LEN }>(inbox).await? else { return Ok(None) };
            let header =
                OptionHeader::parse(&header).ok_or_else(|| violation("an option without its magic"))?;
            if header.len as usize > MAX_OPTION_DATA {
                if header.len > MAX_SKIPPED_OPTION || header.code == option::EXPORT_NAME {
                    return Err(violation(format!("an option with {} bytes of data", header.len)));
                }
                inbox.skip(header.len.into()).await?;
                self.refuse(header.code, OptionReply::TooBig, "the option's data is too long").await?;
                continue;
            }
            data.resize(header.len as usize, 0);
            inbox.read_exact(&mut data).await?;
            match self.answer(header.code, &data, inbox).await? {
                Next::Option => {}
                Next::Serve(agreement) => return Ok(Some(*agreement)),
                Next::Close => return Ok(None),
            }
        }
    }

    async fn answer(&mut self, code: u32, data: &[u8], inbox: &mut Inbox) -> io::Result<Next> {
        let parsed = match parse_option(code, data) {
            Ok(parsed) => parsed,
            Err(refusal) if code == option::EXPORT_NAME => return Err(violation(refusal.message)),
            Err(OptionRefusal { reply, message }) => {
                self.refuse(code, reply, message).await?;
                return Ok(Next::Option);
            }
        };
        if self.needs_tls() && !matches!(parsed, ClientOption::Abort | ClientOption::StartTls) {
            if code == option::EXPORT_NAME {
                return Err(violation("the client does not use TLS"));
            }
            self.refuse(code, OptionReply::TlsRequired, "this server needs TLS").await?;
            return Ok(Next::Option);
        }
        match parsed {
            ClientOption::ExportName(name) => return self.export_name(name).await,
            ClientOption::Abort => {
                // The client may be gone already.
                let _ = self.reply(code, OptionReply::Ack, &[]).await;
                return Ok(Next::Close);
            }
            ClientOption::List => self.list(code).await?,
            ClientOption::StartTls => self.start_tls(code, inbox).await?,
            ClientOption::Info(request) => {
                if let Some(export) = self.describe(code, &request).await? {
                    self.end_description(code, &request, &export).await?;
                }
            }
            ClientOption::Go(request) => {
                if self.exports.find_any(request.export).is_some() {
                    self.keep_place()?;
                }
                if let Some(export) = self.describe(code, &request).await? {
                    self.reply(code, OptionReply::Ack, &[]).await?;
                    // Whoever does not ask may ask for any bytes.
                    let block = if asks_for_blocks(&request) { smallest_block(&export) } else { 1 };
                    return Ok(Next::Serve(Box::new(self.agree(export, block))));
                }
            }
            ClientOption::StructuredReply => self.choose(code, ReplyStyle::Structured).await?,
            ClientOption::ExtendedHeaders => self.choose(code, ReplyStyle::Extended).await?,
            ClientOption::ListMetaContext(request) => self.contexts(code, &request, Purpose::List).await?,
            ClientOption::SetMetaContext(request) => self.contexts(code, &request, Purpose::Set).await?,
            ClientOption::Unknown(_) => {
                self.refuse(code, OptionReply::Unsupported, "the option is unknown").await?;
            }
        }
        Ok(Next::Option)
    }

    /// Agrees on a form of replies that can do more than the one before.
    async fn choose(&mut self, code: u32, wanted: ReplyStyle) -> io::Result<()> {
        let (reply, message) = match (self.replies, wanted) {
            (ReplyStyle::Extended, ReplyStyle::Extended) => {
                (OptionReply::Invalid, "extended headers were agreed on already")
            }
            (ReplyStyle::Extended, _) => (
                OptionReply::ExtendedHeadersRequired,
                "extended headers were agreed on, which include structured replies",
            ),
            (ReplyStyle::Structured, ReplyStyle::Structured) => {
                (OptionReply::Invalid, "structured replies were agreed on already")
            }
            _ => {
                self.replies = wanted;
                return self.reply(code, OptionReply::Ack, &[]).await;
            }
        };
        self.refuse(code, reply, message).await
    }

    /// Whether the client has to begin TLS before anything else.
    fn needs_tls(&self) -> bool {
        self.config.has_tls() && !self.transport.is_encrypted()
    }

    #[cfg(feature = "tls")]
    async fn start_tls(&mut self, code: u32, inbox: &mut Inbox) -> io::Result<()> {
        let Some(tls) = &self.config.tls else {
            return self.refuse(code, OptionReply::Policy, "this server has no certificate").await;
        };
        if self.transport.is_encrypted() {
            return self.refuse(code, OptionReply::Invalid, "TLS is there already").await;
        }
        if inbox.has(1) {
            // It would be taken for something that came encrypted.
            return Err(violation("the client sent something between its wish for TLS and the answer"));
        }
        self.reply(code, OptionReply::Ack, &[]).await?;
        self.transport = self.transport.start_tls(self.worker, tls).await?;
        inbox.switch(&self.transport);
        // Whatever was agreed on before may be somebody else's.
        self.replies = ReplyStyle::Simple;
        self.contexts = None;
        Ok(())
    }

    #[cfg(not(feature = "tls"))]
    async fn start_tls(&mut self, code: u32, _: &mut Inbox) -> io::Result<()> {
        self.refuse(code, OptionReply::Policy, "this server was built without TLS").await
    }

    /// The connection as it is after the handshake.
    pub(crate) fn transport(&self) -> &Transport {
        &self.transport
    }

    async fn export_name(&mut self, name: &str) -> io::Result<Next> {
        if self.replies == ReplyStyle::Extended {
            return Err(violation("with extended headers, an export is chosen with the option GO"));
        }
        let Some(export) = self.exports.find_any(name) else {
            return Err(violation(format!("there is no export '{}'", name.escape_debug())));
        };
        self.keep_place()?;
        let mut reply = export.image().virtual_size().to_be_bytes().to_vec();
        reply.extend(self.flags(&export).bits().to_be_bytes());
        if !self.client.contains(HandshakeFlags::NO_ZEROES) {
            reply.resize(reply.len() + 124, 0);
        }
        self.send(&reply).await?;
        Ok(Next::Serve(Box::new(self.agree(export, 1))))
    }

    async fn list(&self, code: u32) -> io::Result<()> {
        for export in self.exports.all() {
            let mut data = (export.name().len() as u32).to_be_bytes().to_vec();
            data.extend(export.name().as_bytes());
            data.extend(export.description().as_bytes());
            self.reply(code, OptionReply::Server, &data).await?;
        }
        self.reply(code, OptionReply::Ack, &[]).await
    }

    /// Answers INFO and GO but for the end; the export, if there is one of that name.
    async fn describe(&self, code: u32, request: &InfoRequest<'_>) -> io::Result<Option<Arc<Export>>> {
        let Some(export) = self.exports.find_any(request.export) else {
            self.refuse(code, OptionReply::Unknown, "there is no export of that name").await?;
            return Ok(None);
        };
        let mut data = info::EXPORT.to_be_bytes().to_vec();
        data.extend(export.image().virtual_size().to_be_bytes());
        data.extend(self.flags(&export).bits().to_be_bytes());
        self.reply(code, OptionReply::Info, &data).await?;
        for (kind, text) in [(info::NAME, export.name()), (info::DESCRIPTION, export.description())] {
            if request.kinds.contains(&kind) && !text.is_empty() {
                let data = [&kind.to_be_bytes()[..], text.as_bytes()].concat();
                self.reply(code, OptionReply::Info, &data).await?;
            }
        }
        if asks_for_blocks(request) {
            let mut data = info::BLOCK_SIZE.to_be_bytes().to_vec();
            for size in [smallest_block(&export), PREFERRED_BLOCK, MAX_PAYLOAD] {
                data.extend(size.to_be_bytes());
            }
            self.reply(code, OptionReply::Info, &data).await?;
        }
        Ok(Some(export))
    }

    /// Ends the answer to INFO: with an error, as in QEMU, if blocks matter and were not asked for.
    async fn end_description(&self, code: u32, request: &InfoRequest<'_>, export: &Export) -> io::Result<()> {
        if smallest_block(export) > 1 && !asks_for_blocks(request) {
            let message = "the export has large blocks: ask for their size";
            return self.refuse(code, OptionReply::BlockSizeRequired, message).await;
        }
        self.reply(code, OptionReply::Ack, &[]).await
    }

    async fn contexts(
        &mut self,
        code: u32,
        request: &ContextRequest<'_>,
        purpose: Purpose,
    ) -> io::Result<()> {
        if self.replies == ReplyStyle::Simple {
            return self.refuse(code, OptionReply::Invalid, "metadata needs structured replies").await;
        }
        if purpose == Purpose::Set {
            // Whatever comes of it, what was chosen before is void.
            self.contexts = None;
        }
        let Some(export) = self.exports.find_any(request.export) else {
            return self.refuse(code, OptionReply::Unknown, "there is no export of that name").await;
        };
        let (found, id_of): (_, fn(Context) -> u32) = match purpose {
            Purpose::List => (Contexts::listed(&request.queries, export.bitmaps()), |_| 0),
            Purpose::Set => (Contexts::chosen(&request.queries, export.bitmaps()), Context::id),
        };
        for context in found.iter() {
            let data =
                [&id_of(context).to_be_bytes()[..], context.name(export.bitmaps()).as_bytes()].concat();
            self.reply(code, OptionReply::MetaContext, &data).await?;
        }
        if purpose == Purpose::Set {
            self.contexts = Some((Arc::clone(&export), found));
        }
        self.reply(code, OptionReply::Ack, &[]).await
    }

    fn flags(&self, export: &Export) -> TransmissionFlags {
        let mut flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::SEND_FUA
            | TransmissionFlags::SEND_CACHE;
        if self.config.max_clients > 1 {
            // A second connection of the only client would wait for the first one to end.
            flags |= TransmissionFlags::CAN_MULTI_CONN;
        }
        flags |= match export.access() {
            Access::ReadOnly => TransmissionFlags::READ_ONLY,
            Access::ReadWrite => {
                TransmissionFlags::SEND_TRIM
                    | TransmissionFlags::SEND_WRITE_ZEROES
                    | TransmissionFlags::SEND_FAST_ZERO
            }
        };
        if self.replies != ReplyStyle::Simple {
            // All reads are answered in one chunk anyway.
            flags |= TransmissionFlags::SEND_DF;
        }
        flags
    }

    /// Before the client is told that its choice holds.
    fn keep_place(&self) -> io::Result<()> {
        if self.peer.keep_place() { Ok(()) } else { Err(violation("another has got the client's place")) }
    }

    fn agree(&self, export: Arc<Export>, smallest_block: u32) -> Agreement {
        let contexts = match &self.contexts {
            Some((of, contexts)) if Arc::ptr_eq(of, &export) => contexts.clone(),
            _ => Contexts::default(),
        };
        Agreement {
            flags: self.flags(&export),
            export,
            requests: match self.replies {
                ReplyStyle::Extended => HeaderStyle::Extended,
                ReplyStyle::Simple | ReplyStyle::Structured => HeaderStyle::Compact,
            },
            replies: self.replies,
            contexts,
            smallest_block,
        }
    }

    async fn refuse(&self, code: u32, reply: OptionReply, message: &str) -> io::Result<()> {
        self.reply(code, reply, message.as_bytes()).await
    }

    async fn reply(&self, code: u32, reply: OptionReply, data: &[u8]) -> io::Result<()> {
        let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((reply as u32).to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes).await
    }

    async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.transport.send(self.worker, IoBuf::copy_of(bytes).into()).await.0
    }
}

fn asks_for_blocks(request: &InfoRequest<'_>) -> bool {
    request.kinds.contains(&info::BLOCK_SIZE)
}

/// Bytes of which requests are to be multiples. Sectors of 512 bytes are no reason for a limit: a write of a part of one puts nothing else
/// in danger.
fn smallest_block(export: &Export) -> u32 {
    match export.image().logical_block_size() {
        ..=512 => 1,
        block => block,
    }
}

/// The purpose of asking for metadata contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    List,
    Set,
}

async fn take<const N: usize>(inbox: &mut Inbox) -> io::Result<Option<[u8; N]>> {
    if inbox.peek(N).await?.is_none() {
        return Ok(None);
    }
    let mut bytes = [0; N];
    inbox.read_exact(&mut bytes).await?;
    Ok(Some(bytes))
}
