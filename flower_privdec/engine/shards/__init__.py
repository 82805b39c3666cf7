"""One cohort in shards: processes, on one machine or several, that each host a share of the rows and swap the rest."""
