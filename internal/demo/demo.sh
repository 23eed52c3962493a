#!/usr/bin/env bash
# The demo: a target and an initiator on this machine, over UDP loopback, without privileges. It leaves nothing behind.
# Usage: demo.sh FOLDER, where FOLDER has target-emu and srp-initiator.
set -euo pipefail
PATH=$(cd "$1" && pwd):$PATH
dir=$(mktemp -d)
target=
cleanup() {
	[ -z "$target" ] || { kill "$target" 2>/dev/null && wait "$target" 2>/dev/null; } || true
	rm -rf "$dir"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() {
	printf '$ %s\n' "${*//"$where"/\$TARGET}" | sed "s|$dir/||g"
	"$@"
}

say "A software SRP target over userspace RoCE v2, on a loopback address of its own:"
mkfifo "$dir/line"
echo '$ target-emu --lun 0=ram:64m --lun 1=null:1g &'
target-emu --lun 0=ram:64m --lun 1=null:1g >"$dir/line" &
target=$!
read -r where <"$dir/line"
echo "TARGET=$where"

say "Log in and list its logical units:"
show srp-initiator ls "$where"

say "Write 16 MiB of random data, read them back, compare:"
head -c 16M /dev/urandom >"$dir/data"
show srp-initiator write "$where" --lun 0 --offset 1m -i "$dir/data"
show srp-initiator read "$where" --lun 0 --offset 1m --length 16m -o "$dir/back"
cmp "$dir/data" "$dir/back"
echo "equal: $(sha256sum <"$dir/back" | cut -c1-64)"

say "20,000 random reads and writes, every byte checked:"
show srp-initiator bench "$where" --rw randrw --bs 4k --iodepth 32 --loops 20000 --verify

say "Who reaps completions: in the notification's context, in a thread of its own, by a budgeted poller"
for depth in 1 32; do
	show srp-initiator bench "$where" --lun 1 --bs 4k --iodepth $depth --runtime 350ms --compare thread=n,thread=y,poll --rounds 6
	echo
done
