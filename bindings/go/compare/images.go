package main

import (
	"fmt"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// made is an image, and the file that QEMU says its disk is.
type made struct {
	title string
	path  string
	raw   string
}

// recipe makes an image by QEMU's programs.
type recipe struct {
	title  string
	format string
	// options are those of -o.
	options []string
	// more are further arguments of qemu-img convert.
	more []string
	// then changes the image.
	then func(l lab, path string) error
}

// recipes are the images that readers are asked to read.
var recipes = []recipe{
	{title: "raw", format: "raw"},
	{title: "qcow2", format: "qcow2"},
	{title: "qcow2, compat=0.10", format: "qcow2", options: []string{"compat=0.10"}},
	{title: "qcow2, cluster_size=512", format: "qcow2", options: []string{"cluster_size=512"}},
	{title: "qcow2, cluster_size=4k", format: "qcow2", options: []string{"cluster_size=4k"}},
	{title: "qcow2, cluster_size=2M", format: "qcow2", options: []string{"cluster_size=2M"}},
	{title: "qcow2, extended_l2", format: "qcow2", options: []string{"extended_l2=on"}},
	{title: "qcow2, extended_l2, cluster_size=2M", format: "qcow2", options: []string{"extended_l2=on", "cluster_size=2M"}},
	{title: "qcow2, refcount_bits=1", format: "qcow2", options: []string{"refcount_bits=1"}},
	{title: "qcow2, refcount_bits=64", format: "qcow2", options: []string{"refcount_bits=64"}},
	{title: "qcow2, lazy_refcounts", format: "qcow2", options: []string{"lazy_refcounts=on"}},
	{title: "qcow2, preallocation=metadata", format: "qcow2", options: []string{"preallocation=metadata"}},
	{title: "qcow2, preallocation=full", format: "qcow2", options: []string{"preallocation=full"}},
	{title: "qcow2, zlib", format: "qcow2", more: []string{"-c"}},
	{title: "qcow2, zlib, cluster_size=4k", format: "qcow2", options: []string{"cluster_size=4k"}, more: []string{"-c"}},
	{title: "qcow2, zlib, cluster_size=2M", format: "qcow2", options: []string{"cluster_size=2M"}, more: []string{"-c"}},
	{title: "qcow2, zlib, extended_l2", format: "qcow2", options: []string{"extended_l2=on"}, more: []string{"-c"}},
	{title: "qcow2, zstd", format: "qcow2", options: []string{"compression_type=zstd"}, more: []string{"-c"}},
	{title: "qcow2, zstd, cluster_size=2M", format: "qcow2", options: []string{"compression_type=zstd", "cluster_size=2M"}, more: []string{"-c"}},
	{title: "qcow2, data_file", format: "qcow2", options: []string{"data_file=DATA"}},
	{title: "qcow2, data_file, data_file_raw", format: "qcow2", options: []string{"data_file=DATA", "data_file_raw=on"}},
	{title: "qcow2, LUKS", format: "qcow2", options: []string{"encrypt.format=luks", "encrypt.key-secret=key", "encrypt.iter-time=10"}},
	{title: "qcow2, AES", format: "qcow2", options: []string{"encrypt.format=aes", "encrypt.key-secret=key"}},
	{title: "qcow2 over raw", format: "qcow2", then: overlay("raw", "")},
	{title: "qcow2 over qcow2", format: "qcow2", then: overlay("qcow2", "")},
	{title: "qcow2 over VMDK", format: "qcow2", then: overlay("vmdk", "")},
	{title: "qcow2 over a shorter raw", format: "qcow2", then: overlay("raw", "shorter")},
	{title: "qcow2, snapshots and changes", format: "qcow2", then: snapshots},
	{title: "qcow2, zeroed and discarded", format: "qcow2", then: zeroed},
	{title: "qcow2, extended_l2, zeroed", format: "qcow2", options: []string{"extended_l2=on"}, then: zeroed},
	{title: "VMDK", format: "vmdk"},
	{title: "VMDK, streamOptimized", format: "vmdk", options: []string{"subformat=streamOptimized"}},
	{title: "VMDK, monolithicFlat", format: "vmdk", options: []string{"subformat=monolithicFlat"}},
	{title: "VMDK, twoGbMaxExtentSparse", format: "vmdk", options: []string{"subformat=twoGbMaxExtentSparse"}},
	{title: "VDI", format: "vdi"},
	{title: "VDI, static", format: "vdi", options: []string{"static=on"}},
	{title: "VHDX", format: "vhdx"},
	{title: "VHDX, fixed", format: "vhdx", options: []string{"subformat=fixed"}},
	{title: "VHD", format: "vpc", options: []string{"force_size=on"}},
	{title: "VHD, fixed", format: "vpc", options: []string{"subformat=fixed", "force_size=on"}},
}

// size is that of each disk, in bytes: not a multiple of the larger clusters.
const size = 9<<20 + 64<<10

// key opens encrypted images.
const key = "secret,id=key,data=zebra"

// lab is the folder of the images.
type lab struct{ dir string }

func (l lab) file(name string) string { return filepath.Join(l.dir, name) }

func tool(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// guest writes a disk of noise, text and holes.
func (l lab) guest(name string) error {
	disk := make([]byte, size)
	random := rand.New(rand.NewSource(55))
	for at := 0; at < size; at += 512 << 10 {
		part := disk[at:min(at+512<<10, size)]
		switch at / (512 << 10) % 4 {
		case 0:
			random.Read(part[:min(len(part), 300_000)])
		case 1:
			for i := range part {
				part[i] = byte("the quick brown fox "[i%20])
			}
		case 2:
			random.Read(part[len(part)/2:])
		}
	}
	return os.WriteFile(l.file(name), disk, 0o600)
}

// make makes the image of a recipe.
func (r recipe) make(l lab, number int) (made, error) {
	path := l.file(fmt.Sprintf("%02d.%s", number, r.format))
	args := append([]string{"convert", "-f", "raw", "-O", r.format, "--object", key}, r.more...)
	for _, option := range r.options {
		args = append(args, "-o", strings.Replace(option, "DATA", fmt.Sprintf("%s.data", path), 1))
	}
	if err := tool("qemu-img", append(args, l.file("guest"), path)...); err != nil {
		return made{}, err
	}
	if r.then != nil {
		if err := r.then(l, path); err != nil {
			return made{}, err
		}
	}
	source := []string{"-f", r.format, path}
	if strings.Contains(strings.Join(r.options, ","), "encrypt.") {
		source = []string{"--image-opts", "driver=qcow2,encrypt.key-secret=key,file.filename=" + path}
	}
	raw := path + ".raw"
	return made{title: r.title, path: path, raw: raw},
		tool("qemu-img", append(append([]string{"convert", "--object", key, "-O", "raw"}, source...), raw)...)
}

// overlay puts an image above a copy of the guest's disk in another format, and changes it.
func overlay(format, kind string) func(lab, string) error {
	return func(l lab, path string) error {
		base := path + ".base"
		if err := tool("qemu-img", "convert", "-f", "raw", "-O", format, l.file("guest"), base); err != nil {
			return err
		}
		if kind == "shorter" {
			if err := os.Truncate(base, size/2); err != nil {
				return err
			}
		}
		if err := tool("qemu-img", "create", "-f", "qcow2", "-b", base, "-F", format, path, fmt.Sprint(size)); err != nil {
			return err
		}
		return change(path)
	}
}

func change(path string) error {
	return tool("qemu-io", "-c", "write -P 7 100000 70000", "-c", "write -P 9 5000000 512", "-c", "write -z 700k 300k", path)
}

func snapshots(_ lab, path string) error {
	for _, name := range []string{"first", "second"} {
		if err := tool("qemu-img", "snapshot", "-c", name, path); err != nil {
			return err
		}
		if err := change(path); err != nil {
			return err
		}
	}
	return nil
}

func zeroed(_ lab, path string) error {
	return tool("qemu-io", "-d", "unmap", "-c", "write -z 0 1M", "-c", "write -z -u 2M 300k", "-c", "discard 4M 1M", "-c", "write -z 5000k 3k", path)
}
