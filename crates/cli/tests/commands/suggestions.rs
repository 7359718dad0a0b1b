//! Names that were probably meant.

use crate::common::{Scratch, words};

#[test]
fn messages_about_unknown_names_say_which_was_meant() {
    let scratch = Scratch::new();
    for image in ["a.qcow2", "b.qcow2"] {
        scratch.zebu(&["create", "-q", image, "1M"]).ok();
    }
    for line in ["snapshot -c before a.qcow2", "snapshot -c after a.qcow2", "bitmap --add b.qcow2 nightly"] {
        scratch.zebu(&words(line)).ok();
    }
    for (line, meant) in [
        ("snapshot -a befor a.qcow2", "did you mean 'before'?"),
        ("snapshot -d xyz a.qcow2", "there are 'before', 'after'"),
        ("convert -l aftr a.qcow2 out.raw", "did you mean 'after'?"),
        ("bitmap --clear b.qcow2 nightli", "did you mean 'nightly'?"),
        ("bitmap --merge nihtly b.qcow2 nightly", "did you mean 'nightly'?"),
        ("create -f qcow2 -o clster_size=64k c.qcow2 1M", "did you mean 'cluster_size'?"),
        ("convert -O vmdk -o subfromat=flat a.qcow2 b.vmdk", "did you mean 'subformat'?"),
        ("convert -O qcow -o x=y a.qcow2 b", "qcow"),
        ("snaphot a.qcow2", "did you mean 'snapshot'?"),
        ("info --ouput json a.qcow2", "did you mean '--output'?"),
        ("help formts", "did you mean 'formats'?"),
        ("shrink a.qcow2", "see 'zebu help tasks'"),
        ("points backups", "did you mean 'store:backups'?"),
        ("restore a.qcow2 c.qcow2", "`zebu convert`"),
        ("create 10G c.qcow2", "`zebu create c.qcow2 10G`"),
        ("backup a.qcow2 a.qcow2", "'a.qcow2' is the source"),
        ("io a.qcow2 write", "usage: zebu io [-c COMMAND]..."),
        ("ctl a.ctl backup-start store:backups/a", "--to store:backups/a"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[meant]);
    }
    let link = scratch.file("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), &link).unwrap();
    let as_qemu = scratch.run(link.to_str().unwrap(), &words("snapshot -a befor a.qcow2"));
    assert!(as_qemu.code == Some(1) && !as_qemu.stderr.contains("mean"), "{as_qemu:#?}");
}
