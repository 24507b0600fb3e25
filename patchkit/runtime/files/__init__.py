"""State what a file of others says: variables, commands and versions, each with its line."""
