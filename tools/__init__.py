"""Maintain patchkit, by `python -m tools.NAME`: tables, pages, locks, proofs, pictures."""
