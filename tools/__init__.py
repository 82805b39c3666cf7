"""What developers run from a checkout: benchmarks, soak, fuzz and fault rigs, measurements. Not part of the wheel."""
