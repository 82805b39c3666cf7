"""Private decentralized learning for Flower: peers train together without a server in the data path."""

__version__ = "0.1.0"
