"""Nodes with a real systemd, and what happens to a cluster on them when something breaks."""
