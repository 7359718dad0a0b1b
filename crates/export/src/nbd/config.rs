//! Limits of a server.

#[cfg(feature = "tls")]
use super::tls::TlsConfig;
use crate::log::Log;
use crate::memory_budget::MemoryBudget;

/// Treatment of clients that come when there are as many as may be at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum WhenFull {
    /// Their connections are closed.
    #[default]
    SendAway,
    /// They wait in the queue of the listening socket until another leaves.
    Wait,
}

/// Limits of a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NbdConfig {
    /// Clients at once.
    pub max_clients: usize,
    /// Of these, how many may be of one user (at Unix sockets) or from one address (TCP; of IPv6, one network of 64 bits).
    /// `None`: all but a sixteenth, or all if further clients wait.
    pub max_clients_per_peer: Option<usize>,
    /// Treatment of those beyond.
    pub when_full: WhenFull,
    /// Requests of one client under way at once; it is not read from meanwhile.
    pub max_requests: usize,
    /// Bytes of data of these requests. (One request is served however large it is.)
    pub max_bytes: u64,
    /// Memory of all clients: their connections, and the data of their requests and replies.
    pub memory: MemoryBudget,
    /// How long the conversation before the first request may take, in seconds.
    pub handshake_timeout: u32,
    /// After how many seconds without a request a client is sent away; `None`: never.
    pub idle_timeout: Option<u32>,
    /// How long a server that stops waits for clients to take their replies, in seconds.
    pub stop_timeout: u32,
    /// The certificate of the server; clients must use TLS then.
    #[cfg(feature = "tls")]
    pub tls: Option<TlsConfig>,
    /// Where messages go.
    pub log: Log,
}

zebu_storage::option_setters!(NbdConfig {
    max_clients: usize,
    max_clients_per_peer: Option<usize>,
    when_full: WhenFull,
    max_requests: usize,
    max_bytes: u64,
    memory: MemoryBudget,
    handshake_timeout: u32,
    idle_timeout: impl Into<Option<u32>>,
    stop_timeout: u32,
    #[cfg(feature = "tls")]
    tls: impl Into<Option<TlsConfig>>,
    log: Log,
});

impl Default for NbdConfig {
    fn default() -> Self {
        Self {
            max_clients: 1024,
            max_clients_per_peer: None,
            when_full: WhenFull::SendAway,
            max_requests: 512,
            max_bytes: 32 << 20,
            memory: MemoryBudget::default(),
            handshake_timeout: 10,
            idle_timeout: None,
            stop_timeout: 10,
            #[cfg(feature = "tls")]
            tls: None,
            log: Log::none(),
        }
    }
}

impl NbdConfig {
    /// Whether clients must use TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether clients must use TLS.
    #[cfg(not(feature = "tls"))]
    #[allow(clippy::unused_self)] // as its counterpart
    pub(crate) fn has_tls(&self) -> bool {
        false
    }
}
