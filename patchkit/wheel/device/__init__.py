"""Tell which device code a library holds, and what of it loads on which device."""
