"""Plan and verify the QSFP network between Sparks."""
