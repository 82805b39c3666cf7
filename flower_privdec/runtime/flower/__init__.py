"""Peers under Flower: a ClientApp that hosts them, strategies that route between them, and a launcher."""
