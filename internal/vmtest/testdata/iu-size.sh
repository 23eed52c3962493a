# The kernel's target with the smallest request size it knows (996 bytes): a login that asks for longer information units is refused
# with 0x10002; without immediate data and long descriptor tables we fit. In a scenario without a target, because the size is a
# module parameter.
set -eu
. /usr/lib/guest.sh
srpt_backstores
modprobe ib_srpt srp_max_req_size=996
srpt_up
srpt_export rxe0
srpt_acl rxe0 10.0.0.1
url=srp://10.0.0.1:5555/$(srpt_guid)
rc=0
srp-initiator probe --device rxe0 "$url?cmd_sg_entries=255&use_imm_data=0" >out 2>&1 || rc=$?
cat out
[ $rc = 5 ] && grep -q 10002 out || {
	echo "FAIL: exit code $rc, want 5 and reason 10002"
	exit 1
}
srp-initiator probe --device rxe0 "$url"
srp-initiator ls --device rxe0 "$url"
