//! The kernel's requests and the answers to them, as bytes (`linux/fuse.h`, protocol 7). Pure functions: any bytes are a
//! request or none.

use std::time::{Duration, SystemTime};

/// Bytes of a request's header.
const HEADER: usize = 40;
/// Bytes before the data of a write.
pub(crate) const WRITE_HEAD: usize = HEADER + 40;
/// Bytes of a request without data that anybody looks at; of what is longer, the rest means nothing here.
pub(crate) const MAX_HEAD: usize = 256;
/// Bytes of an answer's header.
pub(crate) const ANSWER_HEADER: usize = 16;
/// The only file.
const ROOT: u64 = 1;
/// The type of a regular file, in a mode.
const REGULAR: u32 = 0o100_000;

/// Attributes that a SETATTR wants to change (`FATTR_*`).
const ATTR_MODE: u32 = 1;
const ATTR_UID: u32 = 1 << 1;
const ATTR_GID: u32 = 1 << 2;
const ATTR_SIZE: u32 = 1 << 3;

/// How a file is open, as far as we want to tell the kernel (`FOPEN_*`): past its page cache, with writes at the same time.
const OPEN_DIRECT_IO: u32 = 1;
const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// A request. Offsets and lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    GetAttr,
    /// The size, if it is to be changed; whether mode or owner are.
    SetAttr {
        size: Option<u64>,
        others: bool,
    },
    /// With these flags of open(2).
    Open {
        flags: u32,
    },
    Read {
        offset: u64,
        len: u32,
    },
    /// The data follows the head.
    Write {
        offset: u64,
        len: u32,
    },
    Statfs,
    /// close(2), of one descriptor and of the last: nothing is to be done.
    Close,
    Sync,
    Fallocate {
        offset: u64,
        len: u64,
        mode: i32,
    },
    Seek {
        offset: u64,
        whence: u32,
    },
    /// Something that nobody waits for.
    Forget,
    Unknown,
}

/// A request. `unique` says what the answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) unique: u64,
    pub(crate) ask: Ask,
}

impl Request {
    /// Whether data follows the head.
    pub(crate) fn is_write(self) -> bool {
        matches!(self.ask, Ask::Write { .. })
    }
}

/// The number of `N` bytes at `at` behind the header.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(HEADER + at..HEADER + at + N)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    field(bytes, at).map(u64::from_ne_bytes)
}

/// Reads a request from its first bytes; `None` if they are none.
pub(crate) fn parse(bytes: &[u8]) -> Option<Request> {
    let (head, _) = bytes.split_at_checked(HEADER)?;
    let opcode = u32::from_ne_bytes(head[4..8].try_into().ok()?);
    let unique = u64::from_ne_bytes(head[8..16].try_into().ok()?);
    // What is cut short is nothing that we know.
    let ask = parse_ask(opcode, bytes).unwrap_or(Ask::Unknown);
    Some(Request { unique, ask })
}

fn parse_ask(opcode: u32, bytes: &[u8]) -> Option<Ask> {
    Some(match opcode {
        // FORGET, BATCH_FORGET
        2 | 42 => Ask::Forget,
        3 => Ask::GetAttr,
        4 => {
            let valid = u32_at(bytes, 0)?;
            let size = if valid & ATTR_SIZE != 0 { Some(u64_at(bytes, 16)?) } else { None };
            Ask::SetAttr { size, others: valid & (ATTR_MODE | ATTR_UID | ATTR_GID) != 0 }
        }
        14 => Ask::Open { flags: u32_at(bytes, 0)? },
        15 => Ask::Read { offset: u64_at(bytes, 8)?, len: u32_at(bytes, 16)? },
        16 => Ask::Write { offset: u64_at(bytes, 8)?, len: u32_at(bytes, 16)? },
        17 => Ask::Statfs,
        // RELEASE, FLUSH
        18 | 25 => Ask::Close,
        20 => Ask::Sync,
        43 => {
            let mode = u32_at(bytes, 24)?.cast_signed();
            Ask::Fallocate { offset: u64_at(bytes, 8)?, len: u64_at(bytes, 16)?, mode }
        }
        46 => Ask::Seek { offset: u64_at(bytes, 8)?, whence: u32_at(bytes, 16)? },
        _ => Ask::Unknown,
    })
}

