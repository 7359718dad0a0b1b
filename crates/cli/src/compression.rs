//! How clusters are compressed, as commands ask for it.

use zebu_engine::{CompressOptions, DeflateWindow};

/// Arguments of commands that write compressed clusters.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct CompressionArgs {
    /// Level: 1 to 12 for zlib (default 3), 1 to 22 for zstd (default 3); higher is smaller and slower
    #[arg(hide_short_help = true, long, value_name = "NUM")]
    compression_level: Option<u32>,

    /// Write deflate streams that refer back at most 4 KiB, for readers with so small a window (levels 1 to 9,
    /// default 6)
    #[arg(hide_short_help = true, long)]
    strict_deflate: bool,
}

impl CompressionArgs {
    /// The first option that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        match self {
            Self { compression_level: Some(_), .. } => Some("--compression-level"),
            Self { strict_deflate: true, .. } => Some("--strict-deflate"),
            _ => None,
        }
    }

    /// The options for the engine.
    pub(crate) fn options(&self) -> CompressOptions {
        CompressOptions::default().level(self.compression_level).window(if self.strict_deflate {
            DeflateWindow::FourKib
        } else {
            DeflateWindow::Full
        })
    }
}
