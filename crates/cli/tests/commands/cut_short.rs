//! Sources whose file has lost its last part: no job passes on zeroes for what was there.

use crate::common::{Scratch, noise, qemu, words};

const MIB: usize = 1 << 20;

/// Removes the last `len` bytes of a file.
fn cut(scratch: &Scratch, name: &str, len: usize) {
    let whole = scratch.read(name);
    scratch.write(name, &whole[..whole.len() - len]);
}

/// An image of 4 MiB that lacks its last one, an overlay of it, and a whole image of the same disk.
fn images(scratch: &Scratch) {
    scratch.write("disk", &noise(3, 4 * MIB));
    scratch.zebu(&words("convert -f raw -O qcow2 disk whole.qcow2")).ok();
    scratch.zebu(&words("convert -f raw -O qcow2 disk cut.qcow2")).ok();
    // Refcounts lie behind the data, in a cluster.
    cut(scratch, "cut.qcow2", MIB + (64 << 10));
    scratch.zebu(&words("create -q -f qcow2 -b cut.qcow2 -F qcow2 top.qcow2")).ok();
}

#[test]
fn every_job_refuses_them() {
    let scratch = Scratch::new();
    images(&scratch);
    for (name, code, commands) in [
        (
            "cut.qcow2",
            1,
            [
                "convert -O qcow2 SOURCE out",
                "convert -O raw -W SOURCE out",
                "convert -O qcow2 -c SOURCE out",
                "convert -O qcow2 -S 0 SOURCE out",
                "dd -O raw bs=64k if=SOURCE of=out",
                "backup SOURCE out",
            ]
            .as_slice(),
        ),
        ("cut.qcow2", 3, &["compare SOURCE whole.qcow2", "compare whole.qcow2 SOURCE"]),
    ] {
        for command in commands {
            for source in [name, "top.qcow2"] {
                let ran = scratch.zebu(&words(&command.replace("SOURCE", source)));
                // The file that was cut is named, not the overlay.
                ran.fails_naming(code, &["cut.qcow2", "was cut short"]);
                assert!(!scratch.file("out").exists(), "{command}");
            }
        }
    }
    scratch.zebu(&words("rebase -b whole.qcow2 -F qcow2 top.qcow2")).fails_naming(1, &["was cut short"]);
}

#[test]
fn a_commit_leaves_the_base_as_it_is() {
    let scratch = Scratch::new();
    scratch.write("disk", &noise(3, MIB));
    scratch.zebu(&words("convert -f raw -O qcow2 disk base.qcow2")).ok();
    scratch.zebu(&words("create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2")).ok();
    scratch.write("other", &noise(4, MIB));
    scratch.zebu(&words("convert -n -f raw -O qcow2 other top.qcow2")).ok();
    cut(&scratch, "top.qcow2", MIB / 2);
    scratch.zebu(&words("commit top.qcow2")).fails_naming(1, &["top.qcow2", "was cut short"]);
    scratch.zebu(&words("convert -O raw base.qcow2 after")).ok();
    let (before, other, after) = (scratch.read("disk"), scratch.read("other"), scratch.read("after"));
    for (at, cluster) in after.chunks(65536).enumerate() {
        let range = at * 65536..(at + 1) * 65536;
        assert!(cluster == &before[range.clone()] || cluster == &other[range], "cluster {at}");
    }
}

#[test]
fn an_external_data_file_is_looked_at() {
    let scratch = Scratch::new();
    scratch.write("disk", &noise(3, MIB));
    scratch.zebu(&words("convert -f raw -O qcow2 disk base.qcow2")).ok();
    scratch.write("other", &noise(4, MIB));
    for kind in ["off", "on"] {
        let (image, data) = (&format!("raw-{kind}.qcow2"), &format!("data-{kind}"));
        let create = format!("create -q -f qcow2 -o data_file={data},data_file_raw={kind} {image} 1M");
        scratch.zebu(&words(&create)).ok();
        scratch.zebu(&words(&format!("convert -n -f raw -O qcow2 other {image}"))).ok();
        scratch.zebu(&words(&format!("compare -f qcow2 -F raw {image} other"))).ok();
        cut(&scratch, data, MIB / 2);
        for command in ["convert -O qcow2 IMAGE out", "backup IMAGE out", "dd -O raw bs=64k if=IMAGE of=out"]
        {
            let ran = scratch.zebu(&words(&command.replace("IMAGE", image)));
            ran.fails_naming(1, &[data, "was cut short"]);
            assert!(!scratch.file("out").exists(), "{command}");
        }
    }
    // A raw data file allows no backing file.
    scratch.zebu(&words("create -q -f qcow2 -o data_file=data -b base.qcow2 -F qcow2 top.qcow2")).ok();
    scratch.zebu(&words("convert -n -f raw -O qcow2 other top.qcow2")).ok();
    cut(&scratch, "data", MIB / 2);
    scratch.zebu(&words("commit top.qcow2")).fails_naming(1, &["data", "was cut short"]);
    scratch.zebu(&words("convert -O raw base.qcow2 after")).ok();
    assert_eq!(scratch.read("after")[MIB / 2..], scratch.read("disk")[MIB / 2..]);
}

