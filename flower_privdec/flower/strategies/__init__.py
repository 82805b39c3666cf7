"""Flower strategies without a global model."""
