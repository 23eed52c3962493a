// Command splice puts what it reads into a document, between the lines
// "<!-- begin NAME -->" and "<!-- end NAME -->": it is how measured tables get into docs/benchmarks.md.
//
//	bin/versus peers | go run ./bench/splice docs/benchmarks.md peers
package main

import (
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: splice DOCUMENT SECTION < TEXT")
		os.Exit(2)
	}
	if err := splice(os.Args[1], os.Args[2], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "splice:", err)
		os.Exit(1)
	}
}

func splice(file, name string, in io.Reader) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(text)) == "" {
		return fmt.Errorf("section %s: nothing to put there; the document stays as it was", name)
	}
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	begin, end := "<!-- begin "+name+" -->\n", "<!-- end "+name+" -->\n"
	head, rest, ok1 := strings.Cut(string(old), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		return fmt.Errorf("%s has no section %s (lines %q and %q)", file, name, strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return os.WriteFile(file, []byte(head+begin+"\n"+strings.TrimSpace(string(text))+"\n\n"+end+tail), 0o644)
}
