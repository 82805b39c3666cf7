"""Quickstart: private training among peers, as a Flower app."""
