"""The graphs that a scenario can name, one idea a file: to add one, put a file here, or name its class as your own."""