#[test]
fn what_is_left_can_be_salvaged() {
    let scratch = Scratch::new();
    images(&scratch);
    let content = scratch.read("disk");
    for source in ["cut.qcow2", "top.qcow2"] {
        for target in ["raw", "qcow2"] {
            let line = format!("convert --salvage --output json -O {target} {source} out");
            let report = scratch.zebu(&words(&line)).ok().json();
            assert_eq!(report["unreadable"], MIB, "{report}");
            let mut expected = content.clone();
            for range in report["unreadable-ranges"].as_array().unwrap() {
                let [start, len] = ["start", "length"].map(|key| range[key].as_u64().unwrap() as usize);
                expected[start..start + len].fill(0);
            }
            scratch.zebu(&words(&format!("convert -f {target} -O raw out left"))).ok();
            assert!(scratch.read("left") == expected);
            std::fs::remove_file(scratch.file("out")).unwrap();
        }
        let report = scratch.zebu(&words(&format!("backup --skip-errors --output json {source} out")));
        assert_eq!(report.json()["unreadable"], MIB, "{report:?}");
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

/// A file that ends within its last cluster has lost nothing: QEMU leaves such files.
#[test]
fn the_last_cluster_may_be_short() {
    let scratch = Scratch::new();
    let mut content = noise(3, MIB);
    content.chunks_mut(65536).for_each(|cluster| cluster[32768..].fill(0));
    scratch.write("disk", &content);
    scratch.zebu(&words("convert -f raw -O qcow2 -S 0 disk image.qcow2")).ok();
    assert!(scratch.read("image.qcow2").ends_with(&[0; 4096]));
    cut(&scratch, "image.qcow2", 4096);
    scratch.zebu(&words("convert -O raw image.qcow2 out")).ok();
    assert!(scratch.read("out") == scratch.read("disk"));
}

/// Bytes that a stream lost may be zeroes that its codec takes: only its place tells.
#[test]
fn compressed_clusters_are_refused_as_well() {
    let scratch = Scratch::new();
    let mut content = vec![b'x'; 2 * MIB];
    content[MIB..].copy_from_slice(&noise(3, MIB));
    scratch.write("disk", &content);
    for method in ["zstd", "zlib"] {
        let line =
            format!("convert -W -f raw -O qcow2 -c -o cluster_size=2M,compression_type={method} disk image");
        scratch.zebu(&words(&line)).ok();
        let whole = scratch.read("image");
        // The file is as long as its last stream, or a whole cluster.
        let end = whole.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        for missing in [600, 2000, 5000, 9000] {
            scratch.write("image", &whole[..end - missing]);
            scratch.zebu(&words("convert -O raw image out")).fails_naming(1, &["image", "was cut short"]);
            let report = scratch.zebu(&words("verify --output json image"));
            assert_eq!((report.code, &report.json()["bad"]), (Some(2), &(2 * MIB).into()), "{report:?}");
        }
        std::fs::remove_file(scratch.file("image")).unwrap();
    }
}

#[test]
fn images_of_other_programs_are_refused_as_well() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("disk", &noise(3, 16 * MIB));
    for (format, options) in [
        ("vdi", ""),
        ("vhdx", ""),
        ("vmdk", ""),
        ("vmdk", "-o subformat=monolithicFlat"),
        ("vpc", ""),
        ("qcow", ""),
        ("qed", ""),
        ("parallels", ""),
    ] {
        scratch.qemu_img(&words(&format!("convert -f raw -O {format} {options} disk image"))).ok();
        let data = if options.is_empty() { "image" } else { "image-flat" };
        scratch.zebu(&words(&format!("convert -f {format} -O raw image out"))).ok();
        std::fs::remove_file(scratch.file("out")).unwrap();
        cut(&scratch, data, 5 * MIB);
        let ran = scratch.zebu(&words(&format!("convert -f {format} -O raw image out")));
        assert_eq!(ran.code, Some(1), "{format} {options}: {ran:?}");
        assert!(!scratch.file("out").exists());
    }
}
