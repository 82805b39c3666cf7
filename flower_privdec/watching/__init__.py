"""A live page of a network's peers."""
