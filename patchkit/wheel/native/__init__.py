"""Assemble the machine code of a device from the PTX that libraries hold."""
