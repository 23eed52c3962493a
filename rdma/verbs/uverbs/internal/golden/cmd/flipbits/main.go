// flipbits changes one bit of one integer literal at a time in the adapter drivers and tells which changes no test notices.
//
//	go run ./rdma/verbs/uverbs/internal/golden/cmd/flipbits [-all | -one] [-seed N] [-j N] [-only REGEXP]
//
// A package's literals are wrapped in a call that flips a bit when the environment says so, so one build of each test binary serves them
// all; literals that must stay constants get builds of their own. The tests of a change run in the order of suites, until one fails.
// allow.txt holds the changes that mean nothing, with the reason. The exit code is 1 when others survive.
package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"math/bits"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const base = "rdma/verbs/uverbs/"

// suite is one run of a test binary.
type suite struct {
	pkg  string // below base
	args []string
	cpu  int // seconds after which it hangs
}

func own(pkg string) suite {
	return suite{pkg, []string{"-test.failfast", "-test.skip=StoreOrder"}, 30}
}

var control = suite{".", []string{"-test.failfast", "-test.run=Golden"}, 30}

func order(pkg string) suite { return suite{pkg, []string{"-test.run=StoreOrder"}, 120} }

func models(families string) suite {
	return suite{"mlxtest", []string{"-test.failfast", "-test.short", "-test.run=Golden|/" + families}, 120}
}

// suites says, for each package whose literals are changed, what must notice.
var suites = map[string][]suite{
	"internal/mlx5":  {own("internal/mlx5"), control, models("mlx5")},
	"internal/mlx4":  {own("internal/mlx4"), control, models("mlx4")},
	"internal/ring":  {own("internal/ring"), own("internal/mlx5"), own("internal/mlx4"), control, models("mlx")},
	"internal/udma":  {own("internal/udma"), own("internal/mlx5"), own("internal/mlx4"), order("internal/mlx5"), order("internal/mlx4"), models("mlx")},
	"internal/dbrec": {own("internal/dbrec"), control, models("mlx")},
}

// literal is one integer in the source.
type literal struct {
	id       int
	pkg      string
	file     string // absolute
	from, to int
	text     string
	value    uint64
	typ      string // "" when it must stay a constant
	where    string // file:declaration
	line     string // its source line, the literal between guillemets
	pos      token.Position
}

func (l *literal) key() string { return l.where + " | " + l.line }

// width is the bits that -all flips: those of the literal's bytes.
func (l *literal) width() int { return max(8, (bits.Len64(l.value)+7)/8*8) }

type change struct {
	*literal
	bit int
}

func main() {
	all := flag.Bool("all", false, "flip every bit of a literal's bytes, not the lowest and another one")
	one := flag.Bool("one", false, "flip one bit of a literal, the lowest or another one by chance")
	seed := flag.Uint64("seed", 1, "chooses the other bit")
	jobs := flag.Int("j", 2, "changes tried at a time")
	only := flag.String("only", "", "only literals whose `file:declaration` matches")
	flag.Parse()
	if err := run(*all, *one, *seed, *jobs, *only); err != nil {
		fmt.Fprintln(os.Stderr, "flipbits:", err)
		os.Exit(1)
	}
}

