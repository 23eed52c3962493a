//go:build arm64

package udma

import "unsafe"

// StoreOrdered stores val, in the device's byte order, where the device may look at any time: behind all earlier stores.
func StoreOrdered(p unsafe.Pointer, val uint32) { StoreRecord(p, val) }
