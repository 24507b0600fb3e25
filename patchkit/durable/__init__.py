"""Changes to the disk that are whole or not at all, whatever interrupts them."""
