"""Attacks that a simulation can name: to add one, put a file here."""
