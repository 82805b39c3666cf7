"""The engine: all peers of a scenario as rows of one computation, in one process, several, or shards."""
