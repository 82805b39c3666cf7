"""What mkdocs runs: the parts of pages that are made from the code."""
