package vmtest

import (
	"bufio"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed guest
var guestScripts embed.FS

// An archive collects files for an initramfs and writes them in cpio's "newc" form (kernel:
// Documentation/driver-api/early-userspace/buffer-format.rst). Paths are relative, without a leading slash.
type archive struct {
	entries map[string]entry
}

type entry struct {
	mode   uint32 // as in st_mode
	data   []byte // of links and generated files
	source string // host path of a regular file, when data is nil
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeLink = 0o120000
)

func newArchive() *archive { return &archive{entries: map[string]entry{}} }

func (a *archive) add(name string, e entry) {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		if _, ok := a.entries[dir]; !ok {
			a.entries[dir] = entry{mode: modeDir | 0o755}
		}
	}
	a.entries[name] = e
}

func (a *archive) dir(name string) { a.add(name, entry{mode: modeDir | 0o755}) }
func (a *archive) link(name, target string) {
	a.add(name, entry{mode: modeLink | 0o777, data: []byte(target)})
}
func (a *archive) bytes(name string, mode uint32, data []byte) {
	a.add(name, entry{mode: modeFile | mode, data: data})
}

// file adds the host's file under its own path (merged into /usr as Debian does) and returns that path.
func (a *archive) file(host string) (string, error) {
	real, err := filepath.EvalSymlinks(host)
	if err != nil {
		return "", err
	}
	st, err := os.Stat(real)
	if err != nil {
		return "", err
	}
	name := usrMerged(host)
	a.add(name, entry{mode: modeFile | uint32(st.Mode().Perm()), source: real})
	return name, nil
}

func usrMerged(host string) string {
	name := strings.TrimPrefix(path.Clean(host), "/")
	for _, top := range []string{"bin/", "sbin/", "lib/", "lib64/"} {
		if strings.HasPrefix(name, top) {
			return "usr/" + name
		}
	}
	return name
}

// program adds an executable or shared object with the libraries that ldd names.
func (a *archive) program(ctx context.Context, host string) error {
	if _, err := a.file(host); err != nil {
		return err
	}
	// ldd fails for static programs and scripts: they need nothing.
	out, err := exec.CommandContext(ctx, "ldd", host).Output()
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		for _, f := range fields {
			if !strings.HasPrefix(f, "/") {
				continue
			}
			if _, err := a.file(f); err != nil {
				return fmt.Errorf("library of %s: %w", host, err)
			}
		}
		if strings.Contains(line, "not found") {
			return fmt.Errorf("%s: %s", host, strings.TrimSpace(line))
		}
	}
	return nil
}

// tree adds all below the host's folder under name.
func (a *archive) tree(name, host string) error {
	return filepath.WalkDir(host, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(host, p)
		if err != nil {
			return err
		}
		if d.IsDir() {
			a.dir(path.Join(name, rel))
			return nil
		}
		a.add(path.Join(name, rel), entry{mode: modeFile | 0o644, source: p})
		return nil
	})
}

