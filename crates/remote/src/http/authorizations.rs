//! Values of the header `Authorization` that are good for a while.

use super::signed::{Signing, SigningError};
use std::fmt;
use std::sync::Arc;

type Get = dyn Fn(Signing) -> Result<Option<String>, SigningError> + Send + Sync;

/// The one who knows the value of the header `Authorization`. Two of one name are the same. Nothing shows a value.
#[derive(Clone)]
pub struct Authorizations {
    name: String,
    get: Arc<Get>,
}

impl Authorizations {
    /// Values for what `name` says, which has no secrets. `get` is called for each request, from any thread, and may wait;
    /// `None` is no header. [`Signing::AfterDenial`] says that the server refused the last value.
    pub fn new(
        name: impl Into<String>,
        get: impl Fn(Signing) -> Result<Option<String>, SigningError> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), get: Arc::new(get) }
    }

    pub(super) fn get(&self, why: Signing) -> Result<Option<String>, SigningError> {
        (self.get)(why)
    }
}

impl PartialEq for Authorizations {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Authorizations {}

impl fmt::Debug for Authorizations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Authorizations").field(&self.name).finish()
    }
}
