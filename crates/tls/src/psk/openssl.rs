//! The functions of OpenSSL that are used, found when they are first wanted.

use super::PskError;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::sync::OnceLock;

/// Names of the library, the newest first: both have the same functions for this.
const LIBRARIES: [&str; 2] = ["libssl.so.3", "libssl.so.1.1"];
/// Bytes of a message, with its end.
const MESSAGE: usize = 256;

/// `SSL_CTX`.
#[repr(C)]
pub(super) struct SslCtx(c_void);
/// `SSL`.
#[repr(C)]
pub(super) struct Ssl(c_void);
/// `BIO`.
#[repr(C)]
pub(super) struct Bio(c_void);
/// `SSL_METHOD`.
#[repr(C)]
pub(super) struct SslMethod(c_void);
/// `BIO_METHOD`.
#[repr(C)]
pub(super) struct BioMethod(c_void);

/// `SSL_psk_server_cb_func`.
pub(super) type ServerCallback = unsafe extern "C" fn(*mut Ssl, *const c_char, *mut u8, c_uint) -> c_uint;
/// `SSL_psk_client_cb_func`.
pub(super) type ClientCallback =
    unsafe extern "C" fn(*mut Ssl, *const c_char, *mut c_char, c_uint, *mut u8, c_uint) -> c_uint;

// Numbers of <openssl/ssl.h>, the same in 1.1 and 3.
pub(super) const SSL_CTRL_MODE: c_int = 33;
pub(super) const SSL_CTRL_SET_SESS_CACHE_MODE: c_int = 44;
pub(super) const SSL_CTRL_SET_MIN_PROTO_VERSION: c_int = 123;
pub(super) const SSL_CTRL_SET_MAX_PROTO_VERSION: c_int = 124;
pub(super) const SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER: c_long = 0x2;
pub(super) const SSL_MODE_RELEASE_BUFFERS: c_long = 0x10;
pub(super) const TLS1_3_VERSION: c_long = 0x0304;
pub(super) const SSL_VERIFY_PEER: c_int = 1;
pub(super) const SSL_ERROR_WANT_READ: c_int = 2;
pub(super) const SSL_ERROR_ZERO_RETURN: c_int = 6;
/// Of <openssl/crypto.h>.
const OPENSSL_INIT_NO_ATEXIT: u64 = 0x0008_0000;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions by OpenSSL's names.
        #[allow(non_snake_case, clippy::struct_field_names)]
        pub(super) struct OpenSsl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Keeps the functions in memory.
            _library: Library,
        }

        impl OpenSsl {
            fn find(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of OpenSSL's headers, which are the same in all its versions of these names.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0"))?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    OPENSSL_init_crypto(u64, *const c_void) -> c_int;
    TLS_client_method() -> *const SslMethod;
    TLS_server_method() -> *const SslMethod;
    SSL_CTX_new(*const SslMethod) -> *mut SslCtx;
    SSL_CTX_free(*mut SslCtx);
    SSL_CTX_ctrl(*mut SslCtx, c_int, c_long, *mut c_void) -> c_long;
    SSL_CTX_set_num_tickets(*mut SslCtx, usize) -> c_int;
    SSL_CTX_set_ciphersuites(*mut SslCtx, *const c_char) -> c_int;
    SSL_CTX_set_verify(*mut SslCtx, c_int, *const c_void);
    SSL_CTX_set_psk_server_callback(*mut SslCtx, ServerCallback);
    SSL_CTX_set_psk_client_callback(*mut SslCtx, ClientCallback);
    SSL_CTX_set_ex_data(*mut SslCtx, c_int, *mut c_void) -> c_int;
    SSL_CTX_get_ex_data(*const SslCtx, c_int) -> *mut c_void;
    SSL_get_SSL_CTX(*const Ssl) -> *mut SslCtx;
    SSL_new(*mut SslCtx) -> *mut Ssl;
    SSL_free(*mut Ssl);
    SSL_set_bio(*mut Ssl, *mut Bio, *mut Bio);
    SSL_set_connect_state(*mut Ssl);
    SSL_set_accept_state(*mut Ssl);
    SSL_set_ex_data(*mut Ssl, c_int, *mut c_void) -> c_int;
    SSL_get_ex_data(*const Ssl, c_int) -> *mut c_void;
    SSL_do_handshake(*mut Ssl) -> c_int;
    SSL_session_reused(*const Ssl) -> c_int;
    SSL_read(*mut Ssl, *mut c_void, c_int) -> c_int;
    SSL_write(*mut Ssl, *const c_void, c_int) -> c_int;
    SSL_shutdown(*mut Ssl) -> c_int;
    SSL_get_error(*const Ssl, c_int) -> c_int;
    BIO_s_mem() -> *const BioMethod;
    BIO_new(*const BioMethod) -> *mut Bio;
    BIO_free(*mut Bio) -> c_int;
    BIO_ctrl_pending(*mut Bio) -> usize;
    BIO_read(*mut Bio, *mut c_void, c_int) -> c_int;
    BIO_write(*mut Bio, *const c_void, c_int) -> c_int;
    ERR_clear_error();
    ERR_get_error() -> c_ulong;
    ERR_reason_error_string(c_ulong) -> *const c_char;
    ERR_error_string_n(c_ulong, *mut c_char, usize);
}

impl OpenSsl {
    /// The library, loaded at the first call.
    pub(super) fn get() -> Result<&'static Self, PskError> {
        static LOADED: OnceLock<Result<OpenSsl, String>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(|reason| PskError::OpenSsl(reason.clone()))
    }

    fn load() -> Result<Self, String> {
        let mut reason = String::new();
        for name in LIBRARIES {
            // SAFETY: OpenSSL's own initialization and end have no conditions.
            match unsafe { Library::new(name) }.and_then(Self::find) {
                Ok(found) => {
                    // Its tables stay while the process ends: another thread may be in a handshake then.
                    // SAFETY: no settings are given. Nothing else has started the library, or it stays as it is.
                    unsafe { (found.OPENSSL_init_crypto)(OPENSSL_INIT_NO_ATEXIT, std::ptr::null()) };
                    return Ok(found);
                }
                Err(error) if reason.is_empty() => {
                    // The loader's own words are below.
                    let source = std::error::Error::source(&error);
                    reason = source.map_or_else(|| error.to_string(), ToString::to_string);
                }
                Err(_) => {}
            }
        }
        Err(reason)
    }

    /// The reason of this thread's last failure, in OpenSSL's words.
    pub(super) fn reason(&self) -> String {
        let mut message = [0 as c_char; MESSAGE];
        // SAFETY: the buffer has the size that is told, and ends with a zero then; a reason is a static text.
        unsafe {
            let code = (self.ERR_get_error)();
            let reason = (self.ERR_reason_error_string)(code);
            if code != 0 && !reason.is_null() {
                return CStr::from_ptr(reason).to_string_lossy().into_owned();
            }
            if code == 0 {
                return "the peer broke the protocol".to_owned();
            }
            (self.ERR_error_string_n)(code, message.as_mut_ptr(), message.len());
            CStr::from_ptr(message.as_ptr()).to_string_lossy().into_owned()
        }
    }
}
