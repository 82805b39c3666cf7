"""Peers on a network that run a Flower app, with no server."""
