// Package tidy holds the house rules that no compiler holds: which package may import which, where unsafe may be
// used, that exported names are documented, and that nothing unfinished is left.
package tidy

import (
	"bytes"
	"go/ast"
	"go/build/constraint"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "srp-initiator"

// allowed is the import table: for each package what its files (tests apart) may import besides the standard
// library. A name ending in /... covers all below and the package itself. Every package of the module has a row.
var allowed = map[string][]string{
	"cmd/srp-initiator": {"rdma", "rdma/selftest", "rdma/verbs", "rdma/cm", "srp", "srp/scsi", "srp/disk", "completion", "bench",
		"cmd/srp-initiator/internal/nbd", "github.com/spf13/pflag", "golang.org/x/sys/unix"},
	"cmd/srp-initiator/internal/nbd": {},
	"cmd/target-emu":                 {"rdma", "rdma/verbs", "rdma/cm", "completion", "target-emu", "target-emu/lun", "internal/revision", "github.com/spf13/pflag", "golang.org/x/sys/unix"},

	"rdma": {"rdma/verbs", "rdma/cm", "rdma/verbs/uverbs", "rdma/cm/ucm", "rdma/softroce",
		"github.com/Mellanox/rdmamap", "github.com/jaypipes/ghw", "golang.org/x/sys/unix"},
	"rdma/hostmem":                          {"golang.org/x/sys/unix"},
	"rdma/verbs":                            {"rdma/hostmem"},
	"rdma/selftest":                         {"rdma/verbs", "rdma/verbs/verbstest", "rdma/hostmem", "golang.org/x/sys/unix"},
	"rdma/verbs/verbstest":                  {"rdma/verbs", "rdma/cm", "rdma/hostmem"},
	"rdma/verbs/uverbs":                     {"rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs/internal/...", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/internal/abi":        {},
	"rdma/verbs/uverbs/internal/udma":       {},
	"rdma/verbs/uverbs/internal/dbrec":      {"rdma/hostmem"},
	"rdma/verbs/uverbs/internal/ring":       {"rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs/internal/abi", "rdma/verbs/uverbs/internal/dbrec", "rdma/verbs/uverbs/internal/kernel", "rdma/verbs/uverbs/internal/udma", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/internal/golden":     {"rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs/internal/abi", "rdma/verbs/uverbs/internal/kernel", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/internal/storetrace": {"rdma/verbs/uverbs/internal/golden", "internal/require", "golang.org/x/arch/x86/x86asm", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/mlxtest":             {"rdma/verbs", "rdma/cm", "rdma/verbs/uverbs", "rdma/verbs/uverbs/internal/...", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/internal/numtable":   {},
	"rdma/verbs/uverbs/internal/kernel":     {"rdma/verbs/uverbs/internal/abi", "rdma/verbs", "golang.org/x/sys/unix"},
	"rdma/verbs/uverbs/internal/provider":   {"rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs/internal/abi", "rdma/verbs/uverbs/internal/kernel"},
	"rdma/verbs/uverbs/internal/rxe":        deviceFamily,
	"rdma/verbs/uverbs/internal/mlx5":       connectX,
	"rdma/verbs/uverbs/internal/mlx4":       connectX,
	"rdma/cm":                               {"rdma/verbs"},
	"rdma/cm/cmtest":                        {"rdma/cm", "rdma/verbs", "rdma/hostmem"},
	"rdma/cm/ucm":                           {"rdma/cm", "rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs", "golang.org/x/sys/unix"},
	"rdma/softroce":                         {"rdma/verbs", "rdma/cm", "rdma/hostmem", "rdma/softroce/...", "golang.org/x/sys/unix"},
	"rdma/softroce/packet":                  {"golang.org/x/sys/cpu"},
	"rdma/softroce/rc":                      {"rdma/softroce/packet", "rdma/verbs"},
	"rdma/softroce/udp":                     {"rdma/softroce/packet", "golang.org/x/sys/unix"},
	"rdma/softroce/ibcm":                    {"rdma/softroce/packet", "rdma/verbs", "rdma/cm"},
	"rdma/softroce/simnet":                  {"rdma/softroce/packet"},
	"rdma/softroce/simlink":                 {"rdma/softroce", "rdma/softroce/packet", "rdma/softroce/simnet", "rdma/softroce/udp", "rdma/verbs"},

	"completion": {"rdma/verbs", "golang.org/x/sys/unix"},
	"srp":        {"rdma/verbs", "rdma/cm", "rdma/hostmem", "completion", "srp/iu", "srp/scsi"},
	"srp/iu":     {"srp/scsi"},
	"srp/scsi":   {},
	"srp/disk":   {"srp", "srp/scsi", "completion"},

	"target-emu":             {"rdma/verbs", "rdma/cm", "rdma/hostmem", "completion", "srp/iu", "srp/scsi", "target-emu/lun"},
	"target-emu/lun":         {"rdma/hostmem", "srp/scsi", "golang.org/x/sys/unix"},
	"target-emu/lun/luntest": {"target-emu/lun"},
	"bench":                  {"github.com/HdrHistogram/hdrhistogram-go", "gonum.org/v1/plot/...", "rdma/verbs", "completion", "srp", "srp/scsi", "srp/disk", "internal/revision", "golang.org/x/sys/unix"},

	"bench/limit":  {"rdma/hostmem", "github.com/spf13/pflag", "golang.org/x/sys/unix"},
	"bench/splice": {},
	"bench/versus": {"bench", "bench/limit", "github.com/spf13/pflag", "golang.org/x/sys/unix"},

	"rdma/verbs/uverbs/internal/golden/cmd/flipbits": {},
	"rdma/verbs/uverbs/internal/golden/cmd/libcost":  {},

	"internal/revision":          {},
	"internal/require":           {},
	"internal/vmtest":            {"golang.org/x/sys/unix"},
	"internal/vmtest/cmd/vmtest": {"internal/vmtest"},
}

// deviceFamily is the row of each family of devices: none imports another.
var deviceFamily = []string{"rdma/verbs", "rdma/hostmem", "rdma/verbs/uverbs/internal/abi", "rdma/verbs/uverbs/internal/udma", "rdma/verbs/uverbs/internal/dbrec",
	"rdma/verbs/uverbs/internal/kernel", "rdma/verbs/uverbs/internal/numtable", "rdma/verbs/uverbs/internal/provider", "golang.org/x/sys/unix"}

// connectX is the row of the two families whose rings are alike.
var connectX = append(slices.Clone(deviceFamily), "rdma/verbs/uverbs/internal/ring")

// testOnly packages are imported by tests and by each other alone.
var testOnly = []string{"rdma/softroce/simnet", "rdma/cm/cmtest", "rdma/verbs/uverbs/internal/golden", "rdma/softroce/simlink", "rdma/verbs/uverbs/mlxtest",
	"rdma/verbs/uverbs/internal/golden", "rdma/verbs/uverbs/internal/storetrace", "internal/require", "internal/vmtest", "target-emu/lun/luntest"}

// pure packages are protocol brains: time, randomness and the network are arguments there.
var pure = []string{"rdma/softroce/rc", "rdma/softroce/packet", "srp/iu", "srp/scsi"}

type file struct {
	rel  string // slash-separated path from the module's root
	dir  string
	test bool
	src  []byte
	ast  *ast.File
	fset *token.FileSet
}

func (f *file) at(p token.Pos) string {
	pos := f.fset.Position(p)
	return f.rel + ":" + strconv.Itoa(pos.Line)
}

func files(t *testing.T) []*file {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	var all []*file
	fset := token.NewFileSet()
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if p != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		src, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		a, err := parser.ParseFile(fset, p, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		all = append(all, &file{rel: rel, dir: path.Dir(rel), test: strings.HasSuffix(name, "_test.go"), src: src, ast: a, fset: fset})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Fatal("no Go files found")
	}
	return all
}

// ignored reports a generator or the like: a file that no build of the module includes.
func ignored(f *file) bool {
	for _, g := range f.ast.Comments {
		for _, c := range g.List {
			if c.Pos() > f.ast.Package {
				return false
			}
			if constraint.IsGoBuild(c.Text) && strings.Contains(c.Text, "ignore") {
				return true
			}
		}
	}
	return false
}

func covers(pattern, name string) bool {
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return name == base || strings.HasPrefix(name, base+"/")
	}
	return pattern == name
}

func TestImportTable(t *testing.T) {
	noted := map[string]bool{}
	for _, f := range files(t) {
		if f.test || ignored(f) || f.dir == "internal/tidy" {
			continue
		}
		row, ok := allowed[f.dir]
		if !ok {
			if !noted[f.dir] {
				t.Errorf("package %s has no row in the import table (internal/tidy)", f.dir)
				noted[f.dir] = true
			}
			continue
		}
		for _, imp := range f.ast.Imports {
			name, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			ours, isOurs := strings.CutPrefix(name, module+"/")
			if !isOurs {
				ours = name
				if first, _, _ := strings.Cut(name, "/"); !strings.Contains(first, ".") {
					continue // standard library
				}
			}
			if !slices.ContainsFunc(row, func(p string) bool { return covers(p, ours) }) {
				t.Errorf("%s: package %s must not import %s (import table in internal/tidy)", f.at(imp.Pos()), f.dir, ours)
			}
		}
	}
}

// TestUnsafe keeps package unsafe in small files that say so in their names, and cgo out.
func TestUnsafe(t *testing.T) {
	for _, f := range files(t) {
		base := strings.TrimSuffix(path.Base(f.rel), ".go")
		named := false
		for _, part := range strings.Split(base, "_") {
			named = named || part == "unsafe"
		}
		for _, imp := range f.ast.Imports {
			switch imp.Path.Value {
			case `"C"`:
				t.Errorf("%s: cgo is not used here", f.at(imp.Pos()))
			case `"unsafe"`:
				if !named {
					t.Errorf("%s: unsafe only in files named *_unsafe.go", f.at(imp.Pos()))
				}
			}
		}
		if !named && bytes.Contains(f.src, []byte("//go:"+"linkname")) {
			t.Errorf("%s: go:linkname only in files named *_unsafe.go", f.rel)
		}
	}
}

func TestPackageNames(t *testing.T) {
	vague := []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base"}
	for _, f := range files(t) {
		if slices.Contains(vague, f.ast.Name.Name) {
			t.Errorf("%s: package name %q says nothing", f.rel, f.ast.Name.Name)
		}
	}
}

// TestPure: no clock, no socket and no goroutine in the protocol brains, so that whole sessions run in virtual time.
func TestPure(t *testing.T) {
	for _, f := range files(t) {
		if f.test || !slices.Contains(pure, f.dir) {
			continue
		}
		for _, imp := range f.ast.Imports {
			switch name, _ := strconv.Unquote(imp.Path.Value); name {
			case "net", "os", "syscall", "math/rand", "math/rand/v2", "crypto/rand", "golang.org/x/sys/unix", "runtime":
				t.Errorf("%s: %s must not import %s", f.at(imp.Pos()), f.dir, name)
			}
		}
		ast.Inspect(f.ast, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: %s must not start goroutines", f.at(n.Pos()), f.dir)
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains([]string{"Now", "Sleep", "After", "NewTimer", "AfterFunc", "Since", "Tick", "NewTicker"}, n.Sel.Name) {
					t.Errorf("%s: %s must not read a clock (time.%s)", f.at(n.Pos()), f.dir, n.Sel.Name)
				}
			}
			return true
		})
	}
}

func TestNothingUnfinished(t *testing.T) {
	for _, f := range files(t) {
		if f.dir == "internal/tidy" {
			continue
		}
		for _, word := range []string{"TO" + "DO", "FIX" + "ME", "XX" + "X:", "not impl" + "emented yet"} {
			if i := bytes.Index(f.src, []byte(word)); i >= 0 {
				t.Errorf("%s:%d: %q", f.rel, 1+bytes.Count(f.src[:i], []byte("\n")), word)
			}
		}
	}
}

func TestFormatted(t *testing.T) {
	for _, f := range files(t) {
		want, err := format.Source(f.src)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(want, f.src) {
			t.Errorf("%s: not formatted by gofmt", f.rel)
		}
	}
}

// TestDocumented: every exported name of a public package, and every package, has a comment.
func TestDocumented(t *testing.T) {
	type pkg struct {
		doc bool
		pos string
	}
	pkgs := map[string]*pkg{}
	for _, f := range files(t) {
		if f.test || ignored(f) {
			continue
		}
		p := pkgs[f.dir]
		if p == nil {
			p = &pkg{pos: f.rel}
			pkgs[f.dir] = p
		}
		p.doc = p.doc || f.ast.Doc != nil
		if strings.Contains("/"+f.dir+"/", "/internal/") || strings.HasPrefix(f.dir, "cmd/") {
			continue
		}
		for _, d := range f.ast.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				if d.Name.IsExported() && d.Doc == nil && receiverExported(d) && !obvious(d) {
					t.Errorf("%s: %s is not documented", f.at(d.Pos()), d.Name.Name)
				}
			case *ast.GenDecl:
				if enumeration(d) {
					continue
				}
				last, spoken := 0, false // line where the previous spec ended, and whether its paragraph has a comment
				for _, s := range d.Specs {
					first := f.fset.Position(s.Pos()).Line
					if first != last+1 {
						spoken = false
					}
					spoken = undocumented(t, f, d, s, spoken)
					last = f.fset.Position(s.End()).Line
				}
			}
		}
	}
	for dir, p := range pkgs {
		if !p.doc {
			t.Errorf("%s: package %s has no package comment", p.pos, dir)
		}
	}
}

