"""Bytes from peer to peer: streams of TLS with a certificate on both sides."""
