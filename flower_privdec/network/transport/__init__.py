"""Bytes from peer to peer: gRPC with TLS on both sides, certificates and connections."""
