#!/bin/sh
# Installs zebu from the archives of a release: sh install.sh [--prefix DIR] [--from URL_OR_DIR]
#
# Nothing is installed unless its SHA-256 sum is that of SHA256SUMS beside it.
set -eu

version="@VERSION@"
from="@PLACE@"
prefix="/usr/local"
while [ $# -gt 0 ]; do
    case "$1" in
        --prefix | --from)
            [ $# -gt 1 ] || { echo "install.sh: $1 needs a value" >&2; exit 1; }
            case "$1" in --prefix) prefix="$2" ;; --from) from="$2" ;; esac
            shift 2
            ;;
        -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "install.sh: not known: $1 (--help)" >&2; exit 1 ;;
    esac
done
fail() { echo "install.sh: $1" >&2; exit 1; }

case "$(uname -s)" in
    Linux) ;;
    *) fail "there are no archives for $(uname -s) yet: cargo install zebu-cli" ;;
esac
case "$(uname -m)" in
    x86_64 | amd64) machine=x86_64 ;;
    aarch64 | arm64) machine=aarch64 ;;
    *) fail "there are no archives for $(uname -m) yet: cargo install zebu-cli" ;;
esac
name="zebu-$version-$machine-unknown-linux-musl"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
get() {
    case "$from" in
        http://* | https://*)
            if command -v curl >/dev/null; then
                curl -fsSL --retry 3 -o "$work/$1" "$from/$1" || fail "can't get $from/$1"
            elif command -v wget >/dev/null; then
                wget -q -O "$work/$1" "$from/$1" || fail "can't get $from/$1"
            else
                fail "curl or wget is needed"
            fi
            ;;
        *) cp "$from/$1" "$work/$1" || fail "there is no $from/$1" ;;
    esac
}
get SHA256SUMS
get "$name.tar.gz"
case "$prefix" in /*) ;; *) prefix="$PWD/$prefix" ;; esac
cd "$work"
wanted=$(grep " [ *]\{0,1\}$name.tar.gz\$" SHA256SUMS) || fail "SHA256SUMS does not name $name.tar.gz"
printf '%s\n' "$wanted" | sha256sum -c - >/dev/null 2>&1 \
    || fail "$name.tar.gz is not what SHA256SUMS says: the download is broken, or was changed"
tar -xzf "$name.tar.gz"
sed -i "s,/usr/bin/zebu,$prefix/bin/zebu,g" "$name"/lib/systemd/system/*.service
mkdir -p "$prefix"
cp -R "$name/." "$prefix/" || fail "can't write to $prefix: be root, or give --prefix"
echo "zebu $version is in $prefix/bin"
