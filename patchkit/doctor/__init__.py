"""Judge what is wrong with a machine, a cluster or a log, and say what cures it."""
