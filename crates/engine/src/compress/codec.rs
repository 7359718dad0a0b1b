//! The codecs: one cluster in, one stream out, and back. Contexts belong to the thread and are reused.

use super::burst::Burst;
use super::constant_clusters;
use super::method::{Method, Packing};
use flate2::FlushCompress;
use std::cell::RefCell;
use std::sync::atomic::AtomicUsize;
use zebu_qcow2::Compression;
use zebu_storage::IoBufs;

/// A context that was made for a level, and is made again for another.
type Kept<T> = RefCell<Option<(u8, T)>>;

thread_local! {
    /// Clusters whose bytes do not lie in one piece, or that end behind the disk.
    static JOINED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static DEFLATER: Kept<libdeflater::Compressor> = const { RefCell::new(None) };
    static NARROW_DEFLATER: Kept<flate2::Compress> = const { RefCell::new(None) };
    /// The one that works in short bursts: libdeflate takes whole clusters only.
    static PIECEWISE_DEFLATER: Kept<flate2::Compress> = const { RefCell::new(None) };
    static INFLATER: RefCell<libdeflater::Decompressor> = RefCell::new(libdeflater::Decompressor::new());
}

/// Works with the thread's context for `level`. It is kept only if `work` ended well: one that stopped in the middle
/// (a panic included) is not to be trusted with the next cluster.
fn with_kept<T, R>(
    kept: &Kept<T>,
    level: u8,
    make: impl FnOnce() -> T,
    work: impl FnOnce(&mut T) -> Option<R>,
) -> Option<R> {
    let mut context = match kept.take() {
        Some((of, context)) if of == level => context,
        _ => make(),
    };
    let result = work(&mut context)?;
    kept.replace(Some((level, context)));
    Some(result)
}

/// Compresses `input`, with zeroes behind it up to `cluster` bytes, into `out`. Returns the length of the stream, or
/// `None` if it is not shorter than a cluster. With a count of those who wait, the thread sleeps in between as long as it is 0.
pub(super) fn compress(
    method: Method,
    hurried: Option<&AtomicUsize>,
    input: &IoBufs,
    cluster: usize,
    out: &mut Vec<u8>,
) -> Option<usize> {
    let any_length = cluster + cluster / 8 + 64;
    let shorter = cluster.checked_sub(1)?;
    let (room, most) = match (method, hurried) {
        (Method::Zlib { .. }, _) => (any_length, any_length),
        // zlib is given room for whatever comes out: a stream that stops in the middle costs a new context.
        (Method::NarrowDeflate { .. }, _) | (Method::Deflate { .. }, Some(_)) => (any_length, shorter),
        (Method::Deflate { .. }, None) => (shorter, shorter),
        #[cfg(feature = "zstd")]
        (Method::Zstd { .. }, _) => (shorter, shorter),
    };
    out.resize(room, 0);
    let len = match input.parts() {
        [one] if one.len() == cluster => compress_cluster(method, hurried, one.as_slice(), out),
        _ => JOINED.with_borrow_mut(|joined| {
            joined.clear();
            joined.resize(cluster, 0);
            let len = input.len().min(cluster);
            input.copy_to(0, joined.get_mut(..len)?);
            compress_cluster(method, hurried, joined, out)
        }),
    };
    len.filter(|len| *len <= most)
}

fn compress_cluster(
    method: Method,
    hurried: Option<&AtomicUsize>,
    input: &[u8],
    out: &mut [u8],
) -> Option<usize> {
    constant_clusters::compress(method, input, out, |out| match hurried {
        None => compress_bytes(method, input, out),
        Some(hurried) => compress_in_bursts(method, Burst::begin(hurried), input, out),
    })
}

/// Works with the thread's deflater. It keeps nothing of a cluster, so one that does not fit is no failure of the context.
fn with_deflater<R>(level: u8, work: impl FnOnce(&mut libdeflater::Compressor) -> Option<R>) -> Option<R> {
    let make = || {
        let level = libdeflater::CompressionLvl::new(level.into()).unwrap_or_default();
        libdeflater::Compressor::new(level)
    };
    DEFLATER.with(|kept| with_kept(kept, level, make, |deflater| Some(work(deflater))).flatten())
}

