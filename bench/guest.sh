# Runs in a test guest: the published experiments against the kernel's target, over the kernel's soft-RoCE device. Each section begins with a
# line "=== NAME".
set -eu
url="srp://$VMTEST_SRPT_ADDR/$VMTEST_SRPT_ID"
for name in $EXPERIMENTS; do
	echo "=== $name"
	second=
	case $name in e3*) second="--lun2 300" ;; esac # the other half of a stripe
	srp-initiator experiment "$name" --device rxe0 $second --rounds "$ROUNDS" --runtime "$RUNTIME" --markdown "$url"
done
