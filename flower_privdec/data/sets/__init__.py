"""The datasets that a scenario can name: to add one, put a file here, or name its class as your own."""
