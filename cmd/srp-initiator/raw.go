package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"srp-initiator/bench"
	"srp-initiator/srp"
	"srp-initiator/srp/scsi"
)

// mostOut bounds what --out reads into memory. Sessions take far less per command.
const mostOut = 256 << 20

// leastCDB is the shortest that SPC-4 has, in bytes.
const leastCDB = 6

var rawVerb = &verb{
	name: "raw", args: "TARGET CDB",
	short: "send a SCSI command given as bytes",
	long: `Sends one command descriptor block of 6 to 32 bytes, given in hexadecimal, and shows status, residual, sense and data.
Nothing is retried or interpreted: what the target says is what you see. --in receives up to so many bytes, --out sends
a file.`,
	example: `  srp-initiator raw srp://10.0.0.1:5555/505400fffe123456 "12 00 00 00 60 00" --in 96
  srp-initiator raw srp://10.0.0.1:5555/505400fffe123456 28000000000000000100 --in 512 -o block0.bin`,
	flags: func(fs *pflag.FlagSet) func(*env) error {
		var f connectFlags
		var l lunFlag
		var out, data string
		in := sizeFlag(-1)
		l.register(fs)
		fs.Var(&in, "in", "receive up to so many bytes")
		fs.StringVar(&data, "out", "", "send the bytes of this file, - for standard input")
		fs.StringVarP(&out, "output", "o", "", "write what is received to this file (default: shown as a dump)")
		f.register(fs)
		return func(e *env) error {
			if err := l.check(); err != nil {
				return err
			}
			cdb, err := scsi.ParseCDB(e.args[1])
			var length scsi.CDBLengthError
			if errors.As(err, &length) || err == nil && cdb.Len() < leastCDB {
				return usagef("CDB %q: has %s, want %d to %d", e.args[1], bench.Counted(max(int(length), cdb.Len()), "byte"), leastCDB, scsi.MaxCDBLen)
			}
			if err != nil {
				return &usageError{err}
			}
			c := srp.Command{CDB: cdb}
			switch {
			case in >= 0 && data != "":
				return usagef("--in and --out exclude each other")
			case out != "" && in <= 0:
				return usagef("--output goes with --in from 1 up: without it nothing is received")
			case out == "-" && e.json:
				return usagef("--output - and --json both say what standard output gets: want one of them, or the name of a file")
			case in > 1<<30:
				return usagef("--in %d: want 0 to 1G", in)
			case in > 0:
				c.Dir, c.Data = srp.DataIn, make([]byte, in)
			case data != "":
				in := e.stdin
				if data != "-" {
					file, err := os.Open(data)
					if err != nil {
						return &usageError{err}
					}
					defer file.Close()
					in = file
				}
				if c.Data, err = io.ReadAll(io.LimitReader(in, mostOut+1)); err != nil {
					return &usageError{err}
				}
				if len(c.Data) > mostOut {
					return usagef("--out %s: has more than %d bytes, which no command takes", data, mostOut)
				}
				if len(c.Data) > 0 {
					c.Dir = srp.DataOut
				}
			}
			var file *outFile
			if out != "" && out != "-" {
				if file, err = openOutput(out); err != nil {
					return err
				}
			}
			err = f.with(e, func(s *connection) error {
				if c.LUN, err = l.lun(e.ctx, s.Session); err != nil {
					return err
				}
				return e.raw(s, &c, out, file)
			})
			if file != nil {
				err = errors.Join(err, file.close())
			}
			return err
		}
	},
}

func (e *env) raw(s *connection, c *srp.Command, out string, file *outFile) error {
	err := s.Do(e.ctx, c)
	if c.Err != nil || err != nil && !isStatus(err) {
		return err
	}
	n := 0
	if c.Dir == srp.DataIn {
		n = max(0, min(c.Transferred(), len(c.Data)))
	}
	f := newFacts(c.CDB.String())
	f.add("status", fmt.Sprintf("%s (0x%02x)", c.Status, uint8(c.Status)))
	switch {
	case c.Residual > 0:
		f.add("residual", fmt.Sprintf("underflow: %d of %d bytes did not move", c.Residual, c.Length()))
	case c.Residual < 0:
		f.add("residual", fmt.Sprintf("overflow: %d bytes more than the buffer's %d", -c.Residual, c.Length()))
	}
	if e.json {
		f.add("residual_bytes", c.Residual)
	}
	if sense := c.Sense(); len(sense) > 0 {
		if s, ok := scsi.ParseSense(sense); ok {
			f.add("sense", s.String())
		}
		f.add("sense_bytes", hex.EncodeToString(sense))
	}
	if file != nil && (n > 0 || err == nil) {
		if err := file.begin(); err != nil {
			return err
		}
		if _, err := file.Write(c.Data[:n]); err != nil {
			return err
		}
	}
	if n > 0 {
		if out == "-" {
			if _, err := e.stdout.Write(c.Data[:n]); err != nil {
				return err
			}
		} else if file == nil && e.json {
			f.add("data", hex.EncodeToString(c.Data[:n]))
		}
	}
	switch {
	case e.json:
		if err := e.printJSON(f); err != nil {
			return err
		}
		if err != nil {
			return &shown{err}
		}
	case out != "-":
		f.print(e)
		if n > 0 && out == "" {
			fmt.Fprint(e.stdout, hex.Dump(c.Data[:n]))
		}
	}
	return err
}

// shown is an error whose facts have been printed as JSON already.
type shown struct{ error }

func (s *shown) Unwrap() error { return s.error }

func isStatus(err error) bool {
	var cc *scsi.CheckConditionError
	var st *scsi.StatusError
	return errors.As(err, &cc) || errors.As(err, &st)
}
