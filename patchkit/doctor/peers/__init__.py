"""Compare the nodes of a cluster by what each says of itself and of the others."""
