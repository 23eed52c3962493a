package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// progress draws how far a transfer is, on a terminal.
type progress struct {
	w     io.Writer
	what  string
	total int64 // -1: not known
	began time.Time
	drawn time.Time
	width int
}

// startProgress draws on standard error if that is a terminal; else it does nothing.
func (e *env) startProgress(what string, total int64) {
	f, ok := e.stderr.(*os.File)
	if !ok || e.json {
		return
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return
	}
	e.mu.Lock()
	e.line = &progress{w: e.stderr, what: what, total: total, began: time.Now()}
	e.mu.Unlock()
}

func (e *env) progress(done int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.line
	if p == nil || time.Since(p.drawn) < 200*time.Millisecond {
		return
	}
	p.draw(done)
}

func (p *progress) draw(done int64) {
	p.drawn = time.Now()
	rate := int64(float64(done) / max(time.Since(p.began).Seconds(), 1e-3))
	s := fmt.Sprintf("%s %s", p.what, humanSize(done))
	if p.total > 0 {
		s += fmt.Sprintf(" of %s, %d%%", humanSize(p.total), done*100/p.total)
	}
	s += fmt.Sprintf(", %s/s", humanSize(rate))
	fmt.Fprintf(p.w, "\r%s%s", s, strings.Repeat(" ", max(0, p.width-len(s))))
	p.width = len(s)
}

func (p *progress) clear() {
	fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", p.width))
	p.width = 0
}

func (e *env) endProgress() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.line != nil {
		e.line.clear()
		e.line = nil
	}
}
