package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

// chunk is how much read and write hold in memory for one side while the other works on as much.
const chunk = 4 << 20

var readVerb = &verb{
	name: "read", args: "TARGET",
	short: "copy from a logical unit to a file or standard output",
	long: `Reads --length bytes at --offset (default: all from there to the end) and writes them to the file -o, or to standard
output. Offset and length need not be multiples of the block size. It succeeds only when every byte was written.`,
	example: `  srp-initiator read srp://10.0.0.1:5555/505400fffe123456 --lun 1 -o lun1.img
  srp-initiator read srp://10.0.0.1:5555/505400fffe123456 --offset 1M --length 512 -o - | xxd`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		var l lunFlag
		var out string
		var offset sizeFlag
		length := sizeFlag(-1)
		l.register(fs)
		fs.VarP(&offset, "offset", "s", "where to begin, in bytes (K, M, G, T are powers of 1024)")
		fs.VarP(&length, "length", "n", "how many bytes (default: to the end of the unit)")
		fs.StringVarP(&out, "output", "o", "-", "file to write, - for standard output")
		f.register(fs)
		return func(e *env) error {
			if err := l.check(); err != nil {
				return err
			}
			var file *outFile
			if out != "-" {
				var err error
				if file, err = openOutput(out); err != nil {
					return err
				}
			}
			err := f.with(e, func(c *connection) error { return e.read(c, &l, int64(offset), int64(length), file) })
			if file != nil {
				err = errors.Join(err, file.close())
			}
			return err
		}
	},
}

func (e *env) read(c *connection, l *lunFlag, offset, length int64, file *outFile) error {
	// file is nil for standard output.
	lun, err := l.lun(e.ctx, c.Session)
	if err != nil {
		return err
	}
	d, err := disk.Open(e.ctx, c.Session, lun)
	if err != nil {
		return err
	}
	if offset > d.Size() {
		return usagef("--offset %d is beyond the end of LUN %s at %d", offset, lun, d.Size())
	}
	if length < 0 {
		length = d.Size() - offset
	}
	if length > d.Size()-offset {
		return usagef("--offset %d and --length %d reach beyond the end of LUN %s at %d", offset, length, lun, d.Size())
	}
	var w io.Writer = e.stdout
	if file != nil {
		if err := file.begin(); err != nil {
			return err
		}
		w = file
	}
	e.startProgress("read", length)
	n, err := pump(e.ctx, c, length, func(b []byte, at int64) (int, error) {
		n, err := d.ReadAtContext(e.ctx, b, offset+at)
		if err == io.EOF && n == len(b) {
			err = nil
		}
		return n, err
	}, func(b []byte, at int64) error {
		n, err := w.Write(b)
		if err == nil && n < len(b) {
			err = io.ErrShortWrite
		}
		return err
	}, e.progress)
	if err == nil && n != length {
		err = fmt.Errorf("read %d of %d bytes", n, length)
	}
	if err != nil {
		return fmt.Errorf("at byte %d: %w", offset+n, err)
	}
	if e.json && file != nil {
		return e.printJSON(map[string]int64{"offset": offset, "length": n})
	}
	return nil
}

// pump moves up to total bytes (negative: until the source ends with io.EOF) by two buffers in registered memory: one is being filled while
// the other is being emptied. It returns how many bytes were emptied.
func pump(ctx context.Context, c *connection, total int64, fill func(b []byte, at int64) (int, error), empty func(b []byte, at int64) error, told func(int64)) (int64, error) {
	m, err := c.AllocMemory(2 * chunk)
	if err != nil {
		return 0, err
	}
	type piece struct {
		buf []byte
		n   int
		at  int64
		err error
	}
	full, free := make(chan piece), make(chan []byte, 2)
	free <- m.Bytes()[:chunk]
	free <- m.Bytes()[chunk : 2*chunk]
	stop, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(full)
		for at := int64(0); total < 0 || at < total; {
			var b []byte
			select {
			case b = <-free:
			case <-stop.Done():
				return
			}
			want := b
			if total >= 0 && total-at < int64(len(b)) {
				want = b[:total-at]
			}
			n, err := fill(want, at)
			select {
			case full <- piece{b, n, at, err}:
			case <-stop.Done():
				return
			}
			if err != nil {
				return
			}
			at += int64(n)
		}
	}()
	defer func() {
		cancel()
		<-ended // its memory is in use until then
		m.Free()
	}()
	done := int64(0)
	for {
		select {
		case p, ok := <-full:
			if !ok {
				return done, context.Cause(ctx)
			}
			if p.n > 0 {
				if err := empty(p.buf[:p.n], p.at); err != nil {
					return done, err
				}
				done += int64(p.n)
				told(done)
			}
			if p.err == io.EOF && total < 0 {
				return done, nil
			}
			if p.err != nil {
				return done, p.err
			}
			free <- p.buf
		case <-ctx.Done():
			return done, context.Cause(ctx)
		}
	}
}
