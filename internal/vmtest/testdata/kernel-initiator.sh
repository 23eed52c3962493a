#!/bin/bash
# The kernel's ib_srp over rxe against target-emu: on softroce in the namespace "peer" (scenarios netns*), and on rxe. A file system is made, filled
# with a tree, checked and compared; LUNs, task management and refusals are looked at from the kernel's side.
set -eu
. /usr/lib/guest.sh
say() { echo "== $*"; }
die() { echo "FAILED: $*"; cat /tmp/target.err 2>/dev/null || true; dmesg | tail -40; exit 1; }

start() { # start PREFIX... -- FLAGS...: runs target-emu, sets $login
	prefix=()
	while [ "$1" != -- ]; do prefix+=("$1"); shift; done
	shift
	rm -f /tmp/target.out
	"${prefix[@]}" target-emu --json -v "$@" >/tmp/target.out 2>/tmp/target.err &
	pid=$!
	for i in $(seq 100); do
		login=$(sed -n 's/.*"target":"\([^"]*\)".*/\1/p' /tmp/target.out 2>/dev/null || true)
		[ -z "$login" ] || return 0
		kill -0 $pid 2>/dev/null || die "target-emu ended"
		sleep 0.1
	done
	die "target-emu does not get ready"
}

stop() {
	kill -TERM $pid
	wait $pid || die "target-emu exit code $?"
	tail -n 1 /tmp/target.out | cut -c 1-600
}

filesystem() { # filesystem DEV
	mkfs.ext4 -q -F "$1" || die mkfs
	mkdir -p /mnt/t
	mount -t ext4 "$1" /mnt/t || die mount
	cp -a /etc /usr/lib/guest.sh /mnt/t/
	for i in {1..10}; do # a tree of small files, without a process for each
		mkdir -p /mnt/t/d$i/e$i
		for j in {1..25}; do
			printf '%0*d' $((j * 97)) $((i * j)) >/mnt/t/d$i/e$i/f$j
		done
	done
	dd if=/dev/urandom of=/mnt/t/big bs=1M count=16 2>/dev/null
	(cd /mnt/t && find . -type f -print0 | sort -z | xargs -0 md5sum) >/tmp/sums
	umount /mnt/t
	echo 3 >/proc/sys/vm/drop_caches
	fsck.ext4 -f -n "$1" >/tmp/fsck || { cat /tmp/fsck; die fsck; }
	mount -t ext4 -o ro "$1" /mnt/t || die "mount again"
	(cd /mnt/t && md5sum -s -c /tmp/sums) || die "files differ"
	umount /mnt/t
	say "$(wc -l </tmp/sums) files verified on $1"
}

round() { # round RXE LUNS...: logs in, makes a file system on LUN 0 and 1, looks at the others
	rxe=$1
	host=$(srp_login "$rxe" "$login") || die "login"
	say "logged in as $host with $(cat /sys/class/scsi_host/$host/ch_count) channels, req_lim $(cat /sys/class/scsi_host/$host/req_lim)"
	filesystem "$(lun_dev $host 0)"
	[ -n "${quick-}" ] || filesystem "$(lun_dev $host 1)"
	d300=$(lun_dev $host 300) || die "LUN 300"
	b=$(cat /sys/block/${d300#/dev/}/queue/logical_block_size)
	[ "$b" = 4096 ] || die "LUN 300 has blocks of $b bytes"
	dd if=/dev/urandom of=/tmp/x bs=1M count=4 2>/dev/null
	dd if=/tmp/x of="$d300" bs=1M oflag=direct 2>/dev/null
	dd if="$d300" bs=64k iflag=direct count=64 2>/dev/null | cmp - /tmp/x || die "LUN 300 differs"
	sg=$(lun_sg $host 0)
	sg_inq "$sg" | grep -q SRP-EMU || die "sg_inq"
	sg_readcap --16 "$sg" >/dev/null || die "sg_readcap"
	for p in sn di bl bdc lbpv; do sg_vpd --page=$p "$sg" >/dev/null || die "sg_vpd $p"; done
	blkdiscard "$(lun_dev $host 0)" 2>/dev/null && {
		dd if="$(lun_dev $host 0)" bs=1M count=1 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero || die "discarded blocks do not read as zeros"
		say "discarded"
	} || say "no blkdiscard here"
	srp_logout $host || die logout
	say "logged out"
}

luns="--lun 0=ram:64m --lun 1=file:/tmp/disk,size=64m --lun 300=ram:16m,bs=4096 --simple-luns"

# In the scenarios with a namespace the target is a userspace one there, else it shares the kernel's device with the initiator.
case $VMTEST_SCENARIO in
netns*)
	rxe=rxe1
	target() { start ip netns exec peer -- --device softroce:10.1.0.2 $luns "$@"; }
	target6() { start ip netns exec peer -- --device softroce:fd01::2 $luns "$@"; }
	;;
*)
	rxe=rxe0
	target() { start -- --device rxe0 --listen 10.0.0.1 $luns "$@"; }
	target6() { start -- --device rxe0 --listen fd00::1 $luns "$@"; }
	;;
esac

say "kernel initiator on $rxe, target-emu over IPv4"
target
round $rxe
stop

say "over IPv6, without immediate data"
target6 --no-immediate --completion poll
quick=1 round $rxe
stop

say "aborts: the kernel gives up on a command that is never answered, and goes on"
printf 'cmd op=read nth=40 : drop\n' >/tmp/faults
target --faults /tmp/faults
host=$(srp_login $rxe "$login")
dev=$(lun_dev $host 0)
echo 3 >/sys/block/${dev#/dev/}/device/timeout
dd if=$dev of=/dev/null bs=4k count=200 iflag=direct 2>/dev/null || die "read with an abort"
dmesg | grep -q "SRP abort" || die "no abort was sent"
srp_logout $host
stop

say "refusals in the kernel's words"
target --acl 192.0.2.1
dmesg -c >/dev/null
srp_login $rxe "$login" 2>/dev/null && die "admitted in spite of the access list"
dmesg | grep -q "LOGIN REJECTED, reason 0x00010003" || die "not refused with 0x00010003"
stop
say "done"
