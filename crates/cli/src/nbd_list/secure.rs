//! A connection under TLS, whose reads and writes wait.

use std::io::{self, Read, Write};
use zebu_remote::nbd::TlsClient;
use zebu_tls::Session;

/// A connection under TLS.
pub(super) struct Secure<S> {
    socket: S,
    session: Session,
}

impl<S: Read + Write> Secure<S> {
    /// Does the handshake.
    pub(super) fn start(socket: S, tls: &TlsClient) -> io::Result<Self> {
        let mut secure = Self { socket, session: tls.session()? };
        while secure.session.is_handshaking() || secure.session.wants_to_send() {
            secure.flush()?;
            if secure.session.is_handshaking() {
                secure.receive()?;
            }
        }
        Ok(secure)
    }

    fn receive(&mut self) -> io::Result<()> {
        if self.session.receive_from(&mut self.socket)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let processed = self.session.process();
        // The alert, which says to the server why.
        let sent = self.flush();
        processed?;
        sent
    }
}

impl<S: Read + Write> Read for Secure<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.receive()?,
                result => return result,
            }
        }
    }
}

impl<S: Read + Write> Write for Secure<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.session.write_all(bytes)?;
        self.flush()?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.session.wants_to_send() {
            self.session.send_to(&mut self.socket)?;
        }
        Ok(())
    }
}
