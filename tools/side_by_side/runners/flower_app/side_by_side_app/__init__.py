"""The task of the comparison as a plain Flower app: federated averaging, and privacy as Flower offers it."""
