package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSplice(t *testing.T) {
	f := filepath.Join(t.TempDir(), "doc.md")
	const doc = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
	if err := os.WriteFile(f, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // twice gives the same
		if err := splice(f, "x", strings.NewReader("\nnew\n")); err != nil {
			t.Fatal(err)
		}
	}
	const want = "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
	if got, _ := os.ReadFile(f); string(got) != want {
		t.Errorf("got %q", got)
	}
	if splice(f, "z", strings.NewReader("new")) == nil || splice(f, "x", strings.NewReader(" \n")) == nil {
		t.Error("an unknown section or an empty text was taken")
	}
	if got, _ := os.ReadFile(f); string(got) != want {
		t.Errorf("a refused call changed the document: %q", got)
	}
}
