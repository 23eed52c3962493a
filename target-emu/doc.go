// Package targetemu is an SRP target port in software: it takes logins (T10 SRP r16a, RDMA/CM and IB forms), keeps I_T nexuses of
// one or many RDMA channels, and executes their commands on the logical units of package
// lun. It runs on any device that package verbs describes.
//
// A Target is made for tests as much as for use: a fault script (see ParseFaults) makes it break the
// protocol on purpose, reproducibly.
package targetemu
