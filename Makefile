# make demo    see it work on this machine: no privileges, no RDMA device, under 90 s
# make check   build, vet, lint, unit tests, house rules: two to four minutes on two CPUs, no privileges
# make test    check in full, the race detector, and the tests that run in guests with real kernels 6.1 and 6.12; what CI runs
# make help    the other targets

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := check

GO ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
VMTEST := CGO_ENABLED=0 $(GO) run ./internal/vmtest/cmd/vmtest
KERNEL ?= 6.12
SCENARIO ?= srpt
FUZZTIME ?= 30s
EXPERIMENTS ?= e1 e2 e3 e3s e4 matrix depth
GUEST_EXPERIMENTS ?= e1 e3 e3s e4
GUEST_ROUNDS ?= 6
GUEST_RUNTIME ?= 250ms
# With fewer than six rounds no difference is called (srp-initiator help experiment).
ROUNDS ?= 6
RUNTIME ?= 500ms
# What reports call the program: the commit. The go command does not stamp what is built in a linked work tree.
REVISION := $(shell git describe --always --dirty=,modified --abbrev=12 --match= 2>/dev/null)

# Packages with goroutines or shared memory.
RACE := $(patsubst %,./%/...,$(wildcard completion rdma srp target-emu bench))

# No cgo in what is shipped; the race detector alone needs it.
export CGO_ENABLED := 0

.PHONY: help demo binaries bench-peers bench-fio soak experiments experiments-guest build check vet format lint libcost unit race test guest deps guest-shell fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: binaries ## target and initiator on this machine's loopback: list, write, verify, compare completion modes
	@bash internal/demo/demo.sh bin

binaries: ## the two commands, static, in bin/
	@command -v $(GO) >/dev/null || { echo "Go is missing: install version $$(sed -n 's/^go //p' go.mod) or newer (Debian 12's own package is older) and have it in PATH"; exit 2; }
	$(GO) build -trimpath -ldflags '-X srp-initiator/internal/revision.commit=$(REVISION)' -o bin/ ./cmd/...

bench-peers: ROUNDS = 4
bench-peers: RUNTIME = 1s
bench-peers: binaries ## beside tgt, nbdkit and the machine's limit, on loopback (some ten minutes), into docs/benchmarks.md; ROUNDS=4 RUNTIME=1s
	$(GO) build -trimpath -o bin/ ./bench/limit ./bench/versus
	bin/versus peers --rounds $(ROUNDS) --time $(RUNTIME) --json bin/peers.json > bin/peers.md
	$(GO) run ./bench/splice docs/benchmarks.md peers < bin/peers.md

bench-fio: ROUNDS = 3
bench-fio: RUNTIME = 1s
bench-fio: binaries ## beside fio on the kernel's ib_srp, in a guest, into docs/benchmarks.md: KERNEL=6.1|6.12 ROUNDS=3 RUNTIME=1s
	$(GO) build -trimpath -o bin/ ./bench/versus
	$(VMTEST) run --kernel $(KERNEL) --scenario srpt --timeout 20m --file bin/srp-initiator:/usr/local/bin/srp-initiator --file bin/versus:/usr/local/bin/versus -- /usr/local/bin/versus fio --rounds $(ROUNDS) --time $(RUNTIME) > bin/fio-$(KERNEL).md
	$(GO) run ./bench/splice docs/benchmarks.md fio-$(KERNEL) < bin/fio-$(KERNEL).md

experiments: binaries ## the published experiments on loopback, into docs/benchmarks.md; EXPERIMENTS="e1 matrix" chooses, ROUNDS=6 RUNTIME=500ms
	@bash bench/experiments.sh bin $(ROUNDS) $(RUNTIME) $(EXPERIMENTS)

