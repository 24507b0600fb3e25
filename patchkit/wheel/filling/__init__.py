"""Fill a wheelhouse: resolve, download and lock what its wheels need on a node."""
