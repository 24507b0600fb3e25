"""Coverage-guided fuzzing."""
