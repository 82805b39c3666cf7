"""Ledgers: what each peer has spent, on disk before anything leaves."""
