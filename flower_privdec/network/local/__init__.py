"""All peers of a scenario as processes of this machine, with messages lost and peers killed on purpose."""
