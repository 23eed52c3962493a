#!/usr/bin/env bash
# Runs experiments on loopback: a target-emu with two null units in a process of its own, and srp-initiator.
#   experiments.sh BIN ROUNDS RUNTIME NAME...
# Tables go into docs/benchmarks.md, all figures to BIN/NAME.csv, plots into BIN/plots.
set -euo pipefail
bin=$1 rounds=$2 runtime=$3
shift 3
cd "$(dirname "$0")/.."
out=$(mktemp)
"$bin/target-emu" --quiet --lun 0=null:1g --lun 1=null:1g > "$out" &
target=$!
trap 'kill $target 2>/dev/null; wait $target 2>/dev/null; rm -f "$out"' EXIT
for _ in $(seq 100); do
	[ -s "$out" ] && break
	kill -0 $target || { echo "target-emu did not start" >&2; exit 1; }
	sleep 0.1
done
mkdir -p "$bin/plots"
for name in "$@"; do
	write=
	[ "$name" = e2 ] && write=--write # on a null unit there is nothing to lose
	"$bin/srp-initiator" experiment "$name" $write --rounds "$rounds" --runtime "$runtime" --markdown \
		--csv "$bin/$name.csv" --plots "$bin/plots" "$(head -1 "$out")" > "$bin/$name.md"
	go run ./bench/splice docs/benchmarks.md "$name" < "$bin/$name.md"
done
