"""Peers inside an ordinary Flower app: a mod keeps each peer's mass, and a strategy carries shares between them."""
