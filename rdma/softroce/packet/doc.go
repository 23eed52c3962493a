// Package packet is the wire format of RoCE v2: base transport header,
// extension headers, 24-bit packet sequence numbers, opcodes and the invariant
// CRC, over IPv4 and IPv6.
//
// A packet here is the payload of one UDP datagram to port 4791: BTH, extension
// headers, payload, 0 to 3 bytes of padding, 4 bytes of ICRC. IP and UDP headers
// are not in it, but the ICRC covers them; a Flow stands for what they
// contribute.
//
// Sources: IBA vol. 1 chapter 9 and annex A17 (RoCEv2); field names as in the
// kernel's rxe_hdr.h. Numbers are big-endian but for the ICRC.
package packet
