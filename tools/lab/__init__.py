"""Devices in network namespaces, joined by a network that delays, loses and throttles: `python -m tools.lab`."""
