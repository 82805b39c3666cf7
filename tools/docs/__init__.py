"""Hooks of mkdocs: the parts of pages that are made from the code."""
