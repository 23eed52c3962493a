package vmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

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

// lockFile takes an exclusive lock on name below the cache folder and waits for it until ctx ends. notice is called
// once when somebody else holds it. Waiters are served in the order in which they came, as the kernel queues them.
func lockFile(ctx context.Context, name string, notice func()) (unlock func(), err error) {
	dir, err := CacheDir()
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	release := func() { f.Close() }
	err = flock(f, unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return release, nil
	}
	if !errors.Is(err, unix.EWOULDBLOCK) {
		release()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	if notice != nil {
		notice()
	}
	taken := make(chan error, 1)
	go func() { taken <- flock(f, unix.LOCK_EX) }()
	select {
	case err := <-taken:
		if err != nil {
			release()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		return release, nil
	case <-ctx.Done():
		// A blocked flock cannot be called back: whenever it gets the lock, it gives it up at once.
		go func() { <-taken; release() }()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), ctx.Err())
	}
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
