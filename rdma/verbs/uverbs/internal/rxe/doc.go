// Package rxe serves the kernel's soft-RoCE driver (drivers/infiniband/sw/rxe, ABI version 2).
//
// All three rings are pages that the kernel allocates and we map (rdma_user_rxe.h).
// Posting a receive is a store; posting a send is a store and one POST_SEND command without
// work requests, which tells the kernel to look at the ring; polling is a load.
//
//	post:  we fill slots [producer, producer+n) -> store producer (release) -> kernel owns them
//	       until it stores consumer past them; a send slot is free again once it was acknowledged
//	poll:  kernel stores producer (release) -> we load it (acquire), copy entries out, store consumer
//	       (release) -> kernel owns the slots again
//
// Each index has one writer. The kernel keeps a private copy of the ones it
// writes. A send ring is used by one goroutine at a time, so are a receive ring and a
// completion ring (verbs.QueuePair, verbs.CompletionQueue); no lock is taken here.
package rxe
