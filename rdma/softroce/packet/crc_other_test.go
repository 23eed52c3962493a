//go:build !amd64

package packet

import "testing"

func forceFold(*testing.T) {}
