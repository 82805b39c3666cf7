"""Search for schedules of faults under which a network of peers breaks a law: `python -m tools.schedules`."""
