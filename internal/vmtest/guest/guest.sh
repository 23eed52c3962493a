# Library of a test guest: devices, namespaces, the kernel's SRP target (ib_srpt) and its SRP initiator (ib_srp).
# Each function says what it does after its own name and a colon; `guestctl` lists them.

TARGET=/sys/kernel/config/target

# fail: print a message and end the calling program with code 1
fail() {
	echo "guest: $*" >&2
	exit 1
}

# load: load kernel modules, skipping those that this kernel has built in or lacks
load() {
	modprobe -q -a "$@" 2>/dev/null || :
}

# net_up: eth0 with 10.0.0.1/24 and fd00::1/64
net_up() {
	load virtio_pci virtio_net
	ip link set lo up
	ip link set eth0 up
	ip addr add 10.0.0.1/24 dev eth0
	ip addr add fd00::1/64 dev eth0 nodad
}

# rxe_add: rxe_add NAME NETDEV makes a soft-RoCE device
rxe_add() {
	load crc32_generic rdma_rxe ib_uverbs rdma_ucm
	rdma link add "$1" type rxe netdev "$2" || fail "no rxe device on $2"
}

# veth_pair: veth_pair MTU makes veth0 (10.1.0.1/24, fd01::1/64) here and veth1 (10.1.0.2/24, fd01::2/64) in the network namespace "peer"
veth_pair() {
	load veth
	mkdir -p /run/netns
	ip netns add peer
	ip link add veth0 mtu "$1" address 52:54:00:aa:00:01 type veth peer name veth1 mtu "$1" address 52:54:00:aa:00:02 netns peer || fail "no veth pair"
	ip addr add 10.1.0.1/24 dev veth0
	ip addr add fd01::1/64 dev veth0 nodad
	ip link set veth0 up
	ip -n peer link set lo up
	ip -n peer addr add 10.1.0.2/24 dev veth1
	ip -n peer addr add fd01::2/64 dev veth1 nodad
	ip -n peer link set veth1 up
}

# peer: peer CMD... runs a command in the network namespace "peer", where no rxe holds UDP port 4791
peer() {
	ip netns exec peer "$@"
}

# netem: netem ARGS... spoils both directions of the veth pair, e.g. `netem loss 1% reorder 2% delay 1ms`; `netem off` ends it
netem() {
	load sch_netem
	if [ "$1" = off ]; then
		tc qdisc del dev veth0 root
		peer tc qdisc del dev veth1 root
		return
	fi
	tc qdisc replace dev veth0 root netem "$@" && peer tc qdisc replace dev veth1 root netem "$@"
}

# srpt_guid: print the id_ext and ioc_guid of the kernel's target, 16 hex digits
srpt_guid() {
	read -r g </sys/module/ib_srpt/parameters/srpt_service_guid
	echo "${g#0x}"
}

# srpt_backstores: RAM disk for LUN 0 (64 MiB), file for LUN 1 (64 MiB), RAM disk for LUN 300 (16 MiB)
srpt_backstores() {
	load target_core_mod target_core_file sd_mod sg
	mkdir -p /etc/target /srv
	mkdir -p $TARGET/core/rd_mcp_0/ram0 $TARGET/core/rd_mcp_1/ram300 $TARGET/core/fileio_0/file1
	echo rd_pages=16384 >$TARGET/core/rd_mcp_0/ram0/control
	echo rd_pages=4096 >$TARGET/core/rd_mcp_1/ram300/control
	truncate -s 64M /srv/lun1.img
	echo fd_dev_name=/srv/lun1.img,fd_dev_size=67108864,fd_buffered_io=1 >$TARGET/core/fileio_0/file1/control
	for b in rd_mcp_0/ram0:vmtest-lun0 rd_mcp_1/ram300:vmtest-lun300 fileio_0/file1:vmtest-lun1; do
		echo 1 >$TARGET/core/"${b%%:*}"/enable || fail "backstore ${b%%:*}"
		echo "${b##*:}" >$TARGET/core/"${b%%:*}"/wwn/vpd_unit_serial
	done
}

