//! The examples below the help of each command.

pub(crate) const ZEBU: &str = "\
Examples:
  zebu create disk.qcow2 20G
  zebu convert -p disk.raw disk.qcow2
  zebu check disk.qcow2

'zebu COMMAND --help' explains a command, 'zebu help topics' lists what commands share.";

pub(crate) const HELP: &str = "\
Examples:
  zebu help convert
  zebu help topics
  zebu help names";

pub(crate) const CREATE: &str = "\
Examples:
  zebu create disk.qcow2 20G
  zebu create -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
  zebu create -f qcow2 -o cluster_size=128k,extended_l2=on,preallocation=metadata disk.qcow2 100G
  zebu create -f qcow2 -o help disk.qcow2";

pub(crate) const INFO: &str = "\
Examples:
  zebu info disk.qcow2
  zebu info --output json --backing-chain overlay.qcow2
  zebu info --tree overlay.qcow2
  zebu info -U running.qcow2
  zebu info --verdict --output json upload.qcow2";

pub(crate) const CHECK: &str = "\
Examples:
  zebu check disk.qcow2
  zebu check -p --output json disk.qcow2
  zebu check -r leaks disk.qcow2";

pub(crate) const CONVERT: &str = "\
Examples:
  zebu convert -p disk.raw disk.qcow2
  zebu convert --force -c -O qcow2 disk.vmdk disk.img
  zebu convert -t none -T none -O raw disk.qcow2 /dev/vg0/disk
  zebu convert -n -O raw disk.qcow2 /dev/vg0/disk
  zebu convert -l before-update -O qcow2 disk.qcow2 old.qcow2
  zebu convert --bitmaps -O qcow2 disk.qcow2 copy.qcow2
  zebu convert --copy reflink -O qcow2 disk.raw disk.qcow2";

pub(crate) const MAP: &str = "\
Examples:
  zebu map disk.qcow2
  zebu map --picture disk.qcow2
  zebu map --picture --host --svg disk.svg disk.qcow2
  zebu map --output json --start-offset 1G --max-length 64M disk.qcow2";

pub(crate) const MEASURE: &str = "\
Examples:
  zebu measure -O qcow2 disk.raw
  zebu measure -O qcow2 -o cluster_size=1M --size 100G --output json";

pub(crate) const COMPARE: &str = "\
Examples:
  zebu compare disk.raw disk.qcow2
  zebu compare -s -f qcow2 -F qcow2 a.qcow2 b.qcow2";

pub(crate) const REBASE: &str = "\
Examples:
  zebu rebase -p -b new-base.qcow2 -F qcow2 overlay.qcow2
  zebu rebase -b '' overlay.qcow2
  zebu rebase -u -b moved/base.qcow2 -F qcow2 overlay.qcow2";

pub(crate) const COMMIT: &str = "\
Examples:
  zebu commit -p overlay.qcow2
  zebu commit -d overlay.qcow2
  zebu commit -b base.qcow2 top.qcow2";

pub(crate) const DD: &str = "\
Examples:
  zebu dd if=disk.qcow2 of=first-megabyte.raw bs=1M count=1
  zebu dd if=disk.raw of=rest.qcow2 bs=1M skip=1";

pub(crate) const AMEND: &str = "\
Examples:
  zebu amend -o compat=1.1 old.qcow2
  zebu amend -p -o refcount_bits=1 disk.qcow2
  zebu amend -o help";

pub(crate) const RESIZE: &str = "\
Examples:
  zebu resize disk.qcow2 40G
  zebu resize disk.qcow2 +10G
  zebu resize --shrink -f raw disk.raw -1G";

pub(crate) const SNAPSHOT: &str = "\
Examples:
  zebu snapshot -c before-update disk.qcow2
  zebu snapshot -l --output json disk.qcow2
  zebu snapshot -a before-update disk.qcow2
  zebu snapshot -d before-update disk.qcow2";

