"""Privacy of one peer's releases: what they cost (accounting), how much noise a budget needs (calibration), what was spent (ledger)."""
