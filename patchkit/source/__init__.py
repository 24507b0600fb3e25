"""Turn what SOURCE names into a tree: locked fetch, git, safe unpacking, version."""
