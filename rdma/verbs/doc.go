// Package verbs is the vocabulary of RDMA as this program speaks it: the nouns
// of the InfiniBand verbs (context, protection domain, memory region,
// completion channel, completion queue, queue pair) as interfaces, and the
// values that travel between them.
//
// It has no system calls and no goroutines. Providers implement it: package
// uverbs on the kernel's ABI, package softroce in userspace. Package verbstest
// is the contract in executable form; a provider is what passes it.
//
// Numeric values of opcodes, states, access flags and completion codes are
// those of <rdma/ib_user_verbs.h> and of <infiniband/verbs.h>, so that a provider
// may pass them through.
package verbs
