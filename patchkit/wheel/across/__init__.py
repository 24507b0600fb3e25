"""Give a build on one CPU what it takes to compile for another."""
