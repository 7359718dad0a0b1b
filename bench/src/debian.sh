# Makes a bootable Debian in $1: debian.raw (2 GiB, ext4 without partitions), vmlinuz and initrd.img.
set -e
home=$1
root=$home/root
rm -rf "$root"
debootstrap --variant=minbase --include=systemd-sysv,udev,linux-image-cloud-amd64,zstd,procps,iproute2,openssh-server \
    bookworm "$root" >"$home/debootstrap.log" 2>&1 || { tail -n 20 "$home/debootstrap.log" >&2; exit 1; }
printf '/dev/vda / ext4 defaults 0 1\n' >"$root/etc/fstab"
printf 'lazy\n' >"$root/etc/hostname"
# The machine has an identity before its first start, so that all starts do the same.
printf '%032d\n' 7 >"$root/etc/machine-id"
cat >"$root/etc/systemd/system/booted.service" <<'END'
[Unit]
Description=Says that the machine has started
After=multi-user.target ssh.service

[Service]
Type=oneshot
ExecStart=/bin/sh -c 'echo MACHINE-IS-BOOTED >/dev/ttyS0; sync; exec systemctl poweroff --force --force'

[Install]
WantedBy=graphical.target
END
mkdir -p "$root/etc/systemd/system/graphical.target.wants"
ln -s ../booted.service "$root/etc/systemd/system/graphical.target.wants/booted.service"
cp "$root"/boot/vmlinuz-* "$home/vmlinuz"
cp "$root"/boot/initrd.img-* "$home/initrd.img"
rm -f "$root"/var/cache/apt/archives/*.deb
rm -f "$home/new.raw"
truncate -s 2G "$home/new.raw"
mke2fs -q -t ext4 -d "$root" "$home/new.raw"
rm -rf "$root"
mv "$home/new.raw" "$home/debian.raw"
