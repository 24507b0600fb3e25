"""Serve one model on several nodes: QSFP network, ssh, the agent on a node, units, launch."""
