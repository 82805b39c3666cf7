"""What people read of runs: words, the terminal, pictures, pages, and a run's folder read back."""
