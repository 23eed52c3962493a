# The kernel's own initiator against its own target: shows that the scenario works before our programs are blamed.
set -eu
. /usr/lib/guest.sh
host=$(srp_login rxe0)
for lun in 0 1 300; do
	dev=$(lun_dev "$host" $lun)
	sg_inq "$dev" | grep -q 'Vendor identification: LIO-ORG'
	sg_inq "$dev" | grep -q "Unit serial number: vmtest-lun$lun"
	dd if=/dev/urandom of=/tmp/x bs=64K count=17 2>/dev/null
	dd if=/tmp/x of="$dev" bs=64K seek=3 oflag=direct 2>/dev/null
	dd if="$dev" of=/tmp/y bs=64K skip=3 count=17 iflag=direct 2>/dev/null
	cmp /tmp/x /tmp/y
done
[ "$(sg_luns -q "$(lun_sg "$host" 0)" | sort | tr -d ' \n')" = 00000000000000000001000000000000012c000000000000 ]
[ "$(srpt_sessions)" -ge 1 ]
srp_logout "$host"
[ "$(srpt_sessions)" = 0 ]
