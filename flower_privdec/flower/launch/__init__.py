"""Runs of Flower started from here: a SuperLink of one's own, or all in this process."""
