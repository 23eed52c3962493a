package vmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// CacheDir is where kernels and initramfs images are kept: $XDG_CACHE_HOME/srp-initiator/vmtest or
// ~/.cache/srp-initiator/vmtest. It is created when absent.
func CacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		// A bare environment (cron, CI) may lack HOME.
		base = filepath.Join(os.TempDir(), fmt.Sprintf("cache-%d", os.Getuid()))
	}
	dir := filepath.Join(base, "srp-initiator", "vmtest")
	return dir, os.MkdirAll(dir, 0o755)
}

// lockFile takes an exclusive lock on name below the cache folder and waits for it until ctx ends. notice is called once when somebody else holds it.
func lockFile(ctx context.Context, name string, notice func()) (unlock func(), err error) {
	dir, err := CacheDir()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	said := false
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !said && notice != nil {
			notice()
			said = true
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