fn compress_bytes(method: Method, input: &[u8], out: &mut [u8]) -> Option<usize> {
    match method {
        Method::Deflate { level } => {
            with_deflater(level, |deflater| deflater.deflate_compress(input, out).ok())
        }
        Method::Zlib { level } => with_deflater(level, |deflater| deflater.zlib_compress(input, out).ok()),
        Method::NarrowDeflate { level } => with_zlib(&NARROW_DEFLATER, level, 12, |deflater| {
            deflate_piece(deflater, input, out, FlushCompress::Finish)
        }),
        #[cfg(feature = "zstd")]
        Method::Zstd { level } => zstd::compress(level, input, out),
    }
}

/// Bytes of a cluster that are given to zlib in one burst.
const DEFLATE_PIECE: usize = 2 << 10;

/// Levels of zlib end at 9.
const MOST_OF_ZLIB: u8 = 9;

fn compress_in_bursts(method: Method, mut burst: Burst<'_>, input: &[u8], out: &mut [u8]) -> Option<usize> {
    let (kept, level, window_bits) = match method {
        Method::Deflate { level } => (&PIECEWISE_DEFLATER, level.min(MOST_OF_ZLIB), 15),
        Method::NarrowDeflate { level } => (&NARROW_DEFLATER, level, 12),
        Method::Zlib { .. } => return compress_bytes(method, input, out),
        #[cfg(feature = "zstd")]
        Method::Zstd { level } => return zstd::compress_in_bursts(level, burst, input, out),
    };
    with_zlib(kept, level, window_bits, |deflater| {
        let mut pieces = input.chunks(DEFLATE_PIECE);
        let last = pieces.next_back()?;
        for piece in pieces {
            deflate_piece(deflater, piece, out, FlushCompress::None)?;
            burst.pause();
        }
        deflate_piece(deflater, last, out, FlushCompress::Finish)
    })
}

/// Begins a stream of raw deflate with the thread's context.
fn with_zlib(
    kept: &'static std::thread::LocalKey<Kept<flate2::Compress>>,
    level: u8,
    window_bits: u8,
    work: impl FnOnce(&mut flate2::Compress) -> Option<usize>,
) -> Option<usize> {
    let make =
        || flate2::Compress::new_with_window_bits(flate2::Compression::new(level.into()), false, window_bits);
    kept.with(|kept| {
        with_kept(kept, level, make, |deflater| {
            deflater.reset();
            work(deflater)
        })
    })
}

/// Deflates the next piece of a stream into its place in `out`; the length of the stream so far, if there was room.
fn deflate_piece(
    deflater: &mut flate2::Compress,
    piece: &[u8],
    out: &mut [u8],
    flush: FlushCompress,
) -> Option<usize> {
    let read = deflater.total_in();
    let place = out.get_mut(usize::try_from(deflater.total_out()).ok()?..)?;
    let status = deflater.compress(piece, place, flush).ok()?;
    let is_done = match flush {
        FlushCompress::Finish => status == flate2::Status::StreamEnd,
        _ => status == flate2::Status::Ok && deflater.total_in() - read == piece.len() as u64,
    };
    is_done.then(|| usize::try_from(deflater.total_out()).ok()).flatten()
}

/// Inflates one cluster from `input`, whose first `skip` bytes are not part of the stream, into `out`; what follows
/// the stream is ignored. Work and memory are bounded by `cluster`. Returns how many bytes there are: a cluster, or for
/// packings of other formats at most so many.
pub(super) fn inflate(
    packing: Packing,
    input: &IoBufs,
    skip: usize,
    cluster: usize,
    out: &mut Vec<u8>,
) -> Result<usize, &'static str> {
    out.resize(cluster, 0);
    match input.parts() {
        [one] => inflate_packed(packing, one.as_slice().get(skip..).unwrap_or_default(), out),
        _ => JOINED.with_borrow_mut(|joined| {
            joined.clear();
            joined.resize(input.len().saturating_sub(skip), 0);
            input.copy_to(skip, joined);
            inflate_packed(packing, joined, out)
        }),
    }
}

fn inflate_packed(packing: Packing, input: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
    match packing {
        Packing::Cluster(compression) => inflate_bytes(compression, input, out).map(|()| out.len()),
        Packing::Zlib => {
            let inflated = INFLATER.with_borrow_mut(|inflater| inflater.zlib_decompress(input, out));
            inflated.map_err(|error| match error {
                libdeflater::DecompressionError::BadData => "the zlib stream is damaged",
                libdeflater::DecompressionError::InsufficientSpace => {
                    "the zlib stream holds more than its unit"
                }
            })
        }
        Packing::Bzip2 => bunzip2(input, out),
    }
}

