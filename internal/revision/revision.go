// Package revision says what a program was built from.
package revision

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"runtime/debug"
)

// commit is set by the linker (make binaries): the go command itself does not stamp what is built in a linked work tree.
var commit string

// Program says as exactly as the program knows what it was built from: the commit, or a released version of the module, or at
// least which executable it is.
func Program() string {
	if commit != "" {
		return commit
	}
	b, ok := debug.ReadBuildInfo()
	if ok {
		vcs, modified := "", ""
		for _, s := range b.Settings {
			switch {
			case s.Key == "vcs.revision":
				vcs = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				modified = ", modified"
			}
		}
		if vcs != "" {
			return vcs + modified
		}
		if v := b.Main.Version; v != "" && v != "(devel)" {
			return b.Main.Path + " " + v
		}
	}
	const none = "built without a revision"
	f, err := os.Open("/proc/self/exe")
	if err != nil {
		return none
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return none
	}
	return fmt.Sprintf("%s, SHA-256 of the executable %x", none, h.Sum(nil)[:8])
}
