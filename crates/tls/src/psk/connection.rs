//! One connection.

use super::PskError;
use super::context::{Context, Secrets};
use super::openssl::{Bio, SSL_ERROR_WANT_READ, SSL_ERROR_ZERO_RETURN, Ssl};
use crate::session::{MAX_UNSENT, TlsError};
use std::ffi::c_int;
use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::sync::Arc;

/// Bytes that one call of [`Connection::receive_from`] takes at most.
const RECEIVED: usize = 16 << 10;
/// Bytes that are encrypted at once: a record's (RFC 8446, section 5.1). A memory BIO keeps the greatest length that it had.
const RECORD: usize = 16 << 10;
/// Encrypted bytes that may wait to be sent after a read: many times those of a caller that sends what it wrote. A peer
/// that has more waiting asks for new keys again and again, and reads none of the answers.
const MAX_ANSWERS: usize = 1 << 20;

/// One end of a connection with a pre-shared key. It does no I/O.
pub struct Connection {
    context: Arc<Context>,
    pointer: *mut Ssl,
    /// Received and not decrypted yet. Owned by the session, as `outgoing`.
    incoming: *mut Bio,
    /// Encrypted and not taken yet.
    outgoing: *mut Bio,
    /// Taken from `outgoing`; the first `sent` bytes are sent.
    to_send: Vec<u8>,
    sent: usize,
    /// Written while the peer was in the middle of a message about keys, and not encrypted yet.
    unwritten: Vec<u8>,
    is_handshaking: bool,
    /// Whether the peer sends no more.
    is_ended: bool,
    failure: Option<TlsError>,
}

// SAFETY: a session may be used by one thread after another; it has no data of a thread.
unsafe impl Send for Connection {}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("is_handshaking", &self.is_handshaking).finish_non_exhaustive()
    }
}

impl Connection {
    pub(super) fn new(context: Arc<Context>) -> Result<Self, PskError> {
        let ssl = context.ssl;
        // SAFETY: what is made is either given to the session, which frees it, or freed here.
        let (pointer, incoming, outgoing) = unsafe {
            (ssl.ERR_clear_error)();
            let pointer = (ssl.SSL_new)(context.pointer);
            let incoming = (ssl.BIO_new)((ssl.BIO_s_mem)());
            let outgoing = (ssl.BIO_new)((ssl.BIO_s_mem)());
            if pointer.is_null() || incoming.is_null() || outgoing.is_null() {
                let error = PskError::OpenSsl(ssl.reason());
                (ssl.SSL_free)(pointer);
                (ssl.BIO_free)(incoming);
                (ssl.BIO_free)(outgoing);
                return Err(error);
            }
            (ssl.SSL_set_bio)(pointer, incoming, outgoing);
            match *context.secrets {
                Secrets::Server(_) => (ssl.SSL_set_accept_state)(pointer),
                Secrets::Client(..) => (ssl.SSL_set_connect_state)(pointer),
            }
            (pointer, incoming, outgoing)
        };
        let mut connection = Self {
            context,
            pointer,
            incoming,
            outgoing,
            to_send: Vec::new(),
            sent: 0,
            unwritten: Vec::new(),
            is_handshaking: true,
            is_ended: false,
            failure: None,
        };
        // A client begins. A failure shows at the next look.
        let _ = connection.process();
        Ok(connection)
    }

    /// Whether the handshake is under way.
    pub fn is_handshaking(&self) -> bool {
        self.is_handshaking
    }

    /// Whether there are bytes to send.
    pub fn wants_to_send(&self) -> bool {
        self.sent < self.to_send.len()
    }

    /// Takes bytes of the network with one read; 0 at their end.
    ///
    /// # Errors
    /// Those of `source`; OpenSSL has no memory.
    pub fn receive_from(&mut self, source: &mut dyn Read) -> io::Result<usize> {
        let mut bytes = [0; RECEIVED];
        let count = source.read(&mut bytes)?;
        if count == 0 {
            self.is_ended = true;
            return Ok(0);
        }
        let len = count as c_int;
        // SAFETY: so many bytes are there; the buffer of a memory BIO grows.
        let taken = unsafe { (self.context.ssl.BIO_write)(self.incoming, bytes.as_ptr().cast(), len) };
        if taken == len { Ok(count) } else { Err(io::ErrorKind::OutOfMemory.into()) }
    }