func run(all, one bool, seed uint64, jobs int, only string) error {
	want, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return fmt.Errorf("go list -m: %w", err)
	}
	tmp, err := os.MkdirTemp("", "flipbits")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	b := &builder{root: strings.TrimSpace(string(root)), tmp: tmp}
	allowed, err := readAllowed()
	if err != nil {
		return err
	}
	var changes []change
	r := rand.New(rand.NewPCG(seed, 0))
	keys := map[string]bool{}
	for _, pkg := range slices.Sorted(maps.Keys(suites)) {
		lits, err := b.literals(pkg)
		if err != nil {
			return err
		}
		constants, chosen := 0, 0
		for _, l := range lits {
			keys[l.key()] = true
			other, low := 1+r.IntN(max(bits.Len64(l.value), 4)-1), !one || r.IntN(2) == 0
			if !want.MatchString(l.where) {
				continue
			}
			chosen++
			if l.typ == "" {
				constants++
			}
			for bit := range l.width() {
				if all || bit == 0 && low || bit == other && !(one && low) {
					changes = append(changes, change{l, bit})
				}
			}
		}
		fmt.Printf("%-16s %d literals of %d, %d of them constants\n", pkg, chosen, len(lits), constants)
		if chosen == 0 {
			continue
		}
		if err := b.wrapped(pkg, lits); err != nil {
			return err
		}
	}
	for k := range allowed {
		if !keys[k] {
			fmt.Printf("allow.txt has a line for what is not there: %s\n", k)
		}
	}
	start := time.Now()
	var (
		mu     sync.Mutex
		by     = map[string]int{}
		failed error
		left   []change
		next   int
		wg     sync.WaitGroup
	)
	for worker := range jobs {
		wg.Go(func() {
			for {
				mu.Lock()
				if next == len(changes) || failed != nil {
					mu.Unlock()
					return
				}
				c := changes[next]
				next++
				mu.Unlock()
				by1, err := b.try(c, worker)
				mu.Lock()
				switch {
				case err != nil:
					failed = err
				case by1 != "":
					by[by1]++
				case allowed[c.key()].covers(c.bit):
					by["nobody, and allow.txt says why"]++
				default:
					left = append(left, c)
					fmt.Printf("survives: %s:%d bit %d of %s\n\t%s\n", c.where, c.pos.Line, c.bit, c.text, c.key())
				}
				if next%100 == 0 {
					fmt.Printf("%d of %d changes, %d survivors, %v\n", next, len(changes), len(left), time.Since(start).Round(time.Second))
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if failed != nil {
		return failed
	}
	for _, k := range slices.Sorted(maps.Keys(by)) {
		fmt.Printf("%5d noticed by %s\n", by[k], k)
	}
	if len(left) > 0 {
		return fmt.Errorf("%d of %d changes survive unexplained", len(left), len(changes))
	}
	fmt.Printf("%d changes, none survives unexplained (%v)\n", len(changes), time.Since(start).Round(time.Second))
	return nil
}

// literals lists the integers in the non-test files of pkg.
func (b *builder) literals(pkg string) ([]*literal, error) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}\t{{.Dir}}\t{{join .GoFiles \" \"}}", "./"+base+pkg)
	cmd.Dir = b.root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	exports := map[string]string{}
	var self []string // the package itself comes last
	for line := range strings.Lines(string(out)) {
		self = strings.Split(strings.TrimRight(line, "\n"), "\t")
		exports[self[0]] = self[1]
	}
	fset := token.NewFileSet()
	var files []*ast.File
	src := map[string][]byte{}
	for _, name := range strings.Fields(self[3]) {
		path := filepath.Join(self[2], name)
		if src[path], err = os.ReadFile(path); err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(fset, path, src[path], parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	conf := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	if _, err := conf.Check(self[0], fset, files, info); err != nil {
		return nil, err
	}
	var lits []*literal
	for _, f := range files {
		for _, d := range f.Decls {
			decl := ""
			switch d := d.(type) {
			case *ast.FuncDecl:
				decl = d.Name.Name
			case *ast.GenDecl:
				if d.Tok == token.IMPORT || len(d.Specs) == 0 {
					continue
				}
				decl = d.Tok.String()
			}
			constant := map[ast.Node]bool{}
			var path []ast.Node // from d down to n
			ast.Inspect(d, func(n ast.Node) bool {
				if n == nil {
					path = path[:len(path)-1]
					return true
				}
				path = append(path, n)
				mark := func(e ast.Node) { // everything below must stay constant
					if e != nil {
						ast.Inspect(e, func(n ast.Node) bool { constant[n] = true; return true })
					}
				}
				switch n := n.(type) {
				case *ast.GenDecl:
					if n.Tok == token.CONST {
						mark(n)
					}
				case *ast.ArrayType:
					if n.Len != nil {
						mark(n.Len)
					}
				case *ast.CompositeLit:
					for _, e := range n.Elts {
						if kv, ok := e.(*ast.KeyValueExpr); ok {
							mark(kv.Key)
						}
					}
				case *ast.BasicLit:
					if n.Kind != token.INT {
						return true
					}
					pos := fset.Position(n.Pos())
					v, err := strconv.ParseUint(n.Value, 0, 64)
					if err != nil {
						panic(pos.String() + ": " + err.Error())
					}
					s := src[pos.Filename]
					begin := bytes.LastIndexByte(s[:pos.Offset], '\n') + 1
					end := pos.Offset + bytes.IndexByte(s[pos.Offset:], '\n')
					l := &literal{id: len(lits) + 1, pkg: pkg, file: pos.Filename, from: pos.Offset, to: pos.Offset + len(n.Value), text: n.Value, value: v, pos: pos,
						where: strings.TrimPrefix(pkg, "internal/") + "/" + filepath.Base(pos.Filename) + ":" + decl}
					l.line = strings.TrimSpace(string(s[begin:l.from])) + "«" + n.Value + "»" + string(s[l.to:end])
					if t := typeOf(info, path); !constant[n] {
						l.typ = types.TypeString(t, func(p *types.Package) string {
							if p.Path() == self[0] {
								return ""
							}
							return p.Name()
						})
					}
					lits = append(lits, l)
				}
				return true
			})
		}
	}
	return lits, nil
}

// typeOf is the type that the literal at the end of path has once it is no constant: its own, or that of the constant
// expression around it.
func typeOf(info *types.Info, path []ast.Node) types.Type {
	for i := len(path) - 1; i >= 0; i-- {
		e, ok := path[i].(ast.Expr)
		if !ok {
			break
		}
		if b, ok := e.(*ast.BinaryExpr); ok && (b.Op == token.SHL || b.Op == token.SHR) && b.Y == path[i+1] {
			break // a shift count may have any type
		}
		if t, ok := info.Types[e].Type.(*types.Basic); !ok || t.Info()&types.IsUntyped == 0 {
			return info.Types[e].Type
		}
	}
	return types.Typ[types.Int]
}

// builder makes test binaries and remembers them.
type builder struct {
	root, tmp string
}

// overlay writes the files with the given texts in place of literals, and returns go's -overlay argument.
func (b *builder) overlay(dir string, lits []*literal, text func(*literal) string, extra map[string]string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	byFile := map[string][]*literal{}
	for _, l := range lits {
		byFile[l.file] = append(byFile[l.file], l)
	}
	contents := maps.Clone(extra)
	if contents == nil {
		contents = map[string]string{}
	}
	for file, list := range byFile {
		src, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		var out strings.Builder
		at := 0
		for _, l := range list { // in the order of the source
			out.Write(src[at:l.from])
			out.WriteString(text(l))
			at = l.to
		}
		out.Write(src[at:])
		contents[file] = out.String()
	}
	replace := map[string]string{}
	for file, text := range contents {
		to := filepath.Join(dir, filepath.Base(file))
		if err := os.WriteFile(to, []byte(text), 0o644); err != nil {
			return "", err
		}
		replace[file] = to
	}
	js, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "overlay.json")
	return name, os.WriteFile(name, js, 0o644)
}

func (b *builder) build(overlay, pkg, to string) ([]byte, error) {
	cmd := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay, "-o", to, "./"+base+pkg)
	cmd.Dir = b.root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	return cmd.CombinedOutput()
}

func (b *builder) binary(pkg, of string) string {
	return filepath.Join(b.tmp, strings.ReplaceAll(pkg, "/", "-"), strings.ReplaceAll(of, "/", "-")+".test")
}

const flipper = `package %s

import (
	"os"
	"strconv"
)

var flipAt, flipMask = func() (int, uint64) {
	at, _ := strconv.Atoi(os.Getenv("FLIP_LITERAL"))
	bit, _ := strconv.Atoi(os.Getenv("FLIP_BIT"))
	return at, 1 << bit
}()

func flipped[T ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~uintptr](id int, v T) T {
	if id == flipAt {
		return v ^ T(flipMask)
	}
	return v
}
`

// wrapped builds the binaries that serve all literals of pkg but constants, and runs their tests unchanged.
func (b *builder) wrapped(pkg string, lits []*literal) error {
	dir := filepath.Dir(b.binary(pkg, "x"))
	overlay, err := b.overlay(dir, lits, func(l *literal) string {
		if l.typ == "" {
			return l.text
		}
		return fmt.Sprintf("flipped[%s](%d, %s)", l.typ, l.id, l.text)
	}, map[string]string{filepath.Join(filepath.Dir(lits[0].file), "flipped.go"): fmt.Sprintf(flipper, filepath.Base(pkg))})
	if err != nil {
		return err
	}
	for _, s := range suites[pkg] {
		bin := b.binary(pkg, s.pkg)
		if _, err := os.Stat(bin); err != nil {
			if out, err := b.build(overlay, s.pkg, bin); err != nil {
				return fmt.Errorf("build of %s: %w\n%s", s.pkg, err, out)
			}
		}
		start := time.Now()
		if out, ok := b.run(bin, s, nil); !ok {
			return fmt.Errorf("%s %v fails unchanged:\n%s", s.pkg, s.args, out)
		}
		fmt.Printf("%-16s unchanged: %s %v passes in %v\n", pkg, s.pkg, s.args, time.Since(start).Round(100*time.Millisecond))
	}
	return nil
}

// run runs a test binary within limits of processor time and memory, and reports whether it passed.
func (b *builder) run(bin string, s suite, env []string) (string, bool) {
	if _, err := os.Stat(bin); err != nil {
		return "no tests", true // go test -c makes none for a package without test files
	}
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", append([]string{"-c", fmt.Sprintf(`ulimit -t %d -v 8000000; exec "$@"`, s.cpu), "-", bin}, s.args...)...)
	cmd.Dir = filepath.Join(b.root, base, s.pkg)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err == nil
}

// try makes a change and returns what notices it, "" for nothing.
func (b *builder) try(c change, worker int) (string, error) {
	overlay := ""
	dir := filepath.Join(b.tmp, fmt.Sprintf("worker%d", worker))
	if c.typ == "" {
		var err error
		if overlay, err = b.overlay(dir, []*literal{c.literal}, func(l *literal) string { return fmt.Sprintf("%#x", l.value^1<<c.bit) }, nil); err != nil {
			return "", err
		}
		defer os.RemoveAll(dir)
	}
	for i, s := range suites[c.pkg] {
		bin := b.binary(c.pkg, s.pkg)
		if overlay != "" {
			if i == 0 || s.pkg != suites[c.pkg][0].pkg {
				bin = filepath.Join(dir, fmt.Sprintf("%d.test", i))
				if _, err := b.build(overlay, s.pkg, bin); err != nil {
					return "the compiler", nil
				}
			} else {
				bin = filepath.Join(dir, "0.test")
			}
		}
		if _, ok := b.run(bin, s, []string{fmt.Sprintf("FLIP_LITERAL=%d", c.id), fmt.Sprintf("FLIP_BIT=%d", c.bit)}); !ok {
			return "tests of " + strings.Join(append([]string{s.pkg}, s.args...), " "), nil
		}
	}
	return "", nil
}

//go:embed allow.txt
var allowText string

// allowance is the bits of one literal that may change unnoticed.
type allowance struct {
	every bool
	bits  []int
}

func (a allowance) covers(bit int) bool { return a.every || slices.Contains(a.bits, bit) }

// readAllowed reads allow.txt: groups of a reason ("# ..."), then lines "bits  file:declaration | source line".
func readAllowed() (map[string]allowance, error) {
	all := map[string]allowance{}
	reason := ""
	for n, line := range strings.Split(allowText, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			reason = ""
		case strings.HasPrefix(line, "#"):
			reason += line[1:]
		default:
			list, key, ok := strings.Cut(line, " ")
			if !ok || strings.TrimSpace(reason) == "" {
				return nil, fmt.Errorf("allow.txt:%d: neither a reason nor an entry below one", n+1)
			}
			a := allowance{every: list == "*"}
			if !a.every {
				for _, s := range strings.Split(list, ",") {
					bit, err := strconv.Atoi(s)
					if err != nil {
						return nil, fmt.Errorf("allow.txt:%d: %w", n+1, err)
					}
					a.bits = append(a.bits, bit)
				}
			}
			all[strings.TrimSpace(key)] = a
		}
	}
	return all, nil
}
