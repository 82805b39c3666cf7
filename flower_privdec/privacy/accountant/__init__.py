"""The exact accountant: from the events of a run to its ε, never below the truth."""