    /// Goes on with the handshake. After an error, [`send_to`](Self::send_to) has the alert for the peer.
    ///
    /// # Errors
    /// The peer broke the protocol, or has not the key.
    pub fn process(&mut self) -> Result<(), TlsError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if !self.is_handshaking {
            return Ok(());
        }
        let ssl = self.context.ssl;
        // SAFETY: the session is valid, and of this context.
        let step = unsafe { self.context.handshake(self.pointer) };
        self.collect();
        if step.result == 1 {
            // SAFETY: as above. A session with a key from outside counts as one that goes on (RFC 8446, section 2.2).
            if unsafe { (ssl.SSL_session_reused)(self.pointer) } != 1 {
                return Err(self.fail("the peer did not use the key".to_owned()));
            }
            self.is_handshaking = false;
            return Ok(());
        }
        if self.error_of(step.result) == SSL_ERROR_WANT_READ {
            return Ok(());
        }
        let reason = if step.is_refused {
            "there is no key of the user that the client names".to_owned()
        } else {
            ssl.reason()
        };
        Err(self.fail(reason))
    }

    /// Takes decrypted bytes; 0 after the peer's farewell.
    ///
    /// # Errors
    /// As [`Session::read`](crate::Session::read).
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.process()?;
        if self.is_handshaking {
            return Err(self.nothing_yet());
        }
        if buf.is_empty() {
            return Ok(0);
        }
        let ssl = self.context.ssl;
        // SAFETY: the buffer has so many bytes.
        let result = unsafe {
            (ssl.ERR_clear_error)();
            (ssl.SSL_read)(self.pointer, buf.as_mut_ptr().cast(), length(buf))
        };
        // An answer to a change of keys.
        self.collect();
        if result > 0 {
            return Ok(result as usize);
        }
        let error = self.error_of(result);
        self.write_again()?;
        if self.waiting() > MAX_ANSWERS {
            return Err(self.fail("the peer asks for new keys and reads no answers".to_owned()).into());
        }
        match error {
            SSL_ERROR_ZERO_RETURN => Ok(0),
            SSL_ERROR_WANT_READ => Err(self.nothing_yet()),
            _ => Err(self.fail(ssl.reason()).into()),
        }
    }

    /// Encrypts all of `bytes`.
    ///
    /// # Errors
    /// The session has failed, or its handshake is not over.
    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        if !self.unwritten.is_empty() {
            self.unwritten.extend_from_slice(bytes);
            return Ok(self.write_again()?);
        }
        let mut parts = bytes.chunks(RECORD);
        while let Some(part) = parts.next() {
            if !self.write_record(part)? {
                self.unwritten.extend_from_slice(part);
                parts.for_each(|part| self.unwritten.extend_from_slice(part));
                break;
            }
        }
        Ok(())
    }

    /// Encrypts what could not be when it was written.
    fn write_again(&mut self) -> Result<(), TlsError> {
        let unwritten = std::mem::take(&mut self.unwritten);
        let mut done = 0;
        for part in unwritten.chunks(RECORD) {
            if !self.write_record(part)? {
                break;
            }
            done += part.len();
        }
        self.unwritten = unwritten;
        self.unwritten.drain(..done);
        Ok(())
    }

    /// Encrypts a record's bytes; false if the peer has to end a message first (RFC 8446, section 5.1).
    fn write_record(&mut self, part: &[u8]) -> Result<bool, TlsError> {
        let ssl = self.context.ssl;
        // SAFETY: so many bytes are there.
        let result = unsafe {
            (ssl.ERR_clear_error)();
            (ssl.SSL_write)(self.pointer, part.as_ptr().cast(), length(part))
        };
        self.collect();
        // A memory BIO takes all of it, or there is no memory.
        if result == length(part) {
            return Ok(true);
        }
        match self.error_of(result) {
            SSL_ERROR_WANT_READ => Ok(false),
            _ => Err(self.fail(ssl.reason())),
        }
    }

    /// Bytes that wait to be sent, encrypted or not.
    fn waiting(&self) -> usize {
        self.to_send.len() - self.sent + self.unwritten.len()
    }

    /// Encrypts some of `bufs`, and says how many bytes: none while 64 KiB wait to be sent.
    ///
    /// # Errors
    /// As [`write_all`](Self::write_all).
    pub fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        for buf in bufs {
            let room = MAX_UNSENT.saturating_sub(self.waiting());
            let part = &buf[..buf.len().min(room)];
            self.write_all(part)?;
            taken += part.len();
            if part.len() < buf.len() {
                break;
            }
        }
        Ok(taken)
    }

    /// Makes the alert `close_notify`, unless the session has failed or its handshake is not over.
    pub fn send_close_notify(&mut self) {
        if self.failure.is_some() || self.is_handshaking {
            return;
        }
        let ssl = self.context.ssl;
        // SAFETY: the session is valid. The result says whether the peer has sent its own.
        unsafe {
            (ssl.ERR_clear_error)();
            (ssl.SSL_shutdown)(self.pointer);
        }
        self.collect();
    }

    /// Sends bytes with one write, and says how many.
    ///
    /// # Errors
    /// Those of `target`.
    pub fn send_to(&mut self, target: &mut dyn Write) -> io::Result<usize> {
        let count = target.write(&self.to_send[self.sent..])?;
        self.sent += count;
        if !self.wants_to_send() {
            self.to_send.clear();
            // A connection that idles keeps no memory of what it sent.
            self.to_send.shrink_to(MAX_UNSENT);
            self.sent = 0;
        }
        Ok(count)
    }

    /// Takes what OpenSSL has encrypted.
    fn collect(&mut self) {
        let ssl = self.context.ssl;
        // SAFETY: the BIO is the session's.
        let pending = unsafe { (ssl.BIO_ctrl_pending)(self.outgoing) };
        let start = self.to_send.len();
        self.to_send.resize(start + pending, 0);
        for part in self.to_send[start..].chunks_mut(c_int::MAX as usize) {
            // SAFETY: the part has so much room, and so much is there.
            unsafe { (ssl.BIO_read)(self.outgoing, part.as_mut_ptr().cast(), length(part)) };
        }
    }

    fn error_of(&self, result: c_int) -> c_int {
        // SAFETY: the session is valid, and its last function returned this.
        unsafe { (self.context.ssl.SSL_get_error)(self.pointer, result) }
    }

    fn nothing_yet(&self) -> io::Error {
        if self.is_ended { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WouldBlock }.into()
    }

    fn fail(&mut self, reason: String) -> TlsError {
        self.failure.insert(TlsError(reason)).clone()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: it was made by `SSL_new`, and owns both BIOs.
        unsafe { (self.context.ssl.SSL_free)(self.pointer) }
    }
}