pub(crate) const BITMAP: &str = "\
Examples:
  zebu bitmap --add disk.qcow2 backup
  zebu bitmap --add --disable -g 1M disk.qcow2 frozen
  zebu bitmap --merge backup -b overlay.qcow2 -F qcow2 disk.qcow2 all
  zebu bitmap --remove disk.qcow2 backup
  zebu bitmap --remove-all disk.qcow2";

pub(crate) const CHECKPOINT: &str = "\
Examples:
  zebu checkpoint --bitmap monday root.qcow2 data.qcow2
  zebu checkpoint --bitmap monday --output json root.qcow2 data.qcow2";

pub(crate) const CLONE: &str = "\
Examples:
  zebu clone golden.qcow2 vm1.qcow2
  zebu clone --mode overlay golden.qcow2 vm2.qcow2";

pub(crate) const BENCH: &str = "\
Examples:
  zebu bench -t none -d 32 -c 1000000 --random disk.qcow2
  zebu bench -w -t none -d 32 --random=7 --runtime 30 --queues 2 disk.qcow2
  zebu bench -w --flush-interval 256 --output json disk.qcow2";

pub(crate) const IO: &str = "\
Examples:
  zebu io -c 'write -P 0xaa 0 64k' -c 'read -P 0xaa 0 64k' disk.qcow2
  zebu io -r -c map disk.qcow2
  zebu io -c help";

pub(crate) const SERVE: &str = "\
Examples:
  zebu serve --nbd unix:/run/vm1.sock -t none disk.qcow2
  zebu serve --nbd localhost:10809 --export-name root --export-name data root.qcow2 data.qcow2
  zebu serve --vhost-user-blk /run/vm1-disk.sock --queues 2 -t none disk.qcow2
  zebu serve --fuse /mnt/disk.raw disk.qcow2
  zebu serve --ublk=0 -t none disk.qcow2
  zebu serve --nbd unix:/run/old.sock --snapshot before-upgrade disk.qcow2
  zebu serve --config /etc/zebu/disks.toml";

pub(crate) const BACKUP: &str = "\
Examples:
  zebu backup disk.qcow2 monday.qcow2 --manifest monday.manifest
  zebu backup disk.qcow2 tuesday.qcow2 --manifest tuesday.manifest \\
      --previous monday.qcow2 --previous-manifest monday.manifest
  zebu backup disk.qcow2 wednesday.qcow2 --bitmap backup --previous tuesday.qcow2
  zebu backup -f raw --compression-type zstd --rate-limit 100M /dev/vg/lv lv.qcow2 --resume
  zebu backup disk.qcow2 store:/backups/vm1 --keep-daily 7 --keep-weekly 5";

pub(crate) const POINTS: &str = "\
Examples:
  zebu points store:/backups/vm1
  zebu points --output json store:s3://bucket/nightly/vm1";

pub(crate) const FORGET: &str = "\
Examples:
  zebu forget --prune --keep-daily 7 --keep-weekly 5 --keep-monthly 12 store:/backups/vm1
  zebu forget store:/backups/vm1@20261129T150102Z-7
  zebu forget --prune --break-lock store:s3://bucket/nightly/vm1";

pub(crate) const RESTORE: &str = "\
Examples:
  zebu restore store:/backups/vm1 disk.qcow2
  zebu restore store:/backups/vm1@20261129T150102Z-7 /dev/vg/lv
  zebu restore --force -O raw store:s3://bucket/nightly/vm1 disk.img";

pub(crate) const COMPACT: &str = "\
Examples:
  zebu compact store:/backups/vm1
  zebu compact --depth 1 store:s3://bucket/nightly/vm1";

pub(crate) const DELTA: &str = "\
Examples:
  zebu delta store:/backups/vm1@20261128T150101Z-6 store:/backups/vm1@20261129T150102Z-7
  zebu delta --output json monday.qcow2 tuesday.qcow2";

pub(crate) const PUSH: &str = "\
Examples:
  zebu push disk.qcow2 oci://registry.example/images/debian:12
  zebu push --as container-disk disk.qcow2 oci://registry.example/disks/debian:12
  zebu push --as raw-zstd disk.raw oci-layout:layout:v1";