fn bunzip2(input: &[u8], out: &mut [u8]) -> Result<usize, &'static str> {
    let mut decoder = bzip2::Decompress::new(false);
    loop {
        let (read, filled) = (decoder.total_in() as usize, decoder.total_out() as usize);
        let (rest, place) =
            (input.get(read..).unwrap_or_default(), out.get_mut(filled..).unwrap_or_default());
        match decoder.decompress(rest, place) {
            Ok(bzip2::Status::StreamEnd) => return Ok(decoder.total_out() as usize),
            Ok(_) if decoder.total_in() as usize > read || decoder.total_out() as usize > filled => {}
            Ok(_) if filled == out.len() => return Err("the bzip2 stream holds more than its unit"),
            Ok(_) | Err(_) => return Err("the bzip2 stream is damaged"),
        }
    }
}

fn inflate_bytes(compression: Compression, input: &[u8], out: &mut [u8]) -> Result<(), &'static str> {
    match compression {
        Compression::Zlib => {
            let inflated = INFLATER.with_borrow_mut(|inflater| inflater.deflate_decompress(input, out));
            match inflated {
                Ok(len) if len == out.len() => Ok(()),
                Ok(_) => Err("the deflate stream ends before the cluster is full"),
                Err(libdeflater::DecompressionError::BadData) => Err("the deflate stream is damaged"),
                Err(libdeflater::DecompressionError::InsufficientSpace) => {
                    Err("the deflate stream holds more than a cluster")
                }
            }
        }
        #[cfg(feature = "zstd")]
        Compression::Zstd => zstd::inflate(input, out),
        #[cfg(not(feature = "zstd"))]
        Compression::Zstd => Err("zstd was left out of this build"),
        _ => Err("this version does not know the compression"),
    }
}

#[cfg(feature = "zstd")]
mod zstd {
    use super::{Burst, Kept, with_kept};
    use std::cell::RefCell;
    use zstd_safe::zstd_sys::ZSTD_EndDirective::{ZSTD_e_end, ZSTD_e_flush};
    use zstd_safe::{CCtx, CParameter, DCtx, InBuffer, OutBuffer, ResetDirective};

    thread_local! {
        static COMPRESSOR: Kept<CCtx<'static>> = const { RefCell::new(None) };
        static INFLATER: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
    }

    /// Bytes of a cluster that are compressed in one burst: a block of the frame.
    const PIECE: usize = 4 << 10;

