"""Rows of numbers, one a peer: memory, checks, and draws that depend on keys alone."""
