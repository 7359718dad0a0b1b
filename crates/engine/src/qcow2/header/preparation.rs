//! Work that an opening does once, before its first write.

use crate::Result;
use crate::sync::AsyncMutex;
use crate::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};

/// The preparations that have been made.
#[derive(Debug, Default)]
pub(crate) struct Preparation {
    /// For any change of the file.
    of_metadata: AtomicBool,
    /// For changes that guests make.
    of_data: AtomicBool,
    mutex: AsyncMutex,
}

impl Preparation {
    /// Whether the file may be changed.
    pub(crate) fn is_metadata_done(&self) -> bool {
        self.of_metadata.load(Acquire)
    }

    /// Whether guests may write.
    pub(crate) fn is_done(&self) -> bool {
        self.of_data.load(Acquire)
    }

    /// Does `metadata`, unless it was done.
    pub(crate) async fn for_metadata(&self, metadata: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let _turn = self.mutex.lock().await;
        self.metadata_once(metadata).await
    }

    /// Does `metadata`, then `data`, unless they were done.
    pub(crate) async fn for_data(
        &self,
        metadata: impl AsyncFnOnce() -> Result<()>,
        data: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let _turn = self.mutex.lock().await;
        if self.is_done() {
            return Ok(());
        }
        self.metadata_once(metadata).await?;
        data().await?;
        self.of_data.store(true, Release);
        Ok(())
    }

    async fn metadata_once(&self, metadata: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        if !self.is_metadata_done() {
            metadata().await?;
            self.of_metadata.store(true, Release);
        }
        Ok(())
    }
}
