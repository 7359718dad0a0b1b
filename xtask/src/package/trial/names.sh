# QEMU's names, from the repository of apt: beside qemu-utils, which the package takes the place of.
rm -f /etc/apt/sources.list.d/*
echo "deb [trusted=yes] file:/mnt/apt ./" >/etc/apt/sources.list
apt-get update -qq
apt-get install -y -qq --no-install-recommends zebu
qemu-img --version | grep -q "qemu-img version" || fail "qemu-utils is gone"
test ! -L /usr/bin/qemu-img || fail "the name qemu-img has changed"
apt-get install -y -qq --no-install-recommends zebu-qemu-utils
for name in qemu-img qemu-io qemu-nbd; do
    test "$(readlink /usr/bin/$name)" = zebu || fail "$name is not zebu"
done
if dpkg -s qemu-utils 2>/dev/null | grep -q '^Status: install ok'; then
    fail "qemu-utils is there, too"
fi
qemu-img create -q -f qcow2 /tmp/disk.qcow2 1M
qemu-io -c 'write 0 1M' /tmp/disk.qcow2
apt-get purge -y -qq zebu zebu-qemu-utils
test ! -e /usr/bin/qemu-img || fail "a name is left"
