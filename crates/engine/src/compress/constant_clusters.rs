//! Clusters that hold one byte over and over, as erased flash and many tests of disks do: of several in a row the first is
//! compressed, the others have the same stream. Finding out costs next to nothing where it is not so.

use super::method::Method;
use std::cell::RefCell;

/// The stream of the thread's latest such cluster.
struct Latest {
    byte: u8,
    cluster: usize,
    method: Method,
    stream: Vec<u8>,
}

/// Longer streams are not kept: such a cluster becomes a thousandth of its size, whatever compresses it.
const LONGEST: usize = 16 << 10;

thread_local! {
    static LATEST: RefCell<Option<Latest>> = const { RefCell::new(None) };
}

/// Compresses `input` by `compress`, or gives `out` the stream that is known.
pub(super) fn compress(
    method: Method,
    input: &[u8],
    out: &mut [u8],
    compress: impl FnOnce(&mut [u8]) -> Option<usize>,
) -> Option<usize> {
    let Some(byte) = only_byte(input) else { return compress(out) };
    let known = LATEST.with_borrow(|latest| {
        let Latest { stream, .. } = latest.as_ref().filter(|latest| {
            latest.byte == byte && latest.cluster == input.len() && latest.method == method
        })?;
        out.get_mut(..stream.len())?.copy_from_slice(stream);
        Some(stream.len())
    });
    known.or_else(|| {
        let len = compress(out)?;
        if let Some(stream) = out.get(..len).filter(|stream| stream.len() <= LONGEST) {
            LATEST.set(Some(Latest { byte, cluster: input.len(), method, stream: stream.to_vec() }));
        }
        Some(len)
    })
}

/// The byte that `bytes` are full of.
fn only_byte(bytes: &[u8]) -> Option<u8> {
    let (first, rest) = bytes.split_first()?;
    // Each byte beside the next one: ends at the first difference.
    (bytes.get(..rest.len())? == rest).then_some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_of_another_byte_method_or_cluster_is_not_taken() {
        let level = |level| Method::Deflate { level };
        let mut compressed = Vec::new();
        for (method, byte, len) in [
            (level(1), 7, 4096),
            (level(1), 7, 4096),
            (level(1), 8, 4096),
            (level(2), 8, 4096),
            (level(2), 8, 8192),
            (level(2), 8, 8192),
        ] {
            let mut out = [0; 16];
            let number = compressed.len() as u8;
            let mut is_new = false;
            let made = compress(method, &vec![byte; len], &mut out, |out| {
                is_new = true;
                out[0] = number;
                Some(1)
            });
            assert_eq!(made, Some(1));
            compressed.push((is_new, out[0]));
        }
        assert_eq!(compressed, [(true, 0), (false, 0), (true, 2), (true, 3), (true, 4), (false, 4)]);
    }

    #[test]
    fn only_what_is_full_of_one_byte_is_known() {
        let mut bytes = vec![9; 4096];
        assert_eq!((only_byte(&bytes), only_byte(&[]), only_byte(&[3])), (Some(9), None, Some(3)));
        for at in [0, 1, 2000, 4095] {
            bytes[at] = 8;
            assert_eq!(only_byte(&bytes), None, "{at}");
            bytes[at] = 9;
        }
    }
}
