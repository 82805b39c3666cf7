"""Transports that a scenario can name (`network.transport`), one a file."""