/// The length of a part of at most `c_int::MAX` bytes; longer ones are shortened.
fn length(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::psk::{ClientConfig, ServerConfig};
    use libloading::Library;

    type KeyUpdate = unsafe extern "C" fn(*mut Ssl, c_int) -> c_int;
    /// `SSL_KEY_UPDATE_REQUESTED` of <openssl/ssl.h>.
    const REQUESTED: c_int = 1;

    fn carry(from: &mut Connection, to: &mut Connection) -> Result<(), TlsError> {
        let mut bytes = Vec::new();
        while from.wants_to_send() {
            from.send_to(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            to.receive_from(&mut rest).unwrap();
            to.process()?;
        }
        Ok(())
    }

    #[test]
    fn a_peer_that_asks_for_new_keys_again_and_again_is_sent_away() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "qemu:00112233445566778899aabbccddeeff").unwrap();
        let mut client = ClientConfig::from_file(file.path(), "qemu").unwrap().connection().unwrap();
        let mut server = ServerConfig::from_file(file.path()).unwrap().connection().unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            carry(&mut client, &mut server).unwrap();
            carry(&mut server, &mut client).unwrap();
        }
        // SAFETY: the library is there already.
        let library =
            ["libssl.so.3", "libssl.so.1.1"].into_iter().find_map(|name| unsafe { Library::new(name) }.ok());
        let library = library.unwrap();
        // SAFETY: the type is that of OpenSSL's header.
        let key_update = unsafe { library.get::<KeyUpdate>(b"SSL_key_update").unwrap() };
        let mut answers = 0;
        for _ in 0..100_000 {
            // SAFETY: the session is valid.
            assert_eq!(unsafe { key_update(client.pointer, REQUESTED) }, 1);
            // What a message takes along.
            client.write_all(b"").unwrap();
            // SAFETY: as above.
            unsafe { (client.context.ssl.SSL_do_handshake)(client.pointer) };
            client.collect();
            carry(&mut client, &mut server).unwrap();
            match server.read(&mut [0; 9]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => answers = server.waiting(),
                Err(error) => {
                    assert!(error.to_string().contains("new keys"), "{error}");
                    assert!(answers > MAX_ANSWERS / 2, "{answers} bytes of answers");
                    return;
                }
                Ok(count) => panic!("{count} bytes"),
            }
        }
        panic!("{answers} bytes of answers wait, and no end");
    }
}
