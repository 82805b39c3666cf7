"""Exactly-once push-sum: the protocol and its codec, without sockets, clocks or files."""
