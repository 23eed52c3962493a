package vmtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// tool is a program that the host or the guest needs and the Debian 12 package that has it.
type tool struct {
	program string
	pkg     string
	guest   bool // also goes into the initramfs, with its libraries
}

var tools = []tool{
	{"qemu-system-x86_64", "qemu-system-x86", false},
	{"xz", "xz-utils", false},
	{"depmod", "kmod", false},
	{"dpkg", "dpkg", false},
	{"ldd", "libc-bin", false},
	{"busybox", "busybox-static", true},
	{"bash", "bash", true},
	{"dash", "dash", true},
	{"ip", "iproute2", true},
	{"tc", "iproute2", true},
	{"rdma", "iproute2", true},
	{"ibv_devinfo", "ibverbs-utils", true},
	{"rping", "rdmacm-utils", true},
	{"sg_inq", "sg3-utils", true},
	{"sg_luns", "sg3-utils", true},
	{"sg_readcap", "sg3-utils", true},
	{"sg_turs", "sg3-utils", true},
	{"sg_raw", "sg3-utils", true},
	{"sg_vpd", "sg3-utils", true},
	{"fio", "fio", true},
	{"mkfs.ext4", "e2fsprogs", true},
	{"fsck.ext4", "e2fsprogs", true},
	{"strace", "strace", true},
	{"tcpdump", "tcpdump", true},
}

// guestFiles go into the initramfs as they are: libibverbs loads its rxe provider by name.
var guestFiles = []struct{ path, pkg string }{
	{"/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so", "ibverbs-providers"},
	{"/etc/libibverbs.d/rxe.driver", "ibverbs-providers"},
}

// MissingPackagesError names the Debian packages to install before a guest can be built.
type MissingPackagesError struct{ Packages []string }

func (e *MissingPackagesError) Error() string {
	return "missing Debian packages; as root run: apt-get install -y --no-install-recommends " + strings.Join(e.Packages, " ")
}

// lookPath finds program also in the sbin folders, which an ordinary user's PATH leaves out.
func lookPath(program string) (string, error) {
	if p, err := exec.LookPath(program); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		p := dir + "/" + program
		if st, err := os.Stat(p); err == nil && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: not found", program)
}

func missingPackages() []string {
	var missing []string
	seen := map[string]bool{}
	add := func(pkg string) {
		if !seen[pkg] {
			seen[pkg] = true
			missing = append(missing, pkg)
		}
	}
	for _, t := range tools {
		if _, err := lookPath(t.program); err != nil {
			add(t.pkg)
		}
	}
	for _, f := range guestFiles {
		if _, err := os.Stat(f.path); err != nil {
			add(f.pkg)
		}
	}
	return missing
}

// EnsurePackages returns a MissingPackagesError when a needed program is absent. As root with install set it
// first installs what is missing with apt-get; log gets a line per step.
func EnsurePackages(ctx context.Context, install bool, log func(string)) error {
	missing := missingPackages()
	if len(missing) == 0 {
		return nil
	}
	if !install || os.Getuid() != 0 {
		return &MissingPackagesError{missing}
	}
	log("installing " + strings.Join(missing, " "))
	if err := aptGet(ctx, "", append([]string{"install", "-y", "-q", "--no-install-recommends"}, missing...)...); err != nil {
		// Package lists may be old or absent: bring them up to date once.
		if err := aptGet(ctx, "", "update", "-q"); err != nil {
			return err
		}
		if err := aptGet(ctx, "", append([]string{"install", "-y", "-q", "--no-install-recommends"}, missing...)...); err != nil {
			return err
		}
	}
	if missing = missingPackages(); len(missing) != 0 {
		return &MissingPackagesError{missing}
	}
	return nil
}

func aptGet(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}