# srpt_port: srpt_port RXE prints the configfs folder of the device's target port
srpt_port() {
	read -r guid </sys/class/infiniband/"$1"/node_guid
	echo $TARGET/srpt/"$guid"/"$guid"
}

# srpt_acl: srpt_acl RXE ADDRESS... admits logins that dial one of the target's own addresses (IPv6 in 39-character form)
srpt_acl() {
	p=$(srpt_port "$1")
	shift
	for a; do
		mkdir -p "$p/acls/$a"
		for l in 0 1 300; do
			mkdir -p "$p/acls/$a/lun_$l"
			ln -s "$p/lun/lun_$l" "$p/acls/$a/lun_$l/x"
		done
	done
}

# srpt_noacl: srpt_noacl RXE removes all ACLs, so that every login is refused with 0x10006
srpt_noacl() {
	p=$(srpt_port "$1")
	for a in "$p"/acls/*; do
		[ -d "$a" ] || continue
		for l in 0 1 300; do
			rm -f "$a/lun_$l/x"
			rmdir "$a/lun_$l"
		done
		rmdir "$a"
	done
}

# srpt_enable: srpt_enable RXE 0|1 disables or enables the target port; disabled, every login is refused with 0x10001 and sessions are disconnected
srpt_enable() {
	echo "$2" >"$(srpt_port "$1")"/enable
}

# srpt_export: srpt_export RXE makes the device's target port with all LUNs and enables it; ACLs are srpt_acl's
srpt_export() {
	p=$(srpt_port "$1")
	mkdir -p "$p"
	mkdir "$p/lun/lun_0" "$p/lun/lun_1" "$p/lun/lun_300" || fail "target port of $1"
	ln -s $TARGET/core/rd_mcp_0/ram0 "$p/lun/lun_0/x"
	ln -s $TARGET/core/fileio_0/file1 "$p/lun/lun_1/x"
	ln -s $TARGET/core/rd_mcp_1/ram300 "$p/lun/lun_300/x"
	srpt_enable "$1" 1 || fail "cannot enable the target port of $1"
}

# srpt_up: load ib_srpt and let it listen on RDMA/CM port 5555 of all devices
srpt_up() {
	load ib_srpt
	mkdir -p $TARGET/srpt
	echo 5555 >$TARGET/srpt/discovery_auth/rdma_cm_port || fail "ib_srpt does not listen"
}

# srpt_sessions: print the number of channels that ib_srpt has (its connection ids in state CONNECT)
srpt_sessions() {
	rdma resource show cm_id 2>/dev/null | grep ib_srpt | grep -c 'state CONNECT' || :
}

# srp_login: srp_login RXE [KEY=VALUE,...] logs the kernel's ib_srp in; default destination is the target of scenario srpt. Prints the SCSI host, e.g. host1
srp_login() {
	load ib_srp sd_mod sg
	d=/sys/class/infiniband_srp/srp-$1-1
	[ -d "$d" ] || fail "ib_srp has no port $1"
	before=" $(echo /sys/class/scsi_host/*) "
	if [ -n "${2-}" ]; then
		s=$2
	else
		g=$(srpt_guid)
		s="id_ext=$g,ioc_guid=$g,dest=10.0.0.1:5555"
	fi
	echo "$s" >"$d/add_target" || return 1
	for h in /sys/class/scsi_host/*; do
		case $before in
		*" $h "*) ;;
		*) echo "${h##*/}" && return ;;
		esac
	done
	return 1
}

