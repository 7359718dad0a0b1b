//! Tests of the functions as C calls them, and of what is written beside them.

use crate::disk::{zebu_close, zebu_create, zebu_flush, zebu_open, zebu_pread, zebu_pwrite, zebu_size};
use crate::failure::{answer, zebu_error};
use crate::job::{ZebuCheckCounts, zebu_check};
use crate::queue::{ZebuCompletion, zebu_queue_free, zebu_queue_new, zebu_queue_poll, zebu_queue_read};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

const HEADER: &str = include_str!("../include/zebu.h");
const MAP: &str = include_str!("../zebu.map");
const SOURCES: [&str; 5] = [
    include_str!("disk.rs"),
    include_str!("failure.rs"),
    include_str!("job.rs"),
    include_str!("lib.rs"),
    include_str!("queue.rs"),
];

/// A text without its comments.
fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.filter_map(|part| part.split_once("*/")).map(|(_, code)| code).collect::<String>()
}

/// The names that begin with `zebu_` and that `after` follows.
fn names(text: &str, after: char) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let starts = text.match_indices("zebu_").map(|(at, _)| &text[at..]);
    let ends =
        starts.filter_map(|rest| rest.split_once(|c: char| !is_of_name(c)).map(|(name, _)| (name, rest)));
    ends.filter(|(name, rest)| rest[name.len()..].starts_with(after))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[test]
fn the_header_the_versions_and_the_functions_have_the_same_names() {
    let declared = names(&without_comments(HEADER), '(');
    assert_eq!(declared, names(&without_comments(MAP), ';'));
    let defined = SOURCES.iter().flat_map(|source| source.split("extern \"C\" fn ").skip(1));
    let defined = defined.filter_map(|rest| rest.split_once('(')).map(|(name, _)| name.to_owned());
    assert_eq!(declared, defined.collect());
    // Nothing is told of in comments that there is not.
    assert_eq!(names(HEADER, '('), declared);
}

#[test]
fn the_header_has_the_version_of_the_library() {
    let of_header = |part: &str| {
        let line =
            HEADER.lines().find_map(|line| line.strip_prefix(&format!("#define ZEBU_VERSION_{part} ")));
        line.expect("a line for each part").to_owned()
    };
    assert_eq!(["MAJOR", "MINOR", "PATCH"].map(of_header).join("."), env!("CARGO_PKG_VERSION"));
    // SAFETY: a string that lives as long as the library.
    let said = unsafe { CStr::from_ptr(crate::zebu_version()) };
    assert_eq!(said.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    assert_eq!(crate::zebu_version_number(), 1000);
}

#[test]
fn structures_have_the_layout_of_the_header() {
    assert_eq!(size_of::<ZebuCheckCounts>(), 40);
    if cfg!(target_pointer_width = "64") {
        assert_eq!(size_of::<ZebuCompletion>(), 24);
    }
}

fn said() -> String {
    // SAFETY: a string that lives until the next call on this thread.
    unsafe { CStr::from_ptr(zebu_error()) }.to_string_lossy().into_owned()
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("a path has no NUL")
}

#[test]
fn a_panic_is_an_error_of_the_function() {
    assert_eq!(answer(|| panic!("on purpose")), -libc::EIO);
    assert!(said().contains("panicked"), "{}", said());
    assert_eq!(answer(|| Ok(3)), 3);
}

#[test]
fn a_disk_is_written_read_and_closed_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = c_path(&dir.path().join("disk.qcow2"));
    let (mut back, data) = ([0_u8; 512], [7_u8; 512]);
    // SAFETY: strings and buffers of this function, with their lengths.
    unsafe {
        assert_eq!(zebu_create(image.as_ptr(), 1 << 20, c"format=qcow2".as_ptr()), 0, "{}", said());
        let disk = zebu_open(image.as_ptr(), c"rw".as_ptr());
        assert!(!disk.is_null(), "{}", said());
        assert_eq!(zebu_size(disk), 1 << 20);
        assert_eq!(zebu_pwrite(disk, data.as_ptr().cast(), 512, 4096, 0), 0, "{}", said());
        assert_eq!(zebu_flush(disk), 0);
        assert_eq!(zebu_pread(disk, back.as_mut_ptr().cast(), 512, 4096), 0, "{}", said());
        assert_eq!(back, data);

        let queue = zebu_queue_new(disk, ptr::null());
        assert!(!queue.is_null(), "{}", said());
        back.fill(0);
        assert_eq!(zebu_queue_read(queue, back.as_mut_ptr().cast(), 512, 4096, 9), 0);
        let mut done: [ZebuCompletion; 1] = std::mem::zeroed();
        assert_eq!(zebu_queue_poll(queue, done.as_mut_ptr(), 1, -1), 1);
        assert_eq!(back, data);
        assert_eq!(zebu_queue_free(queue), 0);

        assert_eq!(zebu_close(disk), 0, "{}", said());
        assert_eq!(zebu_close(disk), -libc::EBADF);
        assert_eq!(zebu_pread(disk, back.as_mut_ptr().cast(), 512, 0), -libc::EBADF);
        assert!(said().contains("closed"), "{}", said());
    }
}

#[test]
fn an_image_leads_to_servers_only_where_refs_say_so() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = c_path(&dir.path().join("overlay.qcow2"));
    let options = c"format=qcow2,backing=nbd://127.0.0.1:1/disk,backing_format=raw";
    let refusal = |words: &CStr| {
        // SAFETY: strings that live during the call.
        assert!(unsafe { zebu_open(image.as_ptr(), words.as_ptr()) }.is_null(), "{words:?}");
        said()
    };
    // SAFETY: strings of this function.
    assert_eq!(unsafe { zebu_create(image.as_ptr(), 1 << 20, options.as_ptr()) }, 0, "{}", said());
    for words in [c"ro", c"ro,refs=local", c"ro,refs=prefix=nbd://elsewhere/"] {
        let refused = refusal(words);
        assert!(refused.contains("nbd://127.0.0.1:1/disk") && !refused.contains("refused"), "{refused}");
    }
    for words in [c"ro,refs=all", c"ro,refs=prefix=nbd://127.0.0.1:1/"] {
        let reached = refusal(words);
        assert!(reached.contains("Connection refused"), "{reached}");
    }
}

unsafe extern "C-unwind" fn panics(_: *mut c_void, _: u64, _: u64) -> c_int {
    panic!("on purpose");
}

unsafe extern "C-unwind" fn counts_and_stops(calls: *mut c_void, _: u64, _: u64) -> c_int {
    // SAFETY: the test below passes a number, which it looks at afterwards.
    unsafe { *calls.cast::<u32>() += 1 };
    1
}

#[test]
fn a_callback_cancels_its_job() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = c_path(&dir.path().join("disk.qcow2"));
    let mut calls = 0_u32;
    // SAFETY: strings of this function, no counts, and a number for the callback.
    unsafe {
        assert_eq!(zebu_create(image.as_ptr(), 1 << 20, c"format=qcow2".as_ptr()), 0, "{}", said());
        let data = (&raw mut calls).cast();
        let stopped =
            zebu_check(image.as_ptr(), ptr::null(), ptr::null_mut(), 0, Some(counts_and_stops), data);
        assert_eq!((stopped, calls), (-libc::ECANCELED, 1), "{}", said());
        let stopped =
            zebu_check(image.as_ptr(), ptr::null(), ptr::null_mut(), 0, Some(panics), ptr::null_mut());
        assert_eq!(stopped, -libc::ECANCELED, "{}", said());
    }
}
