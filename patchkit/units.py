"""Define factors between units of memory, so that code names the units that it converts."""

BYTES_PER_MIB = 2**20
BYTES_PER_GIB = 2**30
KIB_PER_GIB = 2**20
MIB_PER_GIB = 2**10
GIB_PER_GB = 1e9 / BYTES_PER_GIB