# srp_logout: srp_logout HOST logs the kernel's ib_srp out of that SCSI host and waits until it is gone
srp_logout() {
	n=${1#host}
	echo 1 >/sys/class/srp_remote_ports/port-"$n":1/delete || return 1
	for i in $(seq 100); do
		[ -d /sys/class/scsi_host/"$1" ] || return 0
		usleep 100000
	done
	echo "guest: $1 is still there 10 s after its logout" >&2
	return 1
}

# lun_dev: lun_dev HOST LUN [SECONDS] waits for the LUN's disk and prints its node, e.g. /dev/sda (letters do not follow LUN order)
lun_dev() {
	n=${1#host}
	for i in $(seq $((${3:-20} * 10))); do
		for b in /sys/class/scsi_device/"$n":0:0:"$2"/device/block/*; do
			if [ -b /dev/"${b##*/}" ]; then
				echo /dev/"${b##*/}"
				return 0
			fi
		done
		usleep 100000
	done
	echo "guest: no disk for LUN $2 of $1" >&2
	return 1
}

# lun_sg: lun_sg HOST LUN prints the LUN's generic node, e.g. /dev/sg0
lun_sg() {
	for b in /sys/class/scsi_device/"${1#host}":0:0:"$2"/device/scsi_generic/*; do
		[ -c /dev/"${b##*/}" ] && echo /dev/"${b##*/}" && return 0
	done
	echo "guest: no generic node for LUN $2 of $1" >&2
	return 1
}

# scenario_net: eth0 only
scenario_net() { net_up; }

# scenario_rxe: rxe0 on eth0 (10.0.0.1, fd00::1), path MTU 1024
scenario_rxe() {
	net_up
	rxe_add rxe0 eth0
}

# scenario_rxe4096: as rxe, and rxe1 on a dummy netdev of MTU 4200 (10.2.0.1, fd02::1), path MTU 4096
scenario_rxe4096() {
	scenario_rxe
	load dummy
	# The module makes a dummy0 of its own, of MTU 1500.
	ip link add jumbo0 mtu 4200 address 52:54:00:bb:00:01 type dummy || fail "no dummy netdev"
	ip addr add 10.2.0.1/24 dev jumbo0
	ip addr add fd02::1/64 dev jumbo0 nodad
	ip link set jumbo0 up
	rxe_add rxe1 jumbo0
}

# scenario_srpt: rxe0 and the kernel's target on 10.0.0.1:5555 and [fd00::1]:5555 with LUNs 0, 1 and 300
scenario_srpt() {
	scenario_rxe
	srpt_backstores
	srpt_up
	srpt_export rxe0
	srpt_acl rxe0 10.0.0.1 fd00:0000:0000:0000:0000:0000:0000:0001
	srpt_env 10.0.0.1:5555 '[fd00::1]:5555'
}

# scenario_netns: a veth pair of MTU 1500 into the namespace "peer", rxe1 on its outer end (10.1.0.1, fd01::1), path MTU 1024; the peer is 10.1.0.2, fd01::2
scenario_netns() { netns_rxe 1500; }

# scenario_netns4096: as netns with netdev MTU 4200, path MTU 4096
scenario_netns4096() { netns_rxe 4200; }

netns_rxe() {
	ip link set lo up
	veth_pair "$1"
	rxe_add rxe1 veth0
	export VMTEST_PEER_NS=peer VMTEST_PEER_ADDR=10.1.0.2 VMTEST_PEER_ADDR6=fd01::2 VMTEST_RXE_ADDR=10.1.0.1 VMTEST_RXE_ADDR6=fd01::1
}

# scenario_netns_srpt: as netns, and the kernel's target on 10.1.0.1:5555 and [fd01::1]:5555
scenario_netns_srpt() {
	netns_rxe 1500
	netns_srpt
}

# scenario_netns4096_srpt: as netns4096, and the kernel's target on 10.1.0.1:5555 and [fd01::1]:5555
scenario_netns4096_srpt() {
	netns_rxe 4200
	netns_srpt
}

netns_srpt() {
	srpt_backstores
	srpt_up
	srpt_export rxe1
	srpt_acl rxe1 10.1.0.1 fd01:0000:0000:0000:0000:0000:0000:0001
	srpt_env 10.1.0.1:5555 '[fd01::1]:5555'
}

srpt_env() {
	export VMTEST_SRPT_ADDR=$1 VMTEST_SRPT_ADDR6=$2 VMTEST_SRPT_ID=$(srpt_guid)
}

# scenario_none: nothing
scenario_none() { :; }
