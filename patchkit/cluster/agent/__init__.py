"""Answer and act on a node for a launcher elsewhere, with the standard library alone."""
