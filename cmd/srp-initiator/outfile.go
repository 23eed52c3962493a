package main

import "os"

// outFile is a file that the user named for what a verb will have. It is opened before anything is sent, so that a name that cannot be
// written is bad input; what it holds stays until there is something to replace it.
type outFile struct {
	file  *os.File
	fresh bool // it was not there before, and nothing has been written
}

// noStdout refuses "-" where it would be a file of that name, since standard output has something else.
func noStdout(flag, path string) error {
	if path == "-" {
		return usagef("--%s -: standard output has what the command prints; want the name of a file", flag)
	}
	return nil
}

func openOutput(path string) (*outFile, error) {
	_, err := os.Stat(path)
	o := &outFile{fresh: os.IsNotExist(err)}
	if o.file, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666); err != nil {
		return nil, &usageError{err}
	}
	return o, nil
}

// begin empties the file; what is written from now on is its content.
func (o *outFile) begin() error {
	o.fresh = false
	if st, err := o.file.Stat(); err != nil || !st.Mode().IsRegular() {
		return err
	}
	return o.file.Truncate(0)
}

func (o *outFile) Write(b []byte) (int, error) { return o.file.Write(b) }

// close removes the file if it was made for nothing.
func (o *outFile) close() error {
	if o.fresh {
		os.Remove(o.file.Name())
	}
	return o.file.Close()
}
