"""Share what several tests need."""
