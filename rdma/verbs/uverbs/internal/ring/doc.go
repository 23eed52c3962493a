// Package ring is the rings that a ConnectX adapter and a driver share, as far as they are the same in the families mlx4 and mlx5, whatever
// an entry holds: completions that change hands by an owner bit, receives with their work request ids, the memory and doorbell record of a queue, and
// what a queue refuses. Send entries are each family's own. (A ring of rxe is the kernel's, with indices that both sides read.)
//
// Rings, records and ids are mapped memory outside Go's heap. Fields of entries and records are big-endian.
package ring
