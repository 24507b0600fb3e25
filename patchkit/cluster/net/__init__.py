"""Plan, apply, verify and undo the QSFP network between Sparks."""
