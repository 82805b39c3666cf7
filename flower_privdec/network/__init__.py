"""Peers on a network: every device runs one peer, and they talk to each other alone."""

import os

# The gRPC library reads this once, at its import: else each stranger's handshake makes it print a line or two.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
