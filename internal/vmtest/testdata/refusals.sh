# Logins that the kernel's target refuses, over IPv4 and IPv6, as the kernel's own initiator sees them.
set -eu
. /usr/lib/guest.sh
login() { srp_login rxe1 "id_ext=$1,ioc_guid=$2,dest=$3"; }
refused() { # refused REASON CMD...
	reason=$1
	shift
	dmesg -c >/dev/null
	if "$@" 2>/dev/null; then
		echo "admitted, want reason $reason"
		exit 1
	fi
	dmesg | grep -q "LOGIN REJECTED, reason 0x0*$reason" || {
		echo "not refused with $reason:"
		dmesg | grep srp
		exit 1
	}
}
id=$VMTEST_SRPT_ID
for dest in "$VMTEST_SRPT_ADDR" "$VMTEST_SRPT_ADDR6"; do
	srp_logout "$(login "$id" "$id" "$dest")"
	refused 10003 login "$id" 0002c90300000001 "$dest"
done
srpt_enable rxe1 0
refused 10001 login "$id" "$id" "$VMTEST_SRPT_ADDR"
srpt_enable rxe1 1
acls=$(ls "$(srpt_port rxe1)/acls")
srpt_noacl rxe1
refused 10006 login "$id" "$id" "$VMTEST_SRPT_ADDR"
refused 10006 login "$id" "$id" "$VMTEST_SRPT_ADDR6"
srpt_acl rxe1 $acls
srp_logout "$(login "$id" "$id" "$VMTEST_SRPT_ADDR")"
