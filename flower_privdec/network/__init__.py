"""Peers on a network: every device runs one peer, and they talk to each other alone."""