    /// Works with the thread's context for `level`.
    fn with_context(
        level: u8,
        work: impl FnOnce(&mut CCtx<'static>) -> Option<Option<usize>>,
    ) -> Option<usize> {
        let make = || {
            let mut context = CCtx::create();
            // Both are parameters that every context has.
            let _ = context.set_parameter(CParameter::CompressionLevel(level.into()));
            let _ = context.set_parameter(CParameter::ChecksumFlag(true));
            context
        };
        COMPRESSOR.with(|kept| with_kept(kept, level, make, work)).flatten()
    }

    pub(super) fn compress(level: u8, input: &[u8], out: &mut [u8]) -> Option<usize> {
        // It begins anew with each frame, whatever became of the last one.
        with_context(level, |context| Some(context.compress2(out, input).ok()))
    }

    pub(super) fn compress_in_bursts(
        level: u8,
        burst: Burst<'_>,
        input: &[u8],
        out: &mut [u8],
    ) -> Option<usize> {
        with_context(level, |context| {
            // The last frame may have stopped in the middle, for want of room.
            context.reset(ResetDirective::SessionOnly).ok()?;
            context.set_pledged_src_size(Some(input.len() as u64)).ok()?;
            Some(blocks(context, burst, input, out))
        })
    }

    /// One frame; `None` if it does not fit.
    fn blocks(context: &mut CCtx<'_>, mut burst: Burst<'_>, input: &[u8], out: &mut [u8]) -> Option<usize> {
        let mut out = OutBuffer::around(out);
        let mut pieces = input.chunks(PIECE).peekable();
        while let Some(piece) = pieces.next() {
            let end = if pieces.peek().is_some() { ZSTD_e_flush } else { ZSTD_e_end };
            let left = context.compress_stream2(&mut out, &mut InBuffer::around(piece), end).ok()?;
            if left > 0 {
                return None;
            }
            if pieces.peek().is_some() {
                burst.pause();
            }
        }
        Some(out.pos())
    }

    /// Frame by frame, each straight into its place: a decoder of a stream would set aside whatever window a frame asks for
    /// (128 MiB and more), which a cluster has no use for.
    pub(super) fn inflate(input: &[u8], out: &mut [u8]) -> Result<(), &'static str> {
        INFLATER.with_borrow_mut(|context| {
            let (mut rest, mut filled) = (input, 0);
            // A cluster may be several frames. Each turn takes at least the header of one.
            while let Some(place) = out.get_mut(filled..).filter(|place| !place.is_empty()) {
                if rest.is_empty() {
                    return Err("the zstd stream ends before the cluster is full");
                }
                let len = zstd_safe::find_frame_compressed_size(rest).map_err(zstd_safe::get_error_name)?;
                let (frame, behind) = rest.split_at_checked(len).ok_or("the zstd stream is cut off")?;
                filled += context.decompress(place, frame).map_err(zstd_safe::get_error_name)?;
                rest = behind;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zebu_storage::IoBuf;

    fn round_trip(method: Method, compression: Compression, content: &[u8], cluster: usize) -> Option<usize> {
        let whole = round_trip_of(None, method, compression, content, cluster);
        let short = round_trip_of(Some(&AtomicUsize::new(0)), method, compression, content, cluster);
        // Each block has a header, and zlib finds less than libdeflate.
        let most = |len: usize| len + len / 2 + cluster / 64 + 64;
        if let Some(whole) = whole.filter(|whole| most(*whole) < cluster) {
            let short = short.unwrap();
            assert!(short <= most(whole), "{method:?}: {short} bytes in short bursts, {whole} else");
        }
        whole
    }

    fn round_trip_of(
        hurried: Option<&AtomicUsize>,
        method: Method,
        compression: Compression,
        content: &[u8],
        cluster: usize,
    ) -> Option<usize> {
        let mut stream = Vec::new();
        let input = IoBufs::from(IoBuf::copy_of(content));
        let len = compress(method, hurried, &input, cluster, &mut stream)?;
        assert!(len < cluster);
        // As in a file: something before, something behind.
        let mut stored = vec![0xee; 7];
        stored.extend_from_slice(&stream[..len]);
        stored.extend_from_slice(&[0xa5; 300]);
        let mut back = Vec::new();
        inflate(Packing::Cluster(compression), &IoBuf::copy_of(&stored).into(), 7, cluster, &mut back)
            .unwrap();
        assert!(back[..content.len()] == *content && back[content.len()..].iter().all(|&b| b == 0));
        Some(len)
    }

    fn methods() -> Vec<(Method, Compression)> {
        vec![
            (Method::Deflate { level: 1 }, Compression::Zlib),
            (Method::Deflate { level: 3 }, Compression::Zlib),
            (Method::Deflate { level: 12 }, Compression::Zlib),
            (Method::NarrowDeflate { level: 1 }, Compression::Zlib),
            (Method::NarrowDeflate { level: 9 }, Compression::Zlib),
            #[cfg(feature = "zstd")]
            (Method::Zstd { level: 3 }, Compression::Zstd),
            #[cfg(feature = "zstd")]
            (Method::Zstd { level: 22 }, Compression::Zstd),
        ]
    }

    /// Text whose repetitions lie `period` bytes apart, without short ones in between.
    fn repeating(period: usize, len: usize) -> Vec<u8> {
        let mut state = 1u32;
        let unit: Vec<u8> = (0..period)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        unit.into_iter().cycle().take(len).collect()
    }

    #[test]
    fn a_narrow_window_does_not_reach_farther_than_4_kib() {
        let near = repeating(3000, 65536);
        let far = repeating(10_000, 65536);
        let narrow = Method::NarrowDeflate { level: 6 };
        assert!(round_trip(narrow, Compression::Zlib, &near, 65536).unwrap() < 8000);
        assert_eq!(round_trip(narrow, Compression::Zlib, &far, 65536), None);
        assert!(round_trip(Method::Deflate { level: 6 }, Compression::Zlib, &far, 65536).unwrap() < 16_000);
    }

    #[test]
    fn what_does_not_become_shorter_is_not_compressed() {
        let noise = repeating(65536, 65536);
        for (method, compression) in methods() {
            assert_eq!(round_trip(method, compression, &noise, 65536), None, "{method:?}");
        }
    }

    #[test]
    fn a_cluster_that_does_not_fit_spoils_no_other() {
        let (noise, text) = (repeating(65536, 65536), repeating(300, 65536));
        let none_waits = AtomicUsize::new(0);
        let ways = [None, Some(&none_waits)];
        for (method, compression) in methods() {
            for first in ways {
                for next in ways {
                    assert_eq!(round_trip_of(first, method, compression, &noise, 65536), None, "{method:?}");
                    assert!(round_trip_of(next, method, compression, &text, 65536).is_some(), "{method:?}");
                }
            }
        }
    }

    #[cfg(feature = "zstd")]
    #[test]
    fn a_zstd_stream_has_a_checksum_that_is_checked() {
        let content = repeating(500, 4096);
        let mut stream = Vec::new();
        let input = IoBufs::from(IoBuf::copy_of(&content));
        let len = compress(Method::Zstd { level: 3 }, None, &input, 4096, &mut stream).unwrap();
        stream.truncate(len);
        *stream.last_mut().unwrap() ^= 1;
        let mut back = Vec::new();
        let input = IoBuf::copy_of(&stream).into();
        assert!(inflate(Packing::Cluster(Compression::Zstd), &input, 0, 4096, &mut back).is_err());
    }

    #[cfg(feature = "zstd")]
    #[test]
    fn a_cluster_of_several_zstd_frames_is_read_whatever_window_they_ask_for() {
        // RFC 8878, 3.1.1: magic number, no flags, a window of 2 GiB, and a last block that repeats one byte 4096 times.
        let frame = |byte| [0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 0x03, 0x80, 0, byte];
        // 3.1.2: a frame to be skipped, of one byte.
        let skipped = [0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 99];
        let stream = [&frame(7)[..], &skipped, &frame(8), &[0xee; 100]].concat();
        let mut out = Vec::new();
        inflate(Packing::Cluster(Compression::Zstd), &IoBuf::copy_of(&stream).into(), 0, 8192, &mut out)
            .unwrap();
        assert!(out[..4096] == [7; 4096] && out[4096..] == [8; 4096]);
        for short in [5, 15, 25] {
            let cut = IoBuf::copy_of(&stream[..short]).into();
            assert!(
                inflate(Packing::Cluster(Compression::Zstd), &cut, 0, 8192, &mut Vec::new()).is_err(),
                "{short}"
            );
        }
    }

    #[test]
    fn clusters_full_of_one_byte_come_back_again_and_again() {
        for (method, compression) in methods() {
            for byte in [255, 255, 1, 255] {
                for cluster in [512, 65536, 65536] {
                    round_trip(method, compression, &vec![byte; cluster], cluster).unwrap();
                }
            }
        }
    }

    #[test]
    fn streams_that_hold_too_little_or_too_much_are_errors() {
        let content = repeating(100, 8192);
        for (method, compression) in methods() {
            let mut stream = Vec::new();
            let input = IoBufs::from(IoBuf::copy_of(&content));
            let len = compress(method, None, &input, 8192, &mut stream).unwrap();
            let stored = || IoBufs::from(IoBuf::copy_of(&stream[..len]));
            for cluster in [4096, 16384] {
                assert!(
                    inflate(Packing::Cluster(compression), &stored(), 0, cluster, &mut Vec::new()).is_err(),
                    "{method:?}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn clusters_come_back(
            cluster_bits in 9u32..=17,
            period in 1usize..5000,
            part in any::<prop::sample::Index>(),
        ) {
            let cluster = 1 << cluster_bits;
            let content = repeating(period, 1 + part.index(cluster));
            for (method, compression) in methods() {
                round_trip(method, compression, &content, cluster);
            }
        }

        #[test]
        fn damaged_streams_are_errors_or_clusters(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            for (_, compression) in methods() {
                let mut out = Vec::new();
                let _ = inflate(Packing::Cluster(compression), &IoBuf::copy_of(&bytes).into(), 0, 4096, &mut out);
                prop_assert_eq!(out.len(), 4096);
            }
        }
    }
}
