# Debian's package: installed, used, replaced while it serves, removed.
package="/mnt/zebu_${VERSION}_$ARCH.deb"
dpkg --add-architecture "$ARCH"
remember
dpkg -i "$package"
is_there
serves_during dpkg -i "$package"
mkdir -p /etc/zebu
cat >/etc/zebu/disk.toml <<'END'
[server]
nbd = ["unix:/run/zebu/disks.sock"]
control = "/run/zebu/disks.ctl"

[[exports]]
name = "disk"
file = "/var/lib/zebu/disk.qcow2"
format = "qcow2"
END
is_served_by zebu-serve@.service /run/zebu/disks.sock
rm -r /etc/zebu
dpkg --purge zebu
images_stay
dpkg -i "$package"
dpkg --purge zebu
nothing_is_left

# A system without systemd.
mkdir /tmp/away
mv /usr/bin/systemd-sysusers /usr/bin/systemd-tmpfiles /tmp/away/
dpkg -i "$package"
test "$(stat -c '%U %G %a' /var/lib/zebu /run/zebu | xargs)" = "zebu zebu 750 zebu zebu 755" || fail "no folders without systemd"
dpkg --purge zebu
mv /tmp/away/* /usr/bin/
nothing_is_left
