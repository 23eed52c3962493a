# srp-initiator against the kernel's target, judged by the kernel's own initiator on the same LUNs. In a scenario with a
# namespace it runs there, on softroce; else on the kernel's rxe0.
set -eu
. /usr/lib/guest.sh
if [ -n "${VMTEST_PEER_NS-}" ]; then
	rxe=rxe1
	srp() { verb=$1; shift; ip netns exec peer srp-initiator "$verb" --device "softroce:$VMTEST_PEER_ADDR" "$@"; }
	six() { verb=$1; shift; ip netns exec peer srp-initiator "$verb" --device "softroce:$VMTEST_PEER_ADDR6" "$@"; }
else
	rxe=rxe0
	srp() { verb=$1; shift; srp-initiator "$verb" --device rxe0 "$@"; }
	six() { srp "$@"; }
fi
id=$VMTEST_SRPT_ID
url=srp://$VMTEST_SRPT_ADDR/$id
say() { read -r up rest </proc/uptime; echo "[$up] $*"; }
die() { echo "FAIL: $*"; exit 1; }
# On one device both initiators would have one port id, and each login would throw the other's session out.
host=$(srp_login $rxe "id_ext=$id,ioc_guid=$id,initiator_ext=0000000000000001,dest=$VMTEST_SRPT_ADDR")
cd /tmp

say login string and URL, IPv4 and IPv6
srp probe "$url"
srp probe "id_ext=$id,ioc_guid=$id,dest=$VMTEST_SRPT_ADDR" >/dev/null
six probe "srp://$VMTEST_SRPT_ADDR6/$id" >/dev/null

say ls, inq and readcap agree with sg_luns, sg_inq and sg_readcap
srp ls "$url" | tee ls.out
for lun in 0 1 300; do
	dev=$(lun_dev "$host" $lun)
	sg_inq "$dev" >sg.out
	srp inq --all --lun $lun "$url" >inq.out
	for field in 'Vendor identification' 'Product identification' 'Unit serial number'; do
		value=$(sed -n "s/^ *$field: *\(.*[^ ]\) *$/\1/p" sg.out)
		[ -n "$value" ] || die "sg_inq says no $field"
		grep -qF "$value" inq.out || die "inq of LUN $lun lacks $field $value: $(cat inq.out)"
	done
	sg_readcap "$dev" >sg.out
	srp readcap --lun $lun "$url" >cap.out
	for value in $(sed -n 's/.*Number of logical blocks=\([0-9]*\).*/\1/p; s/.*Logical block length=\([0-9]*\).*/\1/p; s/.*Device size: \([0-9]*\) bytes.*/\1/p' sg.out); do
		grep -qw "$value" cap.out || die "readcap of LUN $lun lacks $value: $(cat cap.out)"
	done
	grep -qw "$lun" ls.out || die "ls lacks LUN $lun"
done
[ "$(sg_luns -q "$(lun_sg "$host" 0)" | wc -l)" = 3 ]

say data, both ways
dd if=/dev/urandom of=random bs=1M count=9 2>/dev/null
for lun in 0 1 300; do
	dev=$(lun_dev "$host" $lun)
	# Sizes with odd tails too: in blocks for the kernel's O_DIRECT, in bytes for ours.
	sizes='512 4096 65536 1048576 8388608 66048 70001'
	[ $lun = 0 ] || sizes='1049088 5000'
	for size in $sizes; do
		say "LUN $lun, $size bytes"
		offset=$((512 * (lun + 7)))
		whole=$(((size + 511) / 512 * 512))
		head -c $size random >ours
		srp write --lun $lun --offset $offset -i ours "$url" >/dev/null
		dd if="$dev" of=theirs bs=$whole count=1 skip=$offset iflag=direct,skip_bytes 2>/dev/null
		cmp -n $size ours theirs || die "LUN $lun: the kernel reads other bytes than we wrote ($size)"
		tail -c $whole random >theirs
		dd if=theirs of="$dev" bs=$whole count=1 seek=$offset oflag=direct,seek_bytes 2>/dev/null
		srp read --lun $lun --offset $offset --length $size -o ours "$url" >/dev/null
		[ "$(stat -c %s ours)" = $size ] || die "read gave $(stat -c %s ours) bytes of $size"
		cmp -n $size ours theirs || die "LUN $lun: we read other bytes than the kernel wrote ($size)"
	done
done

say refused logins
refused() { # refused CODE ARGS...
	code=$1
	shift
	rc=0
	srp probe "$@" >refused.out 2>&1 || rc=$?
	cat refused.out
	[ $rc = 5 ] || die "exit code $rc, want 5"
	grep -qi "$code" refused.out || die "the code $code is not named"
}
refused 10003 "srp://$VMTEST_SRPT_ADDR/$id:0002c90300000001"
srp_logout "$host"
srpt_enable $rxe 0
refused 10001 "$url"
srpt_enable $rxe 1
acls=$(ls "$(srpt_port $rxe)/acls")
srpt_noacl $rxe
refused 10006 "$url"
srpt_acl $rxe $acls

say an interrupted verb ends in a second
srp bench --runtime 60s "$url" >bench.out 2>&1 &
sleep 3
pid=$(pidof srp-initiator)
read -r t0 rest </proc/uptime
kill -INT $pid
rc=0
wait $! || rc=$?
read -r t1 rest </proc/uptime
[ $rc = 130 ] || die "exit code $rc, want 130: $(cat bench.out)"
[ $(((${t1/./} - ${t0/./}))) -lt 150 ] || die "took from $t0 to $t1"
for i in $(seq 50); do
	[ "$(srpt_sessions)" = 0 ] && break
	usleep 100000
done
[ "$(srpt_sessions)" = 0 ] || die "the target still has $(srpt_sessions) channels"
say done
