//! How clusters are compressed.

use super::method::Method;
use super::pool::CodecPool;
use crate::{Error, ErrorKind, Result};
use zebu_qcow2::Compression;

/// How far back a deflate stream may refer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum DeflateWindow {
    /// 32 KiB, as RFC 1951 allows. QEMU reads it, since it inflates a cluster in one call.
    #[default]
    Full,
    /// 4 KiB, as QEMU writes: for readers that keep no more than that.
    FourKib,
}

/// How clusters are compressed by [`crate::Image::write_compressed`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CompressOptions {
    /// Level; the codec's usual one if `None`. Deflate: 1 to 12, with [`DeflateWindow::FourKib`] 1 to 9 (default 3
    /// and 6); zstd: 1 to 22 (default 3). An image is compressed in one way, which its header names. In a
    /// backup at adaptive speed, deflate has no level above 9, but for what clients are about to change. Default: `None`.
    pub level: Option<u32>,
    /// Window of deflate streams; says nothing for zstd. Default: [`DeflateWindow::Full`].
    pub window: DeflateWindow,
    /// Bytes of host clusters that are filled, or written, at once. More than that is held only for streams that
    /// were being compressed when it was reached. Default: 8 MiB.
    pub gather_memory: usize,
    /// The threads that compress and inflate. Default: one that the process shares, with a thread for each processor.
    pub pool: CodecPool,
}

zebu_storage::option_setters!(CompressOptions {
    level: impl Into<Option<u32>>,
    window: DeflateWindow,
    gather_memory: usize,
    pool: CodecPool,
});

impl Default for CompressOptions {
    fn default() -> Self {
        Self {
            level: None,
            window: DeflateWindow::default(),
            gather_memory: 8 << 20,
            pool: CodecPool::default(),
        }
    }
}

impl CompressOptions {
    /// Whether an image whose clusters are compressed with `compression` can be written with these options at all.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such level.
    pub(crate) fn check(&self, compression: Compression) -> Result<()> {
        match self.method(compression) {
            // Compressed clusters can't be written then, but others can.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
            other => other.map(drop),
        }
    }

    /// The method of zlib streams that other programs read, whatever their length.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such level.
    pub(crate) fn zlib(&self) -> Result<Method> {
        if let Method::Deflate { level } = self.method(Compression::Zlib)? {
            return Ok(Method::Zlib { level });
        }
        let message = "a narrow window of deflate is for qcow2 images alone";
        Err(Error::new(ErrorKind::InvalidArgument, message))
    }

    /// The method for an image whose clusters are compressed with `compression`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: no such level. [`ErrorKind::Unsupported`]: zstd was left out of this build.
    pub(crate) fn method(&self, compression: Compression) -> Result<Method> {
        let (name, default, most) = match (compression, self.window) {
            (Compression::Zlib, DeflateWindow::Full) => ("zlib", 3, 12),
            (Compression::Zlib, DeflateWindow::FourKib) => ("zlib with a 4 KiB window", 6, 9),
            (Compression::Zstd, _) => ("zstd", 3, 22),
            _ => return Err(unknown(compression)),
        };
        let level = self.level.unwrap_or(default);
        if !(1..=most).contains(&level) {
            let message = format!("invalid compression level {level}: {name} has 1 to {most}");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let level = level as u8;
        match (compression, self.window) {
            (Compression::Zlib, DeflateWindow::Full) => Ok(Method::Deflate { level }),
            (Compression::Zlib, DeflateWindow::FourKib) => Ok(Method::NarrowDeflate { level }),
            #[cfg(feature = "zstd")]
            (Compression::Zstd, _) => Ok(Method::Zstd { level }),
            #[cfg(not(feature = "zstd"))]
            (Compression::Zstd, _) => {
                Err(Error::new(ErrorKind::Unsupported, "zstd was left out of this build"))
            }
            _ => Err(unknown(compression)),
        }
    }
}

fn unknown(compression: Compression) -> Error {
    Error::new(ErrorKind::Unsupported, format!("compression {compression:?} is not known to this version"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_that_a_codec_does_not_have_are_refused_by_name() {
        let with = |level, window| CompressOptions { level, window, ..CompressOptions::default() };
        let refused = |options: CompressOptions, compression| {
            let error = options.method(compression).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.message().to_owned()
        };
        let full = DeflateWindow::Full;
        assert!(refused(with(Some(13), full), Compression::Zlib).contains("zlib has 1 to 12"));
        assert!(refused(with(Some(0), full), Compression::Zlib).contains("level 0"));
        let narrow = DeflateWindow::FourKib;
        assert!(refused(with(Some(10), narrow), Compression::Zlib).contains("1 to 9"));
        assert!(refused(with(Some(23), full), Compression::Zstd).contains("1 to 22"));
        assert_eq!(with(None, full).method(Compression::Zlib).unwrap(), Method::Deflate { level: 3 });
        assert_eq!(with(None, narrow).method(Compression::Zlib).unwrap(), Method::NarrowDeflate { level: 6 });
    }
}
