//! Topics of `zebu help`: what several commands share.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use clap::CommandFactory;

/// A topic: its name, other words that lead to it, a line about it, and its text.
pub(crate) struct Topic {
    pub(crate) name: &'static str,
    also: &'static [&'static str],
    pub(crate) about: &'static str,
    pub(crate) text: &'static str,
}

/// All topics.
pub(crate) const TOPICS: [Topic; 15] = [
    Topic {
        name: "tasks",
        also: &[
            "task", "shrink", "compress", "grow", "extend", "expand", "import", "export", "copy", "cp", "revert",
            "rollback", "undo", "files", "ls", "list", "unmount", "umount", "repair", "fsck", "diff", "delete",
            "remove", "rm", "version", "share", "show", "status",
        ],
        about: "which command does what",
        text: "\
Which command does what:

  what is it?                 zebu info disk.qcow2; zebu info --tree disk.qcow2; zebu map --picture disk.qcow2
  another format              zebu convert disk.vmdk disk.qcow2
  a smaller file              zebu convert -c disk.qcow2 small.qcow2
  a larger or smaller disk    zebu resize disk.qcow2 +10G; zebu resize --shrink disk.qcow2 10G
  the files on it             zebu mount disk.qcow2 /mnt, until Ctrl-C or umount /mnt
  a copy to try things on     zebu clone disk.qcow2 try.qcow2
  a snapshot, and back to it  zebu snapshot -c NAME disk.qcow2; zebu snapshot -a NAME disk.qcow2
  a snapshot less             zebu snapshot -d NAME disk.qcow2
  a backup each night         zebu backup disk.qcow2 store:DIR/NAME --keep-daily 7
  a night back                zebu points store:DIR/NAME; zebu restore store:DIR/NAME@POINT disk.qcow2
  a night less                zebu forget --prune store:DIR/NAME@POINT
  for a virtual machine       zebu serve --nbd unix:disk.sock disk.qcow2
  what servers do             zebu top /run/zebu/*.ctl; zebu ctl SOCKET --help
  what differs                zebu compare a.qcow2 b.qcow2
  repair                      zebu check -r all disk.qcow2
  the version                 zebu --version",
    },
    Topic {
        name: "options",
        also: &[],
        about: "options that most commands have",
        text: "Options that most commands have; `zebu COMMAND --help` says which a command has:",
    },
    Topic {
        name: "names",
        also: &["name", "nbd", "nbds", "http", "https", "rbd", "ceph", "json", "file"],
        about: "what the name of a disk can be",
        text: "\
A disk is named by

  PATH                           a file, or a block device
  http://..., https://...        a file on a web server
  s3://BUCKET/KEY                an object in S3 or a compatible store; gs:// and az:// likewise
  nbd://HOST[:PORT]/EXPORT       an export of an NBD server
  nbd+unix:///EXPORT?socket=PATH
  rbd:POOL/IMAGE                 an image of Ceph
  oci://REGISTRY/NAME[:TAG]      an image of a registry; oci-layout:PATH[:TAG] of a layout here
  store:DIR/NAME[@POINT]         a point in time of a store; store:s3://BUCKET/PREFIX/NAME likewise
  json:{\"driver\":...}            a description, as QEMU writes it
  --image-opts driver=...        the same as key=value pairs

Remote disks are read lazily where the server has ranges. `-` is standard input or output where a disk is read or
written once; `./-` is the file of that name.",
    },
    Topic {
        name: "formats",
        also: &["format", "qcow2", "raw", "vmdk", "vhdx", "vhd", "vpc", "vdi", "qed", "parallels", "cloop", "dmg"],
        about: "which formats are read and made",
        text: "\
Read and made:   qcow2 raw luks vmdk vhdx vpc vdi
Read only:       qed parallels qcow cloop dmg

`convert` and `backup` also take files packed by gzip, bzip2, xz, zstd or lz4, tar files, and appliances (OVA).

Without -f, the format of an image that exists is probed; a disk that looks raw is then opened for reading only. The
format of a new file follows its suffix (.qcow2 .raw .img .vmdk .vhdx .vhd .vdi), or is given by -f or -O. A file that
exists and is not empty is replaced only with --force.",
    },
    Topic {
        name: "store",
        also: &["stores", "points-in-time"],
        about: "points in time of a disk (store:)",
        text: "\
A store keeps points in time of one disk, in a folder or in an object store:

  store:DIR/NAME                    here
  store:s3://BUCKET/PREFIX/NAME     in S3 or a compatible store; gs:// and az:// likewise
  store:DIR/NAME@POINT              one point; without @POINT the newest

  zebu backup disk.qcow2 store:/backups/vm1 --bitmap nightly --keep-daily 7
  zebu points store:/backups/vm1
  zebu restore store:/backups/vm1 disk.qcow2
  zebu verify store:/backups/vm1
  zebu ctl /run/vm1.ctl backup-start root data --to store:/backups/vm1

The first backup makes the store. `forget` removes points by rules, `compact` merges layers, `delta` compares two
points. `serve`, `convert` and others read a point as they read any disk.",
    },
    Topic {
        name: "oci",
        also: &["oci-layout", "registry", "registries"],
        about: "images of registries (oci://, oci-layout:)",
        text: "\
A disk can be an image of an OCI registry, or of a layout on this machine:

  oci://REGISTRY[:PORT]/NAME[:TAG]      the image that the tag leads to now (without one: latest)
  oci://REGISTRY[:PORT]/NAME@DIGEST     always the same image
  oci-layout:PATH[:TAG]                 of a folder or a tar file

  zebu pull oci://registry.example/images/debian:12 disk.qcow2
  zebu push disk.qcow2 oci://registry.example/images/debian:12
  zebu convert -O qcow2 oci://registry.example/images/debian:12 disk.qcow2

Credentials are those of the tools of registries (auth.json, config.json). --mirror names another server first,
--plain-http one without TLS, --platform and --oci-disk choose among several disks.",
    },
    Topic {
        name: "object-stores",
        also: &["s3", "gs", "az", "google", "azure"],
        about: "objects in S3, Google and Azure (s3://, gs://, az://)",
        text: "\
An object in a store can be a disk:

  s3://BUCKET/KEY      in S3, or in a server with the same protocol (AWS_ENDPOINT_URL)
  gs://BUCKET/KEY      in Google's
  az://CONTAINER/KEY   in Azure

They are read lazily, and written by `convert` and `backup`. Credentials come from the environment and the files of the
stores' own tools (AWS_PROFILE, ~/.aws and others).",
    },
    Topic {
        name: "packed",
        also: &["gz", "gzip", "bzip2", "xz", "zstd", "lz4", "tar", "ova", "appliances"],
        about: "packed files, tar files and appliances",
        text: "\
`convert` and `backup` unpack their sources: gzip, bzip2, xz, zstd and lz4, tar files, and appliances (OVA).

  --member NAME     a part of a tar file or an appliance with several
  --max-size SIZE   the most bytes that a packed file may hold

  zebu convert disk.raw.xz disk.qcow2
  zebu convert --member disk2.vmdk appliance.ova disk.qcow2",
    },
    Topic {
        name: "serving",
        also: &["vhost-user-blk", "fuse", "ublk"],
        about: "how virtual machines and other programs use a disk",
        text: "\
`zebu serve` opens a disk for others, in one of these ways or several:

  --nbd unix:PATH, --nbd HOST:PORT   for QEMU, nbd-client, libnbd
  --vhost-user-blk PATH              for monitors that speak vhost-user
  --fuse PATH                        as a file
  --ublk                             as a block device of this machine (`zebu attach`, `zebu mount`)

  zebu serve --nbd unix:disk.sock --control disk.ctl -f qcow2 disk.qcow2
  zebu ctl disk.ctl stats
  zebu top disk.ctl

`ready` on standard output says that clients can connect.",
    },
    Topic {
        name: "qemu",
        also: &["qemu-img", "qemu-io", "qemu-nbd"],
        about: "zebu in the place of qemu-img, qemu-io and qemu-nbd",
        text: "\
Called by the name of QEMU's program, zebu behaves as that program does: its options, its messages, its exit codes.

  zebu install-names ~/bin          makes the links
  PATH=~/bin:$PATH qemu-img info disk.qcow2

Under its own name, zebu takes the format of a new file from its suffix, and replaces no file without --force. Of the
files that an image names, it opens only those that --allow-refs allows. Under QEMU's names it has none of these
options.",
    },
    Topic {
        name: "references",
        also: &["allow-refs"],
        about: "which files that an image names may be opened",
        text: "\
An image can name others: its backing file, a data file, extents. --allow-refs says which of them may be opened:

  local        plain paths in the directory of the image that names them (the default)
  dir=PATH     and those below PATH
  prefix=URL   and URLs that begin so
  all          everything
  none         nothing

`zebu info` opens none of them. `zebu info --tree` shows which are there, and which are refused.
`zebu info --verdict` says whether an image is safe for a tool that trusts it.",
    },
    Topic {
        name: "caches",
        also: &["cache"],
        about: "which cache modes there are, and what is the default",
        text: "\
-t of the image that is changed, -T of the one that is read:

  none           past the page cache (O_DIRECT)
  writeback      through the page cache; a flush makes data durable
  writethrough   each write is durable when it is done
  directsync     both: past the page cache, each write durable
  unsafe         flushes are not passed on: for images that can be made again

By default, jobs that copy go past the page cache where the file system can. With -v, a command says what it chose.
The mapping of an image is cached in --cache-size bytes.",
    },
    Topic {
        name: "exit-codes",
        also: &["exit"],
        about: "what the exit code of a command says",
        text: "\
Every command:

  0     done
  1     failed, or the command line is wrong
  130   stopped by SIGINT, SIGTERM or SIGHUP; files that were made are removed

  check            1 not checked, 2 errors, 3 leaks only, 63 the format has no checks
  compare          1 different, 2 can't be opened, 3 allocation can't be looked up, 4 can't be read
  verify           2 some clusters can't be read, or differ from the manifest
  info --verdict   2 the image is not safe for a tool that trusts it",
    },
    Topic {
        name: "secrets",
        also: &["secret", "luks", "encryption"],
        about: "how keys and passwords are given",
        text: "\
Keys and passwords are objects, which other options name:

  --object secret,id=ID,file=PATH          a file that holds the secret
  --object secret,id=ID,data=TEXT          visible to everybody who lists processes
  --key-secret ID                          the key of an encrypted image that is opened
  -o encrypt.format=luks,encrypt.key-secret=ID   the key of a new one

At a terminal, a passphrase is asked for. Credentials of object stores come from the environment and from files, as
their own tools read them. No message shows a secret.",
    },
    Topic {
        name: "signals",
        also: &["signal"],
        about: "what signals do to a command",
        text: "\
SIGINT, SIGTERM and SIGHUP stop a job when its requests in flight have completed. A second SIGINT or SIGTERM more than
a second later ends it at once. No unfinished file stays, except the parts of a backup that --resume continues.

A server ends by SIGTERM or SIGINT: it finishes the requests under way, flushes, and closes its images. SIGUSR1 prints
how far a job is.",
    },
];

/// Options that commands share, described once.
#[derive(Debug, clap::Parser)]
#[command(disable_help_flag = true, help_template = "{options}")]
struct Shared {
    #[command(flatten)]
    force_share: ForceShareArg,
    #[command(flatten)]
    image: ImageArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// The topic of options.
pub(crate) fn options() -> String {
    let intro = TOPICS.iter().find(|topic| topic.name == "options").map_or("", |topic| topic.text);
    format!("{intro}\n\n{}\n", Shared::command().render_long_help().to_string().trim_end())
}

/// The topic that a word leads to: its name, a word for it, or the beginning of names of disks (`s3://`).
pub(crate) fn find(word: &str) -> Option<&'static Topic> {
    let word = word.trim_end_matches(['/', ':']).to_ascii_lowercase();
    TOPICS.iter().find(|topic| topic.name == word || topic.also.contains(&word.as_str()))
}

/// The list of topics.
pub(crate) fn list() -> String {
    let line = |topic: &Topic| format!("  {:<14} {}\n", topic.name, topic.about);
    let lines: String = TOPICS.iter().map(line).collect();
    format!("Topics of `zebu help TOPIC`:\n{lines}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_leads_to_one_topic() {
        let words: Vec<&str> = TOPICS
            .iter()
            .flat_map(|topic| std::iter::once(topic.name).chain(topic.also.iter().copied()))
            .collect();
        for word in &words {
            assert_eq!(words.iter().filter(|other| *other == word).count(), 1, "{word}");
        }
        for (word, name) in
            [("store:", "store"), ("oci://", "oci"), ("S3", "object-stores"), ("nbd+unix", "")]
        {
            assert_eq!(find(word).map_or("", |topic| topic.name), name, "{word}");
        }
    }
}
