"""Where peers run: in process (engine), under Flower, and over a network."""
