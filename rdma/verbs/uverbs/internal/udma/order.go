//go:build !race

package udma

// Published is called before work is handed to a device, Observed when its answer has been seen. They
// do nothing but in race detector builds, where they stand for the order that the device makes.
func Published() {}

// Observed see Published.
func Observed() {}
