//! OpenSSL's `SSL_CTX`: the keys and rules of one end.

use super::PskError;
use super::keys::Keys;
use super::openssl::{
    OpenSsl, SSL_CTRL_MODE, SSL_CTRL_SET_MAX_PROTO_VERSION, SSL_CTRL_SET_MIN_PROTO_VERSION,
    SSL_CTRL_SET_SESS_CACHE_MODE, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, SSL_MODE_RELEASE_BUFFERS,
    SSL_VERIFY_PEER, Ssl, SslCtx, TLS1_3_VERSION,
};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroizing;

/// Suites whose hash is SHA-256: that of a key from outside (RFC 8446, section 4.2.11).
const SUITES: &CStr = c"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
/// The place of a program's own data, which OpenSSL leaves to it, in contexts and in sessions.
const APP_DATA: i32 = 0;

/// Keys of one end.
pub(super) enum Secrets {
    Server(Keys),
    /// The identity and its key.
    Client(CString, Zeroizing<Vec<u8>>),
}

/// A step of a handshake that has ended.
pub(super) struct Step {
    /// As `SSL_do_handshake` gave it.
    pub(super) result: c_int,
    /// Whether the client has named an identity without a key.
    pub(super) is_refused: bool,
}

/// An `SSL_CTX`, and the keys that its callbacks look up.
pub(super) struct Context {
    pub(super) ssl: &'static OpenSsl,
    pub(super) pointer: *mut SslCtx,
    pub(super) secrets: Box<Secrets>,
}

// SAFETY: OpenSSL guards an `SSL_CTX` by locks of its own; nothing here changes it after it was made.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    pub(super) fn new(secrets: Secrets) -> Result<Arc<Self>, PskError> {
        let ssl = OpenSsl::get()?;
        let is_server = matches!(secrets, Secrets::Server(_));
        // SAFETY: the method is a static of OpenSSL.
        let pointer = unsafe {
            (ssl.ERR_clear_error)();
            let method = if is_server { (ssl.TLS_server_method)() } else { (ssl.TLS_client_method)() };
            (ssl.SSL_CTX_new)(method)
        };
        if pointer.is_null() {
            return Err(PskError::OpenSsl(ssl.reason()));
        }
        let context = Self { ssl, pointer, secrets: Box::new(secrets) };
        context.set_up().then_some(()).ok_or_else(|| PskError::OpenSsl(ssl.reason()))?;
        Ok(Arc::new(context))
    }

    /// Sets the rules; false if OpenSSL refuses one.
    fn set_up(&self) -> bool {
        let (ssl, pointer) = (self.ssl, self.pointer);
        let control = |command, value| {
            // SAFETY: these commands take a number.
            unsafe { (ssl.SSL_CTX_ctrl)(pointer, command, value, std::ptr::null_mut()) }
        };
        let secrets: *const Secrets = &raw const *self.secrets;
        let mut is_set = control(SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION) == 1
            && control(SSL_CTRL_SET_MAX_PROTO_VERSION, TLS1_3_VERSION) == 1;
        control(SSL_CTRL_SET_SESS_CACHE_MODE, 0);
        control(SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        // SAFETY: the context is valid; the secrets live in a box for as long as it does.
        unsafe {
            is_set &= (ssl.SSL_CTX_set_ciphersuites)(pointer, SUITES.as_ptr()) == 1;
            is_set &= (ssl.SSL_CTX_set_num_tickets)(pointer, 0) == 1;
            is_set &= (ssl.SSL_CTX_set_ex_data)(pointer, APP_DATA, secrets.cast_mut().cast()) == 1;
            match *self.secrets {
                Secrets::Server(_) => (ssl.SSL_CTX_set_psk_server_callback)(pointer, server_key),
                Secrets::Client(..) => {
                    // No authority is trusted: a server that shows a certificate instead of the key is refused.
                    (ssl.SSL_CTX_set_verify)(pointer, SSL_VERIFY_PEER, std::ptr::null());
                    (ssl.SSL_CTX_set_psk_client_callback)(pointer, client_key);
                }
            }
        }
        is_set
    }

    /// Goes on with the handshake of a session.
    ///
    /// # Safety
    /// `session` must be of this context, and valid.
    pub(super) unsafe fn handshake(&self, session: *mut Ssl) -> Step {
        let ssl = self.ssl;
        let is_refused = Cell::new(false);
        // SAFETY: the session is valid, and has the place of the note only while that is there.
        let result = unsafe {
            (ssl.ERR_clear_error)();
            (ssl.SSL_set_ex_data)(session, APP_DATA, (&raw const is_refused).cast_mut().cast());
            let result = (ssl.SSL_do_handshake)(session);
            (ssl.SSL_set_ex_data)(session, APP_DATA, std::ptr::null_mut());
            result
        };
        Step { result, is_refused: is_refused.get() }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was made by `SSL_CTX_new`, and each connection keeps its context alive.
        unsafe { (self.ssl.SSL_CTX_free)(self.pointer) }
    }
}

