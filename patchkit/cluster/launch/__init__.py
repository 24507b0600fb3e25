"""Start, watch, stop and change a cluster of nodes: systemd on each, ssh between, no daemon."""
