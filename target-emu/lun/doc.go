// Package lun is a SCSI device server: logical units over memory, nothing, or a
// file, that execute commands for any number of I_T nexuses (SAM-5, SPC-4, SBC-3).
//
// It knows nothing of SRP. A transport runs each command through a Task:
//
//	Begin     looks at the CDB: unit attentions, reservations, ranges. Either the task is Done, with its status, or it
//	          says how many bytes it wants (OutLen) or gives (InLen) and in which way (Way).
//	ReadChunk / WriteChunk   move streamed data in pieces of whole blocks, or Direct names
//	          device-visible memory that the transport may read or write in their place.
//	FinishOut executes a command that needed its whole data-out in one buffer.
//	End       is called once for every task that Begin saw, however it ended.
//
// Begin, the chunk methods and End do not allocate for READ and WRITE.
package lun