/// Looks the secrets of a session's context up.
///
/// # Safety
/// `session` must be of a [`Context`] that is alive.
unsafe fn secrets<'a>(session: *mut Ssl) -> Option<&'a Secrets> {
    let ssl = OpenSsl::get().ok()?;
    // SAFETY: the context of a session lives as long as it, and its data is what `set_up` has put there.
    unsafe { (ssl.SSL_CTX_get_ex_data)((ssl.SSL_get_SSL_CTX)(session), APP_DATA).cast::<Secrets>().as_ref() }
}

/// Notes, in the step of a session's handshake, that its client has named an identity without a key.
///
/// # Safety
/// `session` must be of a [`Context`] that is alive.
unsafe fn note_refusal(session: *mut Ssl) {
    let Ok(ssl) = OpenSsl::get() else { return };
    // SAFETY: the data of a session is NULL, or what `handshake` has put there, which goes on.
    let noted = unsafe { (ssl.SSL_get_ex_data)(session, APP_DATA).cast::<Cell<bool>>().as_ref() };
    if let Some(is_refused) = noted {
        is_refused.set(true);
    }
}

/// Copies `bytes` to where OpenSSL wants them; false if there is no room.
///
/// # Safety
/// `room` bytes at `target` must be valid for writes.
unsafe fn copy(bytes: &[u8], target: *mut u8, room: c_uint) -> bool {
    if bytes.len() > room as usize {
        return false;
    }
    // SAFETY: there is room, and the two are different allocations.
    unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    true
}

/// Tells OpenSSL the key of the identity that a client names; 0 bytes refuse it.
unsafe extern "C" fn server_key(
    session: *mut Ssl,
    identity: *const c_char,
    key: *mut u8,
    room: c_uint,
) -> c_uint {
    if identity.is_null() {
        return 0;
    }
    // SAFETY: OpenSSL calls this for sessions of contexts of this module, with a text that ends, and so much room.
    unsafe {
        let Some(Secrets::Server(keys)) = secrets(session) else { return 0 };
        match keys.get(CStr::from_ptr(identity).to_bytes()) {
            Some(found) if copy(found, key, room) => found.len() as c_uint,
            _ => {
                note_refusal(session);
                0
            }
        }
    }
}

/// Tells OpenSSL the client's identity and key.
unsafe extern "C" fn client_key(
    session: *mut Ssl,
    _hint: *const c_char,
    identity: *mut c_char,
    identity_room: c_uint,
    key: *mut u8,
    room: c_uint,
) -> c_uint {
    // SAFETY: OpenSSL calls this for sessions of contexts of this module, with so much room.
    unsafe {
        let Some(Secrets::Client(name, found)) = secrets(session) else { return 0 };
        let is_copied =
            copy(name.to_bytes_with_nul(), identity.cast(), identity_room) && copy(found, key, room);
        if is_copied { found.len() as c_uint } else { 0 }
    }
}
