# The kernel's initiator, a file system and fsck on target-emu: on softroce in the namespace "peer" over IPv4 and IPv6, or, with
# argument rxe, on the kernel's rxe1.
set -eu
. /usr/lib/guest.sh
load ext4
say() { read -r up rest </proc/uptime; echo "[$up] $*"; }
die() { echo "FAIL: $*"; cat emu.err; exit 1; }
cd /tmp
truncate -s 48M file.img

serve() { # serve ADDRESS CMD...: starts target-emu there, its string goes to $string
	listen=$1
	shift
	"$@" target-emu --listen "$listen" --lun 0=ram:96m --lun 1=file:/tmp/file.img --lun 5=ram:32m,bs=4096 --lun 300=ram:16m --simple-luns --stats 1h >emu.out 2>emu.err &
	for i in $(seq 100); do
		[ -s emu.out ] && break
		usleep 100000
	done
	string=$(head -1 emu.out)
	[ -n "$string" ] || die "target-emu printed no string"
	emu=$(pidof target-emu)
}

disk() { # disk STRING: all that a disk goes through
	say "login with $1"
	host=$(srp_login rxe1 "$1")
	for lun in 0 1 5 300; do
		dev=$(lun_dev "$host" $lun)
		sg_inq "$dev" >/dev/null
		sg_readcap "$dev" >/dev/null
		sg_turs "$dev"
		sg_vpd -p di "$dev" >/dev/null
	done
	[ "$(blockdev --getss "$(lun_dev "$host" 5)")" = 4096 ] || die "LUN 5 has not 4096-byte blocks"
	for lun in 0 1; do
		dev=$(lun_dev "$host" $lun)
		say "file system on LUN $lun, $dev"
		mkfs.ext4 -q -F "$dev"
		mkdir -p mnt
		mount -t ext4 "$dev" mnt
		cp -a /usr/bin /usr/lib/modules mnt/
		dd if=/dev/urandom of=mnt/random bs=1M count=4 2>/dev/null
		sha256sum <mnt/random >sum
		umount mnt
		fsck.ext4 -f -n "$dev" >fsck.out 2>&1 || die "fsck: $(cat fsck.out)"
		echo 3 >/proc/sys/vm/drop_caches
		mount -t ext4 -o ro "$dev" mnt
		[ "$(sha256sum <mnt/random)" = "$(cat sum)" ] || die "random file changed"
		(cd /usr/bin && find . -type f | sort | xargs sha256sum) >a
		(cd mnt/bin && find . -type f | sort | xargs sha256sum) >b
		cmp a b || die "the copied tree differs"
		umount mnt
	done
	say verified random writes of fio at depth 32
	for lun in 5 300; do
		dev=$(lun_dev "$host" $lun)
		fio --name=verify --filename="$dev" --direct=1 --ioengine=libaio --rw=randwrite --bsrange=4k-64k --bs_unaligned=0 --iodepth=32 --size=12m \
			--verify=crc32c --do_verify=1 --verify_fatal=1 --minimal >fio.out 2>&1 || die "fio: $(cat fio.out)"
	done
	srp_logout "$host"
}

quiet() { # quiet STATS: no retransmission and no bad ICRC on a quiet link
	kill -INT "$emu"
	rc=0
	wait || rc=$?
	say "target-emu ended with $rc"
	cat emu.err
	[ $rc = 0 ] || die "exit code $rc"
}

if [ "${1-}" = rxe ]; then
	serve "$VMTEST_RXE_ADDR" env
	disk "$string"
	quiet
else
	for addr in "$VMTEST_PEER_ADDR" "$VMTEST_PEER_ADDR6"; do
		serve "$addr" ip netns exec peer
		disk "$string"
		quiet
	done
	rdma statistic show link rxe1/1 | tee stat.out
	grep -q ' duplicate_request 0 out_of_seq_request 0 ' stat.out && grep -q ' rcvd_seq_err 0 ' stat.out && grep -q ' completer_retry_err 0 ' stat.out ||
		die "the kernel's device counted errors on a quiet link"
fi
say done
