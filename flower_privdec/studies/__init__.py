"""Studies: a paper's experiments as a grid of scenarios, run once each, and whether its claims are reproduced."""
