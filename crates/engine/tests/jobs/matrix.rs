//! Every job on every form of an image, against QEMU's tools.

use crate::support::{Images, assert_same_bytes, guest_bytes, json_number, on_worker, qemu_img, text, tool};
use crate::variants::{Variant, all};
use std::path::Path;
use zebu_engine::jobs::{
    ConvertOptions, ConvertTarget, JobControl, MapEntry, MapOptions, Mapper, NewTarget, convert,
    measure_image,
};
use zebu_engine::storage::Worker;
use zebu_engine::{CacheMode, Compression, CreateOptions, Format, Image, OpenOptions, Preallocation};

fn format_of(name: &str) -> Format {
    if name == "raw" { Format::Raw } else { Format::Qcow2 }
}

pub(crate) async fn open(worker: &Worker, path: &Path, format: &str) -> Image {
    let options = OpenOptions::default().format(Some(format_of(format)));
    Image::open(worker, path, &options).await.unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn new_target(path: &Path, create: &CreateOptions) -> ConvertTarget {
    ConvertTarget::New(Box::new(
        NewTarget::new(path.to_owned())
            .create(create.clone())
            .open(OpenOptions::default().cache(CacheMode::Unsafe)),
    ))
}

/// Converts a variant into a new image at `target`.
fn convert_to(variant: &Variant, target: &Path, create: &CreateOptions, options: &ConvertOptions) {
    on_worker(async |worker| {
        let source = open(worker, &variant.path, variant.format).await;
        convert(worker, &[source], new_target(target, create), options)
            .await
            .unwrap_or_else(|error| panic!("{}: {error}", variant.name));
    });
}

#[test]
fn every_form_converts_to_raw() {
    let images = Images::new();
    let target = images.path("target");
    for variant in all(&images, 1) {
        for requests in [1, 8] {
            let create = CreateOptions::default().format(Format::Raw);
            let options = ConvertOptions::default().requests(requests);
            convert_to(&variant, &target, &create, &options);
            assert_same_bytes(&std::fs::read(&target).unwrap(), &variant.bytes, &variant.name);
            std::fs::remove_file(&target).unwrap();
        }
    }
}

/// Ways to make a target.
fn targets(data_file: &Path) -> Vec<(&'static str, CreateOptions)> {
    let base = CreateOptions::default();
    vec![
        ("default", base.clone()),
        ("v2", base.clone().version(2)),
        ("512", base.clone().cluster_size(512).refcount_bits(1)),
        ("4K", base.clone().cluster_size(4096).refcount_bits(64)),
        ("2M", base.clone().cluster_size(2 << 20)),
        ("extended", base.clone().extended_l2(true)),
        ("zstd", base.clone().compression(Compression::Zstd)),
        ("metadata", base.clone().preallocation(Preallocation::Metadata)),
        ("full", base.clone().preallocation(Preallocation::Full)),
        ("larger", base.clone().size(Some(20 << 20))),
        ("external", base.clone().data_file(Some(text(data_file).into()))),
        ("external raw", base.data_file(Some(text(data_file).into())).data_file_raw(true)),
    ]
}

#[test]
fn every_form_converts_to_every_other_and_qemu_reads_it() {
    let images = Images::new();
    let (target, data) = (images.path("target"), images.path("target.data"));
    let variants = all(&images, 2);
    for (i, (name, create)) in targets(&data).iter().enumerate() {
        // Each target from some of the sources: all pairs occur over the years, none takes minutes.
        for variant in variants.iter().skip(i % 3).step_by(3) {
            let options = ConvertOptions::default().workers(1 + i % 2);
            convert_to(variant, &target, create, &options);
            let what = format!("{} to {name}", variant.name);
            let mut expected = variant.bytes.clone();
            expected.resize(create.size.map_or(expected.len(), |size| size as usize), 0);
            assert_same_bytes(&guest_bytes(&target, "qcow2"), &expected, &what);
            let check = tool("qemu-img", &["check", "-f", "qcow2", text(&target)]);
            let said = String::from_utf8_lossy(&check.stdout);
            assert!(check.status.success(), "{what}: {said}{}", String::from_utf8_lossy(&check.stderr));
            std::fs::remove_file(&target).unwrap();
            let _ = std::fs::remove_file(&data);
        }
    }
}

/// There and back again: the second target has the content of the source, whatever lies between.
#[test]
fn converting_back_gives_the_same_disk() {
    let images = Images::new();
    let (there, back) = (images.path("there"), images.path("back"));
    for variant in all(&images, 3) {
        for sparse_size in [0, 4096, 65536] {
            let options = ConvertOptions::default().sparse_size(sparse_size);
            convert_to(&variant, &there, &CreateOptions::default(), &options);
            let middle = Variant {
                name: variant.name.clone(),
                path: there.clone(),
                format: "qcow2",
                bytes: Vec::new(),
            };
            let raw = CreateOptions::default().format(Format::Raw);
            convert_to(&middle, &back, &raw, &options);
            assert_same_bytes(&std::fs::read(&back).unwrap(), &variant.bytes, &variant.name);
            for file in [&there, &back] {
                std::fs::remove_file(file).unwrap();
            }
        }
    }
}

/// The output of `qemu-img map`, but for one thing: where a subcluster is not allocated in a cluster that is, QEMU
/// gives the offset of bytes that nobody will read there. Here, what is not present has no offset.
fn parse_map(json: &str) -> Vec<MapEntry> {
    let flag = |line: &str, key: &str| line.contains(&format!("\"{key}\": true"));
    let mut entries: Vec<MapEntry> = Vec::new();
    for line in json.lines().filter(|line| line.contains("start")) {
        let present = flag(line, "present");
        let mut entry = MapEntry::default();
        entry.start = json_number(line, "start").unwrap();
        entry.length = json_number(line, "length").unwrap();
        entry.depth = json_number(line, "depth").unwrap() as u32;
        entry.present = present;
        entry.zero = flag(line, "zero");
        entry.data = flag(line, "data");
        entry.compressed = flag(line, "compressed");
        entry.offset = json_number(line, "offset").filter(|_| present);

        match entries.last_mut() {
            Some(last) if !last.present && !present && last.depth == entry.depth => {
                last.length += entry.length;
            }
            _ => entries.push(entry),
        }
    }
    entries
}

fn map(path: &Path, format: &str, options: MapOptions) -> Vec<MapEntry> {
    on_worker(async |worker| {
        let image = open(worker, path, format).await;
        let mut mapper = Mapper::new(&image, options);
        let mut entries = Vec::new();
        while let Some(entry) = mapper.map_next(worker).await.unwrap() {
            entries.push(entry);
        }
        entries
    })
}

#[test]
fn every_form_maps_as_qemu_img_says() {
    let images = Images::new();
    for variant in all(&images, 4) {
        let whole = qemu_img(&["map", "-f", variant.format, "--output", "json", text(&variant.path)]);
        let found = map(&variant.path, variant.format, MapOptions::default());
        assert_eq!(found, parse_map(&whole), "{}", variant.name);
        let args = ["map", "-f", variant.format, "--output", "json", "-s", "70000", "-l", "500000"];
        let part = qemu_img(&[&args[..], &[text(&variant.path)]].concat());
        let options = MapOptions::default().start(70000).max_length(Some(500_000));
        let found = map(&variant.path, variant.format, options);
        assert_eq!(found, parse_map(&part), "part of {}", variant.name);
    }
}

#[test]
fn every_form_measures_as_qemu_img_says() {
    let images = Images::new();
    let variants = all(&images, 5);
    qemu_img(&["bitmap", "--add", text(&images.path("plain6.qcow2")), "first"]);
    qemu_img(&["bitmap", "--add", "-g", "1M", text(&images.path("plain6.qcow2")), "second"]);
    let base = CreateOptions::default();
    for (options, create) in [
        ("cluster_size=64k", base.clone()),
        ("cluster_size=512", base.clone().cluster_size(512)),
        ("cluster_size=2M", base.clone().cluster_size(2 << 20)),
        ("extended_l2=on", base.clone().extended_l2(true)),
        ("compat=0.10", base.clone().version(2)),
        ("preallocation=full", base.clone().preallocation(Preallocation::Full)),
        ("backing_file=x,backing_fmt=raw", base.clone().backing(Some(("x".into(), Format::Raw)))),
    ] {
        for variant in &variants {
            let json = qemu_img(&[
                "measure",
                "-f",
                variant.format,
                "-O",
                "qcow2",
                "-o",
                options,
                "--output",
                "json",
                text(&variant.path),
            ]);
            let found = on_worker(async |worker| {
                let image = open(worker, &variant.path, variant.format).await;
                measure_image(worker, &image, &create, &JobControl::default()).await.unwrap()
            });
            let what = format!("{} for {options}", variant.name);
            assert_eq!(Some(found.required), json_number(&json, "required"), "{what}");
            assert_eq!(Some(found.fully_allocated), json_number(&json, "fully-allocated"), "{what}");
            assert_eq!(found.bitmaps, json_number(&json, "bitmaps"), "{what}");
        }
    }
}
