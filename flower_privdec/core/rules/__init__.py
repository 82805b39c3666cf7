"""Rules that limit a neighbour that lies: to add one, put a file here, or name its class as your own."""
