package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"srp-initiator/srp/disk"
)

var writeVerb = &verb{
	name: "write", args: "TARGET",
	short: "copy a file or standard input to a logical unit",
	long: `Writes the file -i, or standard input, to the unit at --offset, and has the unit put it on its medium at the end.
Offset and length need not be multiples of the block size: the rest of a block that is written in part stays as it
was. A file that does not fit is refused before anything is written. With --verify everything is read back and compared.`,
	example: `  srp-initiator write srp://10.0.0.1:5555/505400fffe123456 --lun 1 -i lun1.img --verify
  head -c 1M /dev/urandom | srp-initiator write srp://10.0.0.1:5555/505400fffe123456 --offset 1G -i -`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		var l lunFlag
		o := writeOptions{length: -1}
		l.register(fs)
		fs.VarP(&o.offset, "offset", "s", "where to begin, in bytes (K, M, G, T are powers of 1024)")
		fs.VarP(&o.length, "length", "n", "write so many bytes; less input is an error (default: all of the input)")
		fs.StringVarP(&o.in, "input", "i", "-", "file to read, - for standard input")
		fs.BoolVar(&o.verify, "verify", false, "read back and compare; the input must be a file")
		fs.BoolVar(&o.noSync, "no-sync", false, "leave data in the unit's cache")
		f.register(fs)
		return func(e *env) error {
			if err := l.check(); err != nil {
				return err
			}
			r := e.stdin
			known := int64(o.length)
			if o.in != "-" {
				file, err := os.Open(o.in)
				if err != nil {
					return &usageError{err}
				}
				defer file.Close()
				r = file
				st, err := file.Stat()
				if err != nil {
					return &usageError{err}
				}
				if st.IsDir() {
					return usagef("%s is a directory", o.in)
				}
				if st.Mode().IsRegular() {
					if known < 0 {
						known = st.Size()
					} else if known > st.Size() {
						return usagef("%s has %d bytes, fewer than --length %d", o.in, st.Size(), known)
					}
				}
			}
			if _, ok := r.(io.ReaderAt); o.verify && (!ok || o.in == "-") {
				return usagef("--verify needs a file as input (-i FILE)")
			}
			return f.with(e, func(c *connection) error { return e.write(c, &l, &o, r, known) })
		}
	},
}

type writeOptions struct {
	offset, length sizeFlag
	in             string
	verify, noSync bool
}

func (e *env) write(c *connection, l *lunFlag, o *writeOptions, r io.Reader, known int64) error {
	lun, err := l.lun(e.ctx, c.Session)
	if err != nil {
		return err
	}
	d, err := disk.Open(e.ctx, c.Session, lun)
	if err != nil {
		return err
	}
	offset := int64(o.offset)
	if d.ReadOnly() {
		return fmt.Errorf("LUN %s: %w", lun, disk.ErrReadOnly)
	}
	if offset > d.Size() {
		return usagef("--offset %d is beyond the end of LUN %s at %d", offset, lun, d.Size())
	}
	if known > d.Size()-offset {
		return usagef("%d bytes at %d do not fit LUN %s of %d bytes", known, offset, lun, d.Size())
	}
	e.startProgress("written", known)
	n, err := pump(e.ctx, c, known, func(b []byte, at int64) (int, error) {
		n, err := io.ReadFull(r, b)
		if err == io.ErrUnexpectedEOF {
			err = io.EOF
		}
		return n, err
	}, func(b []byte, at int64) error {
		if int64(len(b)) > d.Size()-offset-at {
			return fmt.Errorf("the input does not fit: LUN %s ends at %d", lun, d.Size())
		}
		_, err := d.WriteAtContext(e.ctx, b, offset+at, false)
		return err
	}, e.progress)
	if err == io.EOF {
		err = fmt.Errorf("the input ended after %d of %d bytes", n, known)
	}
	if err != nil {
		return fmt.Errorf("after %d bytes: %w", n, err)
	}
	if !o.noSync {
		if err := d.Sync(e.ctx); err != nil {
			return fmt.Errorf("%d bytes written, but not synchronized: %w", n, err)
		}
	}
	if o.verify {
		e.endProgress()
		e.startProgress("verified", n)
		want := make([]byte, chunk)
		if _, err := pump(e.ctx, c, n, func(b []byte, at int64) (int, error) { return d.ReadAtContext(e.ctx, b, offset+at) },
			func(b []byte, at int64) error {
				if _, err := r.(io.ReaderAt).ReadAt(want[:len(b)], at); err != nil && err != io.EOF {
					return err
				}
				if !bytes.Equal(want[:len(b)], b) {
					i := 0
					for want[i] == b[i] {
						i++
					}
					if at == 0 && len(bytes.TrimLeft(b, "\x00")) == 0 {
						return fmt.Errorf("verification failed: all of the first %d bytes read as zeros: the unit lost them, or keeps nothing at all, as null units do, which cannot be verified", len(b))
					}
					return fmt.Errorf("verification failed: byte %d reads as %02x, written was %02x", offset+at+int64(i), b[i], want[i])
				}
				return nil
			}, e.progress); err != nil {
			return err
		}
	}
	if e.json {
		return e.printJSON(map[string]any{"offset": offset, "length": n, "synchronized": !o.noSync, "verified": o.verify})
	}
	return nil
}
