"""Prove what takes a whole build, a fresh machine or an emulator: `python -m e2e.proofs.X`."""
