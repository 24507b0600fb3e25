"""Check env files, launch scripts and running servers: names, values, flags, secrets, this host."""
