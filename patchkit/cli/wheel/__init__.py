"""Verbs about wheels and the wheelhouse."""
