"""Read what files of others say, by format: variables, commands, versions; nothing is run."""
