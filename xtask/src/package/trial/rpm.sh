# The packages of RPM are in. The system's own programs of QEMU's are not.
is_there
for name in qemu-img qemu-io qemu-nbd; do
    test "$(readlink /usr/bin/$name)" = zebu || fail "$name is not zebu"
done
serves_during true
