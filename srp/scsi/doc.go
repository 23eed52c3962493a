// Package scsi speaks SCSI as both ends of an SRP session need it: command
// descriptor blocks, logical unit numbers, status, sense data and the data-in
// and parameter-list structures of SPC-4 and SBC-3. Every structure can be built
// and parsed, so that the initiator and the target emulator share one set of
// field names.
//
// Nothing here does I/O. Builders return a CDB by value and do not
// allocate. Parsers take the bytes that arrived, check every length against them and
// leave out what was not there; they never panic on a peer's data.
package scsi
