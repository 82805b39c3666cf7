"""Who sends to whom in each round, by which weights, and who takes part."""
