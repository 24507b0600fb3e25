"""What maintainers run, as `python -m tools.NAME`: tables, pages, locks, proofs, pictures."""
