"""Rows of numbers, one a peer: their memory, checks of them, and random draws that depend only on keys."""
