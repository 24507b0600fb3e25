"""Read what files say by their format: scripts, YAML, Dockerfiles, units, env files, Python."""
