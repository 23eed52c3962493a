package lun

import (
	"cmp"
	"os"
	"sync"
)

// flusher makes a store's data durable, one flush after the other. A flush covers whoever has asked for it before it began, and nobody
// who asks meanwhile: what those have written it may have missed. So nobody waits for more than two flushes, however often others ask.
type flusher struct {
	mu      sync.Mutex
	running bool       // guarded by mu, as what follows
	closed  bool       // no further flush begins
	behind  bool       // the next flush has an asker that was answered before it
	waiting []*flushed // the next flush's other askers
	err     error      // of a flush that nobody waited for, not yet told
	idle    sync.Cond
}

// flushed is what one asker waits for.
type flushed struct {
	done chan struct{}
	err  error
}

// begin starts a flush of st; of those that are asked for while one is under way one follows it.
func (f *flusher) begin(st Store) {
	if !st.WriteBack() {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	f.behind = true
	if !f.running {
		f.running = true
		go f.run(st)
	}
}

// flush waits for a flush of st that began after the call. Its error may be one of a flush that was under way then: that may have met the
// caller's data. An error that nobody has been told of comes out too.
func (f *flusher) flush(st Store) error {
	if !st.WriteBack() {
		return st.Sync()
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return os.ErrClosed
	}
	w := &flushed{done: make(chan struct{}), err: f.err}
	f.err = nil
	f.waiting = append(f.waiting, w)
	if f.running {
		f.mu.Unlock()
		<-w.done
		return w.err
	}
	f.running = true
	f.onceLocked(st)
	if f.wantedLocked() { // not by the caller, who has what it came for
		go f.run(st)
	} else {
		f.restLocked()
	}
	f.mu.Unlock()
	return w.err
}

// run flushes while somebody asks.
func (f *flusher) run(st Store) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.wantedLocked() {
		f.onceLocked(st)
	}
	f.restLocked()
}

func (f *flusher) wantedLocked() bool { return f.behind || len(f.waiting) > 0 }

func (f *flusher) restLocked() {
	f.running = false
	if f.closed {
		f.idle.Broadcast()
	}
}

// onceLocked flushes for whoever has asked by now, without the lock.
func (f *flusher) onceLocked(st Store) {
	covered := f.waiting
	f.behind, f.waiting = false, nil
	f.mu.Unlock()
	err := st.Sync()
	f.mu.Lock()
	if len(covered) == 0 && len(f.waiting) == 0 {
		f.err = cmp.Or(f.err, err)
	}
	for _, w := range f.waiting {
		w.err = cmp.Or(w.err, err)
	}
	for _, w := range covered {
		w.err = cmp.Or(w.err, err)
		close(w.done)
	}
}

// close waits for what has been asked for, and takes the error that nobody has been told of.
func (f *flusher) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.idle.L = &f.mu
	for f.running {
		f.idle.Wait()
	}
	err := f.err
	f.err = nil
	return err
}
