#!/usr/bin/env bash
# Runs experiments on loopback: a target-emu with two null units in a process of its own, and srp-initiator.
#   experiments.sh BIN ROUNDS RUNTIME NAME...
# Tables go into docs/benchmarks.md, all figures to BIN/NAME.csv, plots into BIN/plots.
set -euo pipefail
bin=$1 rounds=$2 runtime=$3
shift 3
cd "$(dirname "$0")/.."
out=$(mktemp)
target=
trap 'stop; rm -f "$out"' EXIT

# All but e4, which asks what another CPU is worth, give each program one CPU of its own, as two machines would: left to themselves they share one now and
# then, where waking each other costs half as much. Pinned when they run: they shall know that the machine has more.
cpus=($(taskset -pc $$ | sed 's/.*: //' | tr , '\n' | while IFS=- read -r a b; do seq "$a" "${b:-$a}"; done))
pin() {
	[ ${#cpus[@]} -ge 2 ] && [ "$name" != e4 ] || return 0
	while [ -d "/proc/$1/task" ] && [ "$(ls "/proc/$1/task" | wc -l)" -lt 3 ]; do
		sleep 0.01 # the Go runtime has looked at the CPUs before its threads begin
	done
	taskset -apc "${cpus[$2]}" "$1" > /dev/null
}
start() {
	local procs=1
	[ "$name" = e4 ] && procs=
	: > "$out"
	GOMAXPROCS=$procs "$bin/target-emu" --quiet --lun 0=null:1g --lun 1=null:1g > "$out" &
	target=$!
	for _ in $(seq 100); do
		[ -s "$out" ] && break
		kill -0 $target || { echo "target-emu did not start" >&2; exit 1; }
		sleep 0.1
	done
	pin $target 0
}
stop() {
	[ -z "$target" ] || { kill $target 2>/dev/null; wait $target 2>/dev/null || true; }
	target=
}

mkdir -p "$bin/plots"
for name in "$@"; do
	write=
	[ "$name" = e2 ] && write=--write # on a null unit there is nothing to lose
	start
	"$bin/srp-initiator" experiment "$name" $write --rounds "$rounds" --runtime "$runtime" --markdown \
		--csv "$bin/$name.csv" --plots "$bin/plots" "$(head -1 "$out")" > "$bin/$name.md" &
	initiator=$!
	pin $initiator 1 || true # it may have ended already
	wait $initiator
	stop
	go run ./bench/splice docs/benchmarks.md "$name" < "$bin/$name.md"
	echo "$name: table in docs/benchmarks.md (its text and the table of goals are not changed), all figures in $bin/$name.csv, drawings in $bin/plots"
done
