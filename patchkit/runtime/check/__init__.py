"""Check variables, flags and secrets of env files, launch scripts and running servers."""
