"""Lower bounds on ε from attacks, beside the upper bound that is printed."""
