package vmtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Kernels are the kernel series that guests can run, in the order in which tests use them.
var Kernels = []string{"6.1", "6.12"}

// Kernel is an unpacked kernel in the cache folder.
type Kernel struct {
	Series  string // "6.1" or "6.12"
	Version string // as uname -r says it
	Image   string // path of vmlinuz
	Modules string // path of a folder lib/modules/Version with the modules of a guest, uncompressed, and depmod's tables
}

// modules are what guests may load; what a kernel has built in or lacks is skipped. Dependencies are found with depmod's table.
var modules = []string{
	"9p", "9pnet_virtio", "virtio_pci", "virtio_net", "virtio_blk", "virtio_console", "virtio_rng",
	"crc32_generic", "rdma_rxe", "ib_uverbs", "rdma_ucm", "ib_umad",
	"ib_srp", "ib_srpt", "target_core_mod", "target_core_file", "target_core_iblock", "target_core_pscsi",
	"sd_mod", "sg", "scsi_debug", "loop", "nbd", "null_blk", "ext4", "configfs",
	"veth", "dummy", "bridge", "sch_netem", "sch_ingress", "act_mirred", "cls_u32", "cls_matchall", "af_packet", "tun",
}

var packageOf = map[string]*regexp.Regexp{
	"6.1":  regexp.MustCompile(`^linux-image-(6\.1\.0-[0-9]+)-amd64$`),
	"6.12": regexp.MustCompile(`^linux-image-(6\.12\.[0-9]+\+deb12)-amd64$`),
}

// PrepareKernel finds the series' kernel in the cache folder or, when there is none, downloads Debian's newest package of it with apt-get and unpacks it there. Nothing is installed.
// With update set, as root, it may run apt-get update when the package lists know no such kernel.
func PrepareKernel(ctx context.Context, series string, update bool, log func(string)) (*Kernel, error) {
	re := packageOf[series]
	if re == nil {
		return nil, fmt.Errorf("kernel %q: allowed are %s", series, strings.Join(Kernels, ", "))
	}
	unlock, err := lockFile(ctx, "prepare.lock", func() { log("waiting for another preparation to end") })
	if err != nil {
		return nil, err
	}
	defer unlock()
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	seriesDir := filepath.Join(cache, "kernel-"+series)
	if k, err := cachedKernel(series, seriesDir); err == nil {
		return k, nil
	}
	pkg, err := newestPackage(ctx, re)
	if err == nil && pkg == "" && update && os.Getuid() == 0 {
		if err = aptGet(ctx, "", "update", "-q"); err == nil {
			pkg, err = newestPackage(ctx, re)
		}
	}
	if err != nil {
		return nil, err
	}
	if pkg == "" {
		return nil, fmt.Errorf("kernel %s: apt-cache knows no package like %s; Debian 12's main and security sections are needed, and as root: apt-get update", series, re)
	}
	log("downloading " + pkg)
	// A half-made folder of an interrupted run is thrown away; the finished one appears by rename.
	work := seriesDir + ".new"
	if err := os.RemoveAll(work); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(work, 0o755); err != nil {
		return nil, err
	}
	args := []string{"download", "-q"}
	if os.Getuid() == 0 {
		args = append(args, "-o", "APT::Sandbox::User=root")
	}
	if err := aptGet(ctx, work, append(args, pkg)...); err != nil {
		return nil, err
	}
	debs, _ := filepath.Glob(filepath.Join(work, "*.deb"))
	if len(debs) != 1 {
		return nil, fmt.Errorf("apt-get download %s left %d packages, want 1", pkg, len(debs))
	}
	tree := filepath.Join(work, "tree")
	if err := run(ctx, "dpkg", "-x", debs[0], tree); err != nil {
		return nil, err
	}
	version := strings.TrimPrefix(pkg, "linux-image-")
	if err := depmod(ctx, tree, version); err != nil {
		return nil, err
	}
	if err := stageModules(ctx, tree, work, version); err != nil {
		return nil, err
	}
	if err := os.Rename(filepath.Join(tree, "boot", "vmlinuz-"+version), filepath.Join(work, "vmlinuz-"+version)); err != nil {
		return nil, err
	}
	// The guest's own build configuration answers "was this built in?" for people at its shell.
	if err := os.Rename(filepath.Join(tree, "boot", "config-"+version), filepath.Join(work, "config-"+version)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := os.RemoveAll(tree); err != nil {
		return nil, err
	}
	if err := os.Remove(debs[0]); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(work, "modules.list"), []byte(strings.Join(modules, " ")), 0o644); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(seriesDir); err != nil {
		return nil, err
	}
	if err := os.Rename(work, seriesDir); err != nil {
		return nil, err
	}
	return cachedKernel(series, seriesDir)
}

