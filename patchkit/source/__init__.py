"""Find, fetch, verify and unpack the sources that a user names, and detect their version."""