experiments-guest: binaries ## e1, e3, e3s and e4 against the kernel's target in a guest, into docs/benchmarks.md: KERNEL=6.12 GUEST_ROUNDS=6 GUEST_RUNTIME=250ms
	$(VMTEST) run --kernel $(KERNEL) --scenario srpt --timeout 20m --file bin/srp-initiator:/usr/local/bin/srp-initiator --file bench/guest.sh:/usr/local/bin/experiments \
		--env ROUNDS=$(GUEST_ROUNDS) --env RUNTIME=$(GUEST_RUNTIME) --env EXPERIMENTS="$(GUEST_EXPERIMENTS)" -- sh /usr/local/bin/experiments > bin/guest-experiments.md
	for name in $(GUEST_EXPERIMENTS); do \
		sed -n "/^=== $$name\$$/,/^=== /{/^=== /d;p}" bin/guest-experiments.md | $(GO) run ./bench/splice docs/benchmarks.md guest-$$name; \
	done

build: ## build all for amd64 and arm64
	$(GO) build ./...
	GOARCH=arm64 $(GO) build ./...

check: build vet format lint unit ## build, vet, lint and unit tests

vet:
	$(GO) vet ./...
	$(GO) vet -tags guest ./internal/vmtest
	GOARCH=arm64 $(GO) vet ./...

libcost: ## nanoseconds per work request beside libmlx5 and libmlx4, in alternating rounds (needs gcc and libibverbs-dev)
	@d=$$(mktemp -d); trap 'rm -rf $$d' EXIT; \
	cc -O2 -rdynamic -o $$d/libcost rdma/verbs/uverbs/testdata/libcost/libcost.c -libverbs -lmlx5 -lmlx4 -ldl; \
	$(GO) build -o $$d/compare ./rdma/verbs/uverbs/internal/golden/cmd/libcost; \
	for f in mlx5 mlx4; do \
		$(GO) test -c -o $$d/$$f.test ./rdma/verbs/uverbs/internal/$$f; \
		$$d/compare $$d/libcost $$d/$$f.test $$f; \
	done

format:
	@out=$$(gofmt -l .); [ -z "$$out" ] || { echo "not formatted by gofmt:"; echo "$$out"; exit 1; }

lint:
	$(GO) run $(STATICCHECK) ./...

# The long simulations and load tests belong to make test; make check leaves them out.
unit:
	$(GO) test $(if $(filter test,$(MAKECMDGOALS)),-timeout 15m,-short -timeout 5m) ./...

race: ## the race detector on all that has goroutines or shared memory
	CGO_ENABLED=1 $(GO) test -race -short -timeout 10m $(RACE)

test: deps check race guest ## check, the race detector, then the tests in guests on both kernels (REQUIRE_ALL=1: nothing may be left out)

test check: export REQUIRE_ALL ?= $(if $(filter test,$(MAKECMDGOALS)),1,)

guest: ## only the tests in guests; VMTEST_ONLY=REGEXP chooses by kernel/scenario/name
	$(GO) test -tags guest -count=1 -timeout 40m -v ./internal/vmtest

deps: ## as root install the Debian packages of the guests, fetch the kernels; else say what is missing
	@$(VMTEST) deps

soak: binaries ## against the kernel's target: 100,000 verified commands per mode and depth, 200 logins (half an hour); KERNEL=6.1|6.12
	$(GO) test -c -o bin/srp.test ./srp
	$(VMTEST) run --kernel $(KERNEL) --scenario srpt --timeout 10m --file bin/srp.test -- /root/srp.test -test.v -test.run 'LoginLoop|Load|ReadWrite'
	$(VMTEST) run --kernel $(KERNEL) --scenario srpt --timeout 60m --env LOOPS=100000 --file bin/srp-initiator:/usr/local/bin/srp-initiator --file internal/vmtest/testdata/modes.sh -- sh /root/modes.sh

guest-shell: ## a shell in a guest: KERNEL=6.1|6.12 SCENARIO=srpt (docs/testing.md)
	@$(VMTEST) shell --kernel $(KERNEL) --scenario $(SCENARIO)

fuzz: ## every fuzz target for FUZZTIME each
	@for pkg in $$($(GO) list ./...); do \
		for target in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "== $$pkg $$target"; \
			$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; \
	done

clean: ## remove the guests' kernels and images from the cache
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/srp-initiator/vmtest"
