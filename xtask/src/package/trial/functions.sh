# Functions of the trials, in a clean Debian. VERSION is the release's, EMULATOR the program that runs another machine's, or empty.
set -eu
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

fail() {
    echo "trial: $1" >&2
    exit 1
}

zebu() {
    $EMULATOR /usr/bin/zebu "$@"
}

# All files, without databases of packages, caches, logs, and copies of the lists of users.
files() {
    find / \( -path /proc -o -path /dev -o -path /sys -o -path /mnt -o -path /tmp -o -path /root -o -path /var/cache \
        -o -path /var/log -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/lib/dnf -o -path /var/lib/rpm \) \
        -prune -o -print | grep -v -e '^/etc/[a-z]*-$' -e '^/etc/.pwd.lock$' | sort
    cat /etc/passwd /etc/group
}

remember() {
    # QEMU is the client: a server is judged by another's.
    test -e /opt/qemu-io || cp /usr/bin/qemu-io /opt/qemu-io
    files >/tmp/before
}

nothing_is_left() {
    files >/tmp/after
    diff /tmp/before /tmp/after >&2 || fail "something is left behind"
}

is_there() {
    zebu --version | grep -F "$VERSION" || fail "no version"
    man zebu | grep -q SYNOPSIS || fail "no page zebu(1)"
    man zebu-serve | grep -q -e --nbd || fail "no page zebu-serve(1)"
    bash -c '. /usr/share/bash-completion/bash_completion; _completion_loader zebu; COMP_WORDS=(zebu conv) COMP_CWORD=1
        _zebu zebu conv zebu; printf "%s\n" "${COMPREPLY[@]}"' | grep -qx convert || fail "bash completes nothing"
    grep -q compdef /usr/share/zsh/*/_zebu || fail "no completions for zsh"
    grep -q 'complete -c zebu' /usr/share/fish/vendor_completions.d/zebu.fish || fail "no completions for fish"
    test "$(stat -c '%U %G %a' /var/lib/zebu /run/zebu | xargs)" = "zebu zebu 750 zebu zebu 755" || fail "no folders of the user"
}

# The value of a key in a unit, for the image disk.qcow2.
of_unit() {
    sed -n "s/^$2=//p" "/usr/lib/systemd/system/$1" | sed 's/%i/disk/g'
}

# Serves a disk as the unit has it, by its user, when the first client comes. While it runs, "$@" is done.
serves_during() {
    socket=$(of_unit zebu-nbd@.socket ListenStream)
    user=$(of_unit zebu-nbd@.service User)
    as_user="setpriv --reuid=$user --regid=$user --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    test -e /var/lib/zebu/disk.qcow2 || $as_user $EMULATOR /usr/bin/zebu create -q -f qcow2 /var/lib/zebu/disk.qcow2 64M
    systemd-socket-activate --listen="$socket" $as_user $EMULATOR $(of_unit zebu-nbd@.service ExecStart) &
    server=$!
    until test -S "$socket"; do
        kill -0 $server || fail "the server has ended"
    done
    # One connection: the socket is passed once.
    mkfifo /tmp/commands
    /opt/qemu-io -f raw "nbd+unix:///?socket=$socket" </tmp/commands >/tmp/said &
    client=$!
    exec 7>/tmp/commands
    echo 'write -P 7 1M 1M' >&7
    until grep -q wrote /tmp/said; do
        kill -0 $client || fail "the client has ended: $(cat /tmp/said)"
    done
    "$@"
    kill -0 $server || fail "the server has ended during: $*"
    printf 'read -P 7 1M 1M\nquit\n' >&7
    exec 7>&-
    wait $client || fail "the client says: $(cat /tmp/said)"
    grep -q 'read 1048576' /tmp/said && ! grep -q 'verification failed' /tmp/said || fail "$(cat /tmp/said)"
    kill -TERM $server
    wait $server || fail "the server ends badly"
    rm -f "$socket" /tmp/commands /tmp/said
    zebu check -q /var/lib/zebu/disk.qcow2
}

# Starts the server of another unit by its user, as the service manager does, and waits until it says that it is ready.
is_served_by() {
    user=$(of_unit "$1" User)
    as_user="setpriv --reuid=$user --regid=$user --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    $as_user $EMULATOR $(of_unit "$1" ExecStart) >/tmp/said &
    server=$!
    until grep -qx ready /tmp/said; do
        kill -0 $server || fail "the server of $1 has ended"
    done
    test -S "$2" || fail "$1 has no socket $2"
    kill -TERM $server
    wait $server || fail "the server of $1 ends badly"
    rm -f /tmp/said
}

images_stay() {
    test -e /var/lib/zebu/disk.qcow2 || fail "an image is gone"
    test "$(stat -c %U /var/lib/zebu/disk.qcow2)" = zebu || fail "the owner of an image is gone"
    rm /var/lib/zebu/disk.qcow2
}
