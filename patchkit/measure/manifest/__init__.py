"""Write what other systems run: one manifest for LeaderWorkerSet, one job for a Ray cluster."""
