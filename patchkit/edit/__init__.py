"""Make edits: pure text in, edits out, for Python, CMake and anchored text."""
