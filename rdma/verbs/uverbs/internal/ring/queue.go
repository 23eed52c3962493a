package ring

import (
	"srp-initiator/rdma/hostmem"
	"srp-initiator/rdma/verbs/uverbs/internal/abi"
	"srp-initiator/rdma/verbs/uverbs/internal/dbrec"
	"srp-initiator/rdma/verbs/uverbs/internal/kernel"
)

// Queue is what a completion queue or queue pair owns: memory that the adapter reads and writes, and the kernel's name for it.
type Queue struct {
	Pages  *hostmem.Region // rings, and behind those of a queue pair, on pages that the adapter does not see, what is noted of requests
	Record []byte          // doorbell record
	ID     uint32

	records *dbrec.Records
}

// Alloc gets the memory. Release must be called whether it succeeds or not.
func (q *Queue) Alloc(bytes int, records *dbrec.Records) (err error) {
	if q.Pages, err = hostmem.Alloc(bytes); err != nil {
		return err
	}
	q.records = records
	q.Record, err = records.Alloc()
	return err
}

// Handle is the kernel's name.
func (q *Queue) Handle() uint32 { return q.ID }

// Release gives the memory back. The adapter has forgotten it.
func (q *Queue) Release() {
	if q.records != nil {
		q.records.Free(q.Record)
	}
	if q.Pages != nil {
		q.Pages.Free()
	}
}

// DestroyCQ destroys a completion queue and, when that succeeds, releases its memory.
func DestroyCQ(k *kernel.Device, q *Queue) (abi.DestroyCQResp, error) {
	resp, err := k.DestroyCQ(q.ID)
	if err == nil {
		q.Release()
	}
	return resp, err
}
