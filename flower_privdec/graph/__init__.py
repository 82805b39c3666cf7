"""The directed edges of each round, their mixing weights, and the participating peers."""
