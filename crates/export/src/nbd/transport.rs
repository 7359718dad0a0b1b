//! The transport of a connection's bytes: its socket, or TLS on it.

#[cfg(feature = "tls")]
use super::tls::{TlsConfig, TlsFailure, TlsStream};
use std::io;
#[cfg(feature = "tls")]
use std::rc::Rc;
use zebu_storage::{IoBufs, Socket, Worker};

/// A connection's way to send and receive. Cheap to clone; one clone may receive while another sends.
#[derive(Clone)]
pub(crate) enum Transport {
    /// As it is.
    Plain(Socket),
    /// Encrypted.
    #[cfg(feature = "tls")]
    Tls(Rc<TlsStream>),
}

impl Transport {
    /// As [`Worker::receive`].
    pub(crate) async fn receive(&self, worker: &Worker, bufs: IoBufs) -> (io::Result<usize>, IoBufs) {
        match self {
            Transport::Plain(socket) => worker.receive(socket, bufs).await,
            #[cfg(feature = "tls")]
            Transport::Tls(stream) => stream.receive(worker, bufs).await,
        }
    }

    /// As [`Worker::send`].
    pub(crate) async fn send(&self, worker: &Worker, bufs: IoBufs) -> (io::Result<()>, IoBufs) {
        match self {
            Transport::Plain(socket) => worker.send(socket, bufs).await,
            #[cfg(feature = "tls")]
            Transport::Tls(stream) => stream.send(worker, bufs).await,
        }
    }

    /// The socket, if bytes go as they are.
    pub(crate) fn plain(&self) -> Option<&Socket> {
        match self {
            Transport::Plain(socket) => Some(socket),
            #[cfg(feature = "tls")]
            Transport::Tls(_) => None,
        }
    }

    /// Begins TLS as a server. Nothing else may use the connection meanwhile.
    ///
    /// # Errors
    /// The client does not keep to the protocol, or has not the certificate that it needs.
    #[cfg(feature = "tls")]
    pub(crate) async fn start_tls(&self, worker: &Worker, config: &TlsConfig) -> io::Result<Self> {
        match self {
            Transport::Plain(socket) => {
                TlsStream::accept(worker, socket, config).await.map(|stream| Transport::Tls(Rc::new(stream)))
            }
            Transport::Tls(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "TLS is there already")),
        }
    }

    /// Whether it is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self, Transport::Plain(_))
    }
}

/// Whether a client was not let in by TLS.
#[cfg(feature = "tls")]
pub(crate) fn is_tls_failure(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<TlsFailure>())
}

/// Whether a client was not let in by TLS.
#[cfg(not(feature = "tls"))]
pub(crate) fn is_tls_failure(_: &io::Error) -> bool {
    false
}
