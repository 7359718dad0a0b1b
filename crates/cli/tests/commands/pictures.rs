//! `zebu map --picture`.

use crate::common::{Scratch, words};

/// The rows within the frame.
fn rows(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|')).collect()
}

#[test]
fn parts_of_a_disk_are_where_they_are() {
    let scratch = Scratch::new();
    for line in [
        "create -q -f qcow2 base.qcow2 64M",
        "io -f qcow2 -c \"write -q 0 32M\" base.qcow2",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
        "io -f qcow2 -c \"write -q 0 16M\" -c \"write -q -z 32M 16M\" top.qcow2",
    ] {
        scratch.zebu(&shell_words(line)).ok();
    }
    let text = scratch.zebu(&words("map --picture top.qcow2")).ok().stdout;
    let all: String = rows(&text).concat();
    let quarter = all.len() / 4;
    for (number, expected) in ['#', '1', '.', ' '].into_iter().enumerate() {
        let part = &all[number * quarter..(number + 1) * quarter];
        assert!(part.chars().all(|cell| cell == expected), "{text}");
    }
    assert!(text.contains("  #   25.0 %  data in top.qcow2"), "{text}");
    assert!(text.contains("  1   25.0 %  data in base.qcow2"), "{text}");
    // Data that lies in order is a diagonal.
    let text = scratch.zebu(&words("map --picture --host -f qcow2 base.qcow2")).ok().stdout;
    let first: Vec<usize> = rows(&text).iter().filter_map(|row| row.find('#')).collect();
    assert!(first.len() >= 15 && first.is_sorted(), "{text}");
    let svg = scratch.zebu(&words("map --picture --svg - top.qcow2")).ok().stdout;
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{svg}");
    scratch.zebu(&words("map --picture --svg new.svg top.qcow2")).ok();
    assert_eq!(scratch.read("new.svg"), svg.as_bytes());
    // No file is replaced, least of all the image.
    scratch
        .zebu(&words("map --picture --svg base.qcow2 top.qcow2"))
        .fails_naming(1, &["base.qcow2", "File exists"]);
}

#[test]
fn compressed_disks_and_empty_ones() {
    let scratch = Scratch::new();
    std::fs::write(scratch.file("disk.raw"), vec![7; 4 << 20]).unwrap();
    scratch.zebu(&words("convert -c -f raw -O qcow2 disk.raw packed.qcow2")).ok();
    let text = scratch.zebu(&words("map --picture packed.qcow2")).ok().stdout;
    assert!(text.contains("  c  100.0 %  compressed in packed.qcow2"), "{text}");
    scratch.zebu(&words("create -q -f qcow2 empty.qcow2 0")).ok();
    scratch.zebu(&words("map --picture empty.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -o cluster_size=2M large.qcow2 16T")).ok();
    let text = scratch.zebu(&words("map --picture large.qcow2")).ok().stdout;
    assert!(text.contains("100.0 %  nothing (reads as zero)"), "{text}");
}

#[test]
fn options_of_pictures_need_a_picture() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for line in ["map --host a.qcow2", "map --svg x a.qcow2", "map --picture --output json a.qcow2"] {
        assert_eq!(scratch.zebu(&words(line)).code, Some(1), "{line}");
    }
}

/// Words of a line, in which quotes hold some together.
fn shell_words(line: &str) -> Vec<&str> {
    line.split('"')
        .enumerate()
        .flat_map(|(number, part)| match number % 2 {
            0 => part.split_whitespace().collect::<Vec<_>>(),
            _ => vec![part],
        })
        .collect()
}
