"""Read the device code of libraries, and tell which of it loads on a device."""
