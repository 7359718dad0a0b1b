//! Topics of `zebu help`: what several commands share.

use crate::arguments::{EngineArgs, ForceShareArg, ImageArgs};
use clap::CommandFactory;

/// A topic: its name, a line about it, and its text.
pub(crate) struct Topic {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) text: &'static str,
}

/// All topics.
pub(crate) const TOPICS: [Topic; 8] = [
    Topic {
        name: "options",
        about: "options that most commands have",
        text: "Options that most commands have; `zebu COMMAND --help` says which a command has:",
    },
    Topic {
        name: "names",
        about: "what the name of a disk can be",
        text: "\
A disk is named by

  PATH                           a file, or a block device
  http://..., https://...        a file on a web server
  s3://BUCKET/KEY                an object in S3 or its kin; gs:// and az:// likewise
  nbd://HOST[:PORT]/EXPORT       an export of an NBD server
  nbd+unix:///EXPORT?socket=PATH
  rbd:POOL/IMAGE                 an image of Ceph
  json:{\"driver\":...}            a description, as QEMU writes it
  --image-opts driver=...        the same as key=value pairs

Remote disks are read lazily where the server has ranges. `-` is standard input or output where a disk is read or
written once; `./-` is the file of that name.",
    },
    Topic {
        name: "formats",
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
        name: "references",
        about: "which files an image may have opened",
        text: "\
An image can name others: its backing file, a data file, extents. --allow-refs says which of them may be opened:

  local        plain paths in the directory of the image that names them (the default)
  dir=PATH     and those below PATH
  prefix=URL   and URLs that begin so
  all          everything
  none         nothing

`zebu info` opens none of them. `zebu info --tree` shows which are there, and which are refused.
`zebu info --verdict` says whether an image can be handed to a tool that trusts it.",
    },
    Topic {
        name: "caches",
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
        about: "what the exit code of a command says",
        text: "\
  0     done
  1     failed, or the command line is wrong
  130   stopped by SIGINT, SIGTERM or SIGHUP; files that were made are removed

  check            1 not checked, 2 errors, 3 leaks only, 63 the format has no checks
  compare          1 different, 2 can't be opened, 3 allocation can't be looked up, 4 can't be read
  verify           2 some clusters can't be read, or differ from the manifest
  info --verdict   2 the image is not safe to hand on",
    },
    Topic {
        name: "secrets",
        about: "how keys and passwords are given",
        text: "\
  --object secret,id=ID,file=PATH          a file that holds the secret
  --object secret,id=ID,data=TEXT          visible to everybody who lists processes
  --key-secret ID                          the key of an encrypted image that is opened
  -o encrypt.format=luks,encrypt.key-secret=ID   the key of a new one

At a terminal, a passphrase is asked for. Credentials of object stores come from the environment and from files, as
their own tools read them. No message shows a secret.",
    },
    Topic {
        name: "signals",
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

/// The list of topics.
pub(crate) fn list() -> String {
    let line = |topic: &Topic| format!("  {:<12} {}\n", topic.name, topic.about);
    let lines: String = TOPICS.iter().map(line).collect();
    format!("Topics of `zebu help TOPIC`:\n{lines}")
}
