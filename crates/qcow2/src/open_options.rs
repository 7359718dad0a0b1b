//! Rules about the options given when an image is opened, as far as they depend on the format alone.

use crate::error::OptionError;
use crate::geometry::Geometry;
use crate::limits;
use crate::version::Version;

/// Cache sizes in bytes; `None` where the user did not say.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct CacheSizes {
    /// `cache-size`: both caches together.
    pub total: Option<u64>,
    /// `l2-cache-size`.
    pub l2: Option<u64>,
    /// `refcount-cache-size`.
    pub refcount: Option<u64>,
    /// `l2-cache-entry-size`: bytes of an L2 slice.
    pub slice: Option<u64>,
}

impl CacheSizes {
    /// That the sizes go together, in QEMU's order.
    ///
    /// # Errors
    /// [`OptionError::CacheSizesOverdetermined`], [`OptionError::L2CacheExceedsTotal`],
    /// [`OptionError::RefcountCacheExceedsTotal`], [`OptionError::SliceSize`].
    pub fn check(&self, geometry: &Geometry) -> Result<(), OptionError> {
        if let Some(total) = self.total {
            if self.l2.is_some() && self.refcount.is_some() {
                return Err(OptionError::CacheSizesOverdetermined);
            }
            if self.l2.is_some_and(|l2| l2 > total) {
                return Err(OptionError::L2CacheExceedsTotal);
            }
            if self.refcount.is_some_and(|refcount| refcount > total) {
                return Err(OptionError::RefcountCacheExceedsTotal);
            }
        }
        let cluster_size = geometry.cluster_size();
        let sound =
            |slice: u64| slice.is_power_of_two() && (limits::SECTOR_SIZE..=cluster_size).contains(&slice);
        match self.slice {
            Some(slice) if !sound(slice) => Err(OptionError::SliceSize { cluster_size }),
            _ => Ok(()),
        }
    }
}

/// Whether a feature was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Wish {
    /// Asked for.
    On,
    /// Not asked for.
    Off,
}

/// `lazy-refcounts` needs version 3.
///
/// # Errors
/// [`OptionError::LazyRefcounts`].
pub fn check_lazy_refcounts(wish: Wish, version: Version) -> Result<(), OptionError> {
    match (wish, version) {
        (Wish::On, Version::V2) => Err(OptionError::LazyRefcounts),
        _ => Ok(()),
    }
}

/// `discard-no-unref` needs version 3.
///
/// # Errors
/// [`OptionError::DiscardNoUnref`].
pub fn check_discard_no_unref(wish: Wish, version: Version) -> Result<(), OptionError> {
    match (wish, version) {
        (Wish::On, Version::V2) => Err(OptionError::DiscardNoUnref),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{DataLocation, L2Format};

    #[test]
    fn check_27_options() {
        let g = Geometry::new(Version::V3, 16, 4, L2Format::Standard, DataLocation::InImage).unwrap();
        let verdict = |total, l2, refcount, slice| {
            CacheSizes { total, l2, refcount, slice }.check(&g).map_err(|error| error.to_string())
        };
        assert_eq!(verdict(None, Some(9), Some(9), Some(4096)), Ok(()));
        assert_eq!(
            verdict(Some(9), Some(1), Some(1), None).unwrap_err(),
            "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time"
        );
        assert_eq!(
            verdict(Some(9), Some(10), None, None).unwrap_err(),
            "l2-cache-size may not exceed cache-size"
        );
        assert_eq!(
            verdict(Some(9), None, Some(10), None).unwrap_err(),
            "refcount-cache-size may not exceed cache-size"
        );
        for slice in [0, 256, 4097, 131_072] {
            assert_eq!(
                verdict(None, None, None, Some(slice)).unwrap_err(),
                "L2 cache entry size must be a power of two between 512 and the cluster size (65536)"
            );
        }
        assert_eq!(
            check_lazy_refcounts(Wish::On, Version::V2).unwrap_err().to_string(),
            "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level"
        );
        assert_eq!(
            check_discard_no_unref(Wish::On, Version::V2).unwrap_err().to_string(),
            "discard-no-unref is only supported since qcow2 version 3"
        );
        assert_eq!(check_lazy_refcounts(Wish::Off, Version::V2), Ok(()));
        assert_eq!(check_discard_no_unref(Wish::On, Version::V3), Ok(()));
    }
}
