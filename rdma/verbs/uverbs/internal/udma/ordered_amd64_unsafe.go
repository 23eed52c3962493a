//go:build amd64

package udma

import "unsafe"

// StoreOrdered stores val, in the device's byte order, where the device may look at any time: behind all earlier stores.
// On amd64 stores are seen in program order, and Go's compiler keeps the order of stores through pointers; the
// drivers' traces (trace_test.go) look at the machine code as it runs.
func StoreOrdered(p unsafe.Pointer, val uint32) { *(*uint32)(p) = val }