// undocumented reports a spec without a comment of its own, of its group, or of its paragraph in the group
// (spoken). It returns whether the paragraph has one.
func undocumented(t *testing.T, f *file, d *ast.GenDecl, s ast.Spec, spoken bool) bool {
	t.Helper()
	switch s := s.(type) {
	case *ast.TypeSpec:
		if s.Name.IsExported() && s.Doc == nil && s.Comment == nil && d.Doc == nil {
			t.Errorf("%s: type %s is not documented", f.at(s.Pos()), s.Name.Name)
		}
	case *ast.ValueSpec:
		spoken = spoken || s.Doc != nil
		for _, n := range s.Names {
			if n.IsExported() && s.Comment == nil && d.Doc == nil && !spoken {
				t.Errorf("%s: %s is not documented", f.at(n.Pos()), n.Name)
			}
		}
	}
	return spoken
}

// enumeration reports a const group of one named type, whose own comment speaks for its values.
func enumeration(d *ast.GenDecl) bool {
	if d.Tok != token.CONST || len(d.Specs) < 2 {
		return false
	}
	_, ok := d.Specs[0].(*ast.ValueSpec).Type.(*ast.Ident)
	return ok
}

func receiverExported(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	typ := d.Recv.List[0].Type
	if s, ok := typ.(*ast.StarExpr); ok {
		typ = s.X
	}
	if x, ok := typ.(*ast.IndexExpr); ok {
		typ = x.X
	}
	id, ok := typ.(*ast.Ident)
	return ok && id.IsExported()
}

// obvious methods carry a contract of the standard library in their names.
func obvious(d *ast.FuncDecl) bool {
	return d.Recv != nil && slices.Contains([]string{"String", "Error", "Unwrap", "Is", "As", "Read", "Write", "ReadAt", "WriteAt", "Len", "Less", "Swap",
		"MarshalJSON", "UnmarshalJSON", "MarshalText", "UnmarshalText", "GoString", "Format", "Timeout", "Temporary"}, d.Name.Name)
}

// TestTestOnly: what exists for tests stays out of what is shipped.
func TestTestOnly(t *testing.T) {
	for _, f := range files(t) {
		if f.test || slices.ContainsFunc(testOnly, func(p string) bool { return covers(p+"/...", f.dir) }) {
			continue
		}
		for _, imp := range f.ast.Imports {
			name, _ := strconv.Unquote(imp.Path.Value)
			if slices.Contains(testOnly, strings.TrimPrefix(name, module+"/")) {
				t.Errorf("%s: only tests import %s", f.at(imp.Pos()), name)
			}
		}
	}
}
