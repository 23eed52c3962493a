//go:build race

package udma

import "sync/atomic"

// deviceOrder stands for the order that a device makes: what happened before a request was
// posted happened before its completion was seen. The race detector knows Go's own synchronisation only.
var deviceOrder atomic.Uint32

// Published is called before work is handed to a device.
func Published() { deviceOrder.Add(1) }

// Observed is called when a device's answer has been seen.
func Observed() { deviceOrder.Load() }
