"""Privacy of a peer's releases: what they cost, the noise a budget needs, and what was spent."""