func cachedKernel(series, dir string) (*Kernel, error) {
	list, err := os.ReadFile(filepath.Join(dir, "modules.list"))
	if err != nil {
		return nil, err
	}
	if string(list) != strings.Join(modules, " ") {
		return nil, errors.New("cached kernel was made for another list of modules")
	}
	images, err := filepath.Glob(filepath.Join(dir, "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return nil, fmt.Errorf("%s: %d kernel images", dir, len(images))
	}
	version := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	return &Kernel{Series: series, Version: version, Image: images[0], Modules: filepath.Join(dir, "lib", "modules", version)}, nil
}

// newestPackage asks apt-cache for the packages that match re and returns the one with the highest number.
func newestPackage(ctx context.Context, re *regexp.Regexp) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-6.").Output()
	if err != nil {
		return "", fmt.Errorf("apt-cache pkgnames: %w", err)
	}
	var found []string
	for name := range strings.Lines(string(out)) {
		if name = strings.TrimSpace(name); re.MatchString(name) {
			found = append(found, name)
		}
	}
	if len(found) == 0 {
		return "", nil
	}
	return slices.MaxFunc(found, compareNumbers), nil
}

var digits = regexp.MustCompile(`[0-9]+`)

// compareNumbers orders names by the numbers in them, first to last.
func compareNumbers(a, b string) int {
	na, nb := digits.FindAllString(a, -1), digits.FindAllString(b, -1)
	for i := range min(len(na), len(nb)) {
		x, _ := strconv.Atoi(na[i])
		y, _ := strconv.Atoi(nb[i])
		if x != y {
			return x - y
		}
	}
	return len(na) - len(nb)
}

// stageModules copies the wanted modules and all that they depend on from tree to dst, uncompressed: the
// kernel of 6.1 and busybox's modprobe read no .ko.xz.
func stageModules(ctx context.Context, tree, dst, version string) error {
	src := filepath.Join(tree, "lib", "modules", version)
	deps, err := readDeps(filepath.Join(src, "modules.dep"))
	if err != nil {
		return err
	}
	byName := map[string]string{}
	for path := range deps {
		byName[moduleName(path)] = path
	}
	wanted := map[string]bool{}
	var want func(path string)
	want = func(path string) {
		if wanted[path] {
			return
		}
		wanted[path] = true
		for _, d := range deps[path] {
			want(d)
		}
	}
	for _, m := range modules {
		if path, ok := byName[m]; ok {
			want(path)
		}
	}
	// Soft dependencies that carry the checksum algorithms of ext4 and rxe.
	for _, m := range []string{"crc32c_generic", "crc16", "mbcache", "jbd2"} {
		if path, ok := byName[m]; ok {
			want(path)
		}
	}
	out := filepath.Join(dst, "lib", "modules", version)
	for path := range wanted {
		to := filepath.Join(out, strings.TrimSuffix(path, ".xz"))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if !strings.HasSuffix(path, ".xz") {
			if err := os.Rename(filepath.Join(src, path), to); err != nil {
				return err
			}
			continue
		}
		f, err := os.Create(to)
		if err != nil {
			return err
		}
		cmd := exec.CommandContext(ctx, "xz", "-dc", filepath.Join(src, path))
		cmd.Stdout = f
		err = cmd.Run()
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return fmt.Errorf("xz -dc %s: %w", path, err)
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := os.Rename(filepath.Join(src, name), filepath.Join(out, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return depmod(ctx, dst, version)
}

func moduleName(path string) string {
	name := strings.TrimSuffix(filepath.Base(path), ".xz")
	return strings.ReplaceAll(strings.TrimSuffix(name, ".ko"), "-", "_")
}

// readDeps parses modules.dep: "path: path path ...".
func readDeps(path string) (map[string][]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	deps := map[string][]string{}
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		name, rest, ok := strings.Cut(sc.Text(), ":")
		if !ok {
			return nil, fmt.Errorf("%s: line without colon: %q", path, sc.Text())
		}
		deps[name] = strings.Fields(rest)
	}
	return deps, sc.Err()
}

func depmod(ctx context.Context, base, version string) error {
	return run(ctx, "depmod", "-b", base, version)
}

// run runs a program and puts its output into the error when it fails.
func run(ctx context.Context, program string, args ...string) error {
	path, err := lookPath(program)
	if err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, path, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, out)
	}
	return nil
}