// digest identifies the archive: names, modes, generated contents, and size and time of the host's files.
func (a *archive) digest() (string, error) {
	h := sha256.New()
	for _, name := range a.names() {
		e := a.entries[name]
		fmt.Fprintf(h, "%s %o %q", name, e.mode, e.data)
		if e.source != "" {
			st, err := os.Stat(e.source)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, " %d %d", st.Size(), st.ModTime().UnixNano())
		}
		fmt.Fprintln(h)
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

func (a *archive) names() []string {
	names := make([]string, 0, len(a.entries))
	for name := range a.entries {
		names = append(names, name)
	}
	slices.Sort(names) // a folder sorts before what is in it
	return names
}

func (a *archive) writeTo(w io.Writer) error {
	bw := bufio.NewWriterSize(w, 1<<20)
	for i, name := range a.names() {
		e := a.entries[name]
		data := e.data
		if e.source != "" {
			var err error
			if data, err = os.ReadFile(e.source); err != nil {
				return err
			}
		}
		if err := writeEntry(bw, uint32(i+1), name, e.mode, data); err != nil {
			return err
		}
	}
	if err := writeEntry(bw, 0, "TRAILER!!!", 0, nil); err != nil {
		return err
	}
	return bw.Flush()
}

func writeEntry(w io.Writer, ino uint32, name string, mode uint32, data []byte) error {
	// ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0, name)
	for _, part := range [][]byte{[]byte(head), data} {
		if _, err := w.Write(part); err != nil {
			return err
		}
		if pad := -len(part) & 3; pad != 0 {
			if _, err := w.Write(make([]byte, pad)); err != nil {
				return err
			}
		}
	}
	return nil
}

// buildInitramfs returns the path of the kernel's initramfs, made once and cached by what is in it.
func buildInitramfs(ctx context.Context, k *Kernel, log func(string)) (string, error) {
	unlock, err := lockFile(ctx, "prepare.lock", func() { log("waiting for another preparation to end") })
	if err != nil {
		return "", err
	}
	defer unlock()
	a := newArchive()
	for _, d := range []string{"dev", "proc", "sys", "run", "tmp", "root", "etc/target", "host", "mnt", "var/run", "var/target", "usr/bin", "usr/sbin", "usr/lib64"} {
		a.dir(d)
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		a.link(d, "usr/"+d)
	}
	if err := a.tree("usr/lib/modules/"+k.Version, k.Modules); err != nil {
		return "", err
	}
	for _, t := range tools {
		if !t.guest {
			continue
		}
		p, err := lookPath(t.program)
		if err != nil {
			return "", err
		}
		if err := a.program(ctx, p); err != nil {
			return "", err
		}
	}
	for _, f := range guestFiles {
		if err := a.program(ctx, f.path); err != nil {
			return "", err
		}
	}
	busybox, err := lookPath("busybox")
	if err != nil {
		return "", err
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return "", fmt.Errorf("busybox --list: %w", err)
	}
	box := "/" + usrMerged(busybox)
	for name := range strings.Lines(string(applets)) {
		// Last in the guest's PATH, so that the real tools win.
		a.link("usr/lib/busybox/"+strings.TrimSpace(name), box)
	}
	dash, err := lookPath("dash")
	if err != nil {
		return "", err
	}
	// Not busybox's sh: that one prefers busybox's own ip and tc to the real ones, whatever the PATH.
	a.link("usr/bin/sh", "/"+usrMerged(dash))
	a.link("usr/sbin/modprobe", box)
	for _, f := range []struct {
		name, to string
		mode     uint32
	}{{"init", "init", 0o755}, {"guest.sh", "usr/lib/guest.sh", 0o644}, {"guestctl", "usr/bin/guestctl", 0o755}} {
		data, err := guestScripts.ReadFile("guest/" + f.name)
		if err != nil {
			return "", err
		}
		a.bytes(f.to, f.mode, data)
	}
	a.bytes("etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	a.bytes("etc/group", 0o644, []byte("root:x:0:\n"))
	a.bytes("etc/hosts", 0o644, []byte("127.0.0.1 localhost\n::1 localhost\n"))
	a.bytes("etc/nsswitch.conf", 0o644, []byte("passwd: files\ngroup: files\nhosts: files\n"))

	sum, err := a.digest()
	if err != nil {
		return "", err
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	image := filepath.Join(cache, fmt.Sprintf("initramfs-%s-%s.cpio", k.Series, sum))
	if _, err := os.Stat(image); err == nil {
		return image, nil
	}
	log("building initramfs for " + k.Version)
	// Older images of this series are of no use any more; a running guest has already read its own.
	old, _ := filepath.Glob(filepath.Join(cache, fmt.Sprintf("initramfs-%s-*", k.Series)))
	for _, o := range old {
		os.Remove(o)
	}
	f, err := os.Create(image + ".new")
	if err != nil {
		return "", err
	}
	err = a.writeTo(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		os.Remove(f.Name())
		return "", err
	}
	return image, os.Rename(f.Name(), image)
}
