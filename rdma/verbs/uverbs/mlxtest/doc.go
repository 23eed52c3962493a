// Package mlxtest models ConnectX adapters, for tests: mlx5 and mlx4, kernel
// driver and hardware, on memory of this process. The binding above the kernel
// seam, the drivers and everything on top of them run on it unchanged.
//
// A Net carries any number of devices and executes what their queue pairs are asked to do, RC semantics as IBA vol. 1 chapter 9
// has them. Its one goroutine plays all adapters:
//
//	driver   writes WQEs, doorbell record, register           (mapped memory)
//	engine   sees the register's word change, takes it away, reads the record and the WQEs, checks keys,
//	         copies between the ends' buffers, writes CQEs, and an event to the channel's pipe when armed
//	driver   finds the CQE by its owner bit
//
// A register of a model is memory, not a bus: two stores to one word before the engine looks are one. The engine therefore
// looks at all queue pairs that share a page when one of its words changes, as it
// does at all completion queues when an arm word changes. That a doorbell was rung at all, with what value and in which order, is
// what the recorded vectors prove; that driver and model read each other's bytes alike does not prove that either
// is right, so the model's codecs are held to the same recordings.
//
// What a driver may not do (a WQE with a wrong index, a stamped line inside a WQE, a record that runs ahead
// of the ring) is not answered with an error completion but kept as a fault, which Net.Faults reports.
package mlxtest
