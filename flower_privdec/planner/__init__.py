"""The cost of a run before it starts: noise, ε over the rounds, the best K, memory, time, warnings."""
