"""Explain how long a decoding step of a server takes: `patchkit bench --why`."""
