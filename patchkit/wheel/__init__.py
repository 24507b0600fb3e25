"""Make wheels, read them, and keep them in a wheelhouse."""
