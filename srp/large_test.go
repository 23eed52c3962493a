package srp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"srp-initiator/srp"
	"srp-initiator/srp/disk"
	"srp-initiator/srp/scsi"
)

// 1 and 8 MiB and a block more, each as one SCSI command whose buffer has 1, 12 or 255 pieces: of uneven lengths, and none but the last ends with a
// block. In registered memory the pieces are described one by one, so that 255 make a full indirect table in the information unit; elsewhere they
// go by way of bounce memory.
func TestLargeCommands(t *testing.T) {
	const most = 8<<20 + 512
	s := newWorld(t).login(t, func(o *srp.LoginOptions) { o.MaxSectors, o.CmdSGEntries = most/512, 255 })
	if n := s.Stats().Channels[0].Descriptors; n != 255 {
		t.Fatalf("%d descriptors in a command", n)
	}
	const room = most + 8*255 // cut leaves gaps
	mem, err := s.AllocMemory(room)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := make([]byte, room)
	want := make([]byte, most)
	do(t, s, read10(0, 1, want[:512])) // takes the unit attention after a login
	for i, c := range []struct {
		size, pieces int
		bounced      bool
	}{
		{1 << 20, 1, false}, {1 << 20, 12, false}, {1 << 20, 255, false}, {1 << 20, 1, true}, {1 << 20, 12, true}, {1 << 20, 255, true},
		{1<<20 + 512, 1, false}, {1<<20 + 512, 12, false}, {1<<20 + 512, 255, false},
		{8 << 20, 1, false}, {8 << 20, 12, false}, {8 << 20, 255, false},
		{most, 12, true}, {most, 255, false},
	} {
		name := fmt.Sprintf("%d bytes in %d pieces, bounced %v", c.size, c.pieces, c.bounced)
		buf := mem.Bytes()
		if c.bounced {
			buf = elsewhere
		}
		lba := uint32(i * 7001)
		pattern(want[:c.size], uint64(i))
		pieces := cut(buf, c.size, c.pieces)
		scatter(pieces, want)
		before := s.Stats().Total
		do(t, s, &srp.Command{CDB: scsi.Write10(lba, uint16(c.size/512)), Dir: srp.DataOut, Gather: pieces})
		for i := range buf {
			buf[i] = 0xa5
		}
		in := &srp.Command{CDB: scsi.Read10(lba, uint16(c.size/512)), Dir: srp.DataIn, Gather: pieces}
		do(t, s, in)
		if in.Residual != 0 {
			t.Errorf("%s: residual %d", name, in.Residual)
		}
		// The pieces hold the data, and what lies between them is nobody's to write.
		left, rest := want[:c.size], buf
		for i, p := range pieces {
			for cap(rest) > cap(p) {
				if rest[0] != 0xa5 {
					t.Fatalf("%s: a byte before piece %d was written", name, i)
				}
				rest = rest[1:]
			}
			if !bytes.Equal(p, left[:len(p)]) {
				t.Fatalf("%s: piece %d differs", name, i)
			}
			left, rest = left[len(p):], rest[len(p):]
		}
		if len(left) > 0 || rest[0] != 0xa5 || !bytes.Equal(rest[1:], rest[:len(rest)-1]) {
			t.Errorf("%s: %d bytes missing, or written behind the last piece", name, len(left))
		}
		after := s.Stats().Total
		if n := after.Commands - before.Commands; n != 2 {
			t.Errorf("%s: %d commands, want a write and a read", name, n)
		}
		if n := after.Bounced - before.Bounced; n != 0 && !c.bounced || n != 2 && c.bounced {
			t.Errorf("%s: %d commands bounced", name, n)
		}
	}
}

// pattern is fill for many bytes: it differs in every word, and from seed to seed.
func pattern(b []byte, seed uint64) {
	x := seed<<40 | 1
	for len(b) >= 8 {
		x += 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(b, x)
		b = b[8:]
	}
	for i := range b {
		b[i] = byte(seed) + byte(i)
	}
}

// The same amounts with tails that are no whole block, through package disk, which splits them into commands of at most 512 KiB and
// reads the blocks at the ends to write them in part.
func TestLargeTransfers(t *testing.T) {
	s := newWorld(t).login(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	d, err := disk.Open(ctx, s, scsi.LUN{})
	if err != nil {
		t.Fatal(err)
	}
	mem, err := s.AllocMemory(9 << 20)
	if err != nil {
		t.Fatal(err)
	}
	for i, size := range []int{1<<20 + 1, 1<<20 - 511, 8<<20 + 513} {
		off := int64(i)*(10<<20) + 4099
		around := make([]byte, 512)
		fill(around, uint64(i))
		edges := []int64{off - 512, off + int64(size)}
		for _, at := range edges {
			if _, err := d.WriteAtContext(ctx, around, at, false); err != nil {
				t.Fatal(err)
			}
		}
		want := mem.Bytes()[3 : 3+size]
		pattern(want, uint64(size))
		sent := s.Stats().Total.Commands
		if n, err := d.WriteAtContext(ctx, want, off, false); n != size || err != nil {
			t.Fatalf("%d bytes at %d: wrote %d, %v", size, off, n, err)
		}
		if n := s.Stats().Total.Commands - sent; n < uint64(size)/uint64(d.MaxTransfer()) {
			t.Errorf("%d bytes went in %d commands of at most %d", size, n, d.MaxTransfer())
		}
		got := make([]byte, size)
		if n, err := d.ReadAtContext(ctx, got, off); n != size || err != nil {
			t.Fatalf("%d bytes at %d: read %d, %v", size, off, n, err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes at %d: data differ", size, off)
		}
		for _, at := range edges {
			if _, err := d.ReadAtContext(ctx, got[:512], at); err != nil || !bytes.Equal(got[:512], around) {
				t.Errorf("%d bytes at %d: the neighbour at %d was changed (%v)", size, off, at, err)
			}
		}
	}
}
