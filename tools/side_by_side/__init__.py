"""The same task in other tools, each in an environment of its own; see `__main__`."""