pub(crate) const PULL: &str = "\
Examples:
  zebu pull oci://registry.example/images/debian:12 disk.qcow2
  zebu pull --mirror http://localhost:5000 oci://registry.example/images/debian:12 disk.qcow2
  zebu pull oci-layout:layout.tar:v1 disk.raw";

pub(crate) const VERIFY: &str = "\
Examples:
  zebu verify monday.qcow2
  zebu verify --manifest monday.manifest monday.qcow2
  zebu verify --output json store:/backups/vm1";

pub(crate) const ATTACH: &str = "\
Examples:
  zebu attach -f qcow2 disk.qcow2
  zebu attach -t none -f qcow2 disk.qcow2 /dev/ublkb3
  zebu attach --read-only old.qcow2 /dev/nbd0
  zebu attach --recover /dev/ublkb3";

pub(crate) const MOUNT: &str = "\
Examples:
  zebu mount disk.qcow2 /mnt/disk
  zebu mount --write --partition 1 -f qcow2 disk.qcow2 /mnt/disk";

pub(crate) const DEVICES: &str = "\
Examples:
  zebu devices
  zebu devices --output json";

pub(crate) const DETACH: &str = "\
Examples:
  zebu detach /dev/ublkb0
  zebu detach --force 3";

pub(crate) const INSTALL_NAMES: &str = "\
Examples:
  zebu install-names /opt/zebu/bin
  PATH=/opt/zebu/bin:$PATH qemu-img info disk.qcow2";

pub(crate) const TOP: &str = "\
Examples:
  zebu top /run/vm1.ctl
  zebu top --delay 5 /run/*.ctl
  zebu top --once --output json /run/vm1.ctl

Keys: q quits, s sorts by the next column, arrows and Page keys scroll.";

pub(crate) const CTL: &str = "\
Examples:
  zebu ctl /run/vm1.ctl stats
  zebu ctl /run/vm1.ctl resize +10G
  zebu ctl /run/vm1.ctl snapshot-create before-update
  zebu ctl /run/vm1.ctl backup-start -w -p --compression-type zstd monday.qcow2
  zebu ctl /run/vm1.ctl backup-start root data --to store:/backups/vm1 --keep-daily 7
  zebu ctl /run/vm1.ctl fork root --to vm1-monday.qcow2 --also data=vm1-data-monday.qcow2
  zebu ctl /run/vm1.ctl bitmap-add backup
  zebu ctl /run/vm1.ctl checkpoint root data --from sunday --bitmap monday --serve pull --until-idle
  zebu ctl /run/vm1.ctl limit root iops=2000,bps=200M,burst=500
  zebu ctl /run/vm1.ctl limit --group tenant iops=5000
  zebu ctl /run/vm1.ctl limit root group=tenant
  zebu ctl /run/vm1.ctl export-add -f qcow2 data /srv/data.qcow2
  zebu ctl /run/vm1.ctl jobs";

pub(crate) const CTL_BACKUP_START: &str = "\
Examples:
  zebu ctl /run/vm1.ctl backup-start -w -p --compression-type zstd monday.qcow2
  zebu ctl /run/vm1.ctl backup-start --to store:/backups/vm1 --spill /var/tmp/vm1.spill
  zebu ctl /run/vm1.ctl backup-start root data --to store:s3://bucket/nightly/vm1 --keep-daily 7 --output json";

pub(crate) const CTL_FORK: &str = "\
Examples:
  zebu ctl /run/vm1.ctl fork --to monday.qcow2
  zebu ctl /run/vm1.ctl fork root --to vm1-monday.qcow2 --also data=vm1-data-monday.qcow2
  zebu ctl /run/vm1.ctl fork --to monday.qcow2 --push store:s3://bucket/vm1 --rate 20M
  zebu ctl /run/vm1.ctl fork --to monday.qcow2 --push oci://registry.example/vm1:monday -w -p";
