"""All peers of a scenario as processes of this machine, and faults injected between them."""