/// The header of an answer with `len` bytes behind it; `errno` is 0 where it succeeds.
pub(crate) fn answer_header(unique: u64, errno: i32, len: usize) -> [u8; ANSWER_HEADER] {
    let mut bytes = [0; ANSWER_HEADER];
    bytes[..4].copy_from_slice(&((ANSWER_HEADER + len) as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&(-errno).to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// Attributes of the file, for the kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attributes {
    /// Bytes.
    pub(crate) size: u64,
    /// Bytes of disk that it takes.
    pub(crate) allocated: u64,
    /// Permissions.
    pub(crate) permissions: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) time: SystemTime,
    /// The best size of a request.
    pub(crate) block_size: u32,
}

/// The answer to GETATTR and SETATTR; the kernel may believe it for `valid`.
pub(crate) fn attributes(attributes: &Attributes, valid: Duration) -> Vec<u8> {
    let time = attributes.time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut bytes = Vec::with_capacity(104);
    bytes.extend(valid.as_secs().to_ne_bytes());
    bytes.extend(valid.subsec_nanos().to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    for number in [ROOT, attributes.size, attributes.allocated.div_ceil(512)] {
        bytes.extend(number.to_ne_bytes());
    }
    // Accessed, modified, changed.
    (0..3).for_each(|_| bytes.extend(time.as_secs().to_ne_bytes()));
    (0..3).for_each(|_| bytes.extend(time.subsec_nanos().to_ne_bytes()));
    let (uid, gid) = attributes.owner;
    let links = 1;
    for number in [REGULAR | attributes.permissions, links, uid, gid, 0, attributes.block_size, 0] {
        bytes.extend(number.to_ne_bytes());
    }
    bytes
}

/// The answer to OPEN.
pub(crate) fn opened() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[8..12].copy_from_slice(&(OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES).to_ne_bytes());
    bytes
}

/// The answer to WRITE.
pub(crate) fn written(len: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes
}

/// The answer to STATFS, of a full file system of `size` bytes with one file.
pub(crate) fn statfs(size: u64) -> Vec<u8> {
    const BLOCK: u32 = 4096;
    let mut bytes = Vec::with_capacity(80);
    // Blocks; free ones, and those for everybody; files, and free ones.
    for number in [size.div_ceil(BLOCK.into()), 0, 0, 1, 0] {
        bytes.extend(number.to_ne_bytes());
    }
    // Size of a block, length of a name, size of a fragment.
    for number in [BLOCK, 255, BLOCK] {
        bytes.extend(number.to_ne_bytes());
    }
    bytes.resize(80, 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(77u64.to_ne_bytes());
        bytes.resize(HEADER, 0xaa);
        bytes.extend(body);
        bytes
    }

    fn words(list: &[u32]) -> Vec<u8> {
        list.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn longs(list: &[u64]) -> Vec<u8> {
        list.iter().flat_map(|long| long.to_ne_bytes()).collect()
    }

    // The structures as in linux/fuse.h.
    #[test]
    fn fields_are_where_the_kernel_puts_them() {
        let ask = |opcode, body: &[u8]| {
            let request = parse(&request(opcode, body)).unwrap();
            assert_eq!(request.unique, 77);
            request.ask
        };
        let read = [longs(&[5, 1 << 40]), words(&[4096, 0]), longs(&[9, 9])].concat();
        assert_eq!(ask(15, &read), Ask::Read { offset: 1 << 40, len: 4096 });
        assert_eq!(ask(16, &read), Ask::Write { offset: 1 << 40, len: 4096 });
        assert_eq!(HEADER + read.len(), WRITE_HEAD);
        let setattr = [words(&[8, 0]), longs(&[5, 1 << 33]), vec![0; 64]].concat();
        assert_eq!(ask(4, &setattr), Ask::SetAttr { size: Some(1 << 33), others: false });
        let setattr = [words(&[3, 0]), vec![0; 80]].concat();
        assert_eq!(ask(4, &setattr), Ask::SetAttr { size: None, others: true });
        assert_eq!(ask(14, &words(&[2, 0])), Ask::Open { flags: 2 });
        let fallocate = [longs(&[5, 1 << 20, 1 << 21]), words(&[3, 0])].concat();
        assert_eq!(ask(43, &fallocate), Ask::Fallocate { offset: 1 << 20, len: 1 << 21, mode: 3 });
        let seek = [longs(&[5, 512]), words(&[4, 0])].concat();
        assert_eq!(ask(46, &seek), Ask::Seek { offset: 512, whence: 4 });
        for (opcode, expected) in [
            (2, Ask::Forget),
            (42, Ask::Forget),
            (17, Ask::Statfs),
            (18, Ask::Close),
            (25, Ask::Close),
            (20, Ask::Sync),
        ] {
            assert_eq!(ask(opcode, &[0; 40]), expected);
        }
        for opcode in [0, 1, 5, 22, 26, 36, 38, 39, 52, u32::MAX] {
            assert_eq!(ask(opcode, &[0; 200]), Ask::Unknown);
        }
    }

    #[test]
    fn what_is_cut_short_is_no_request_we_know() {
        for opcode in 0..60 {
            let whole = request(opcode, &[0xff; 100]);
            for len in 0..whole.len() {
                match parse(&whole[..len]) {
                    None => assert!(len < HEADER),
                    Some(request) => assert_eq!(request.unique, 77),
                }
            }
        }
        assert_eq!(parse(&request(15, &[0; 19])).unwrap().ask, Ask::Unknown);
    }

    #[test]
    fn answers_have_the_kernel_s_sizes() {
        let file = Attributes {
            size: 1000,
            allocated: 513,
            permissions: 0o600,
            owner: (3, 4),
            time: SystemTime::UNIX_EPOCH + Duration::new(5, 6),
            block_size: 65536,
        };
        let bytes = attributes(&file, Duration::from_secs(1));
        assert_eq!(bytes.len(), 104);
        assert_eq!(bytes[16..40], longs(&[1, 1000, 2]));
        assert_eq!(bytes[64..], words(&[6, 6, 6, 0o100_600, 1, 3, 4, 0, 65536, 0]));
        assert_eq!(statfs(8192).len(), 80);
        assert_eq!(statfs(8192)[..8], 2u64.to_ne_bytes());
        assert_eq!(answer_header(9, 28, 0), *[words(&[16, (-28i32).cast_unsigned()]), longs(&[9])].concat());
    }
}
