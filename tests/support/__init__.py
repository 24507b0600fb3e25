"""Share what several tests need."""


def write_files(root, files, mode=0o644):
    """Write texts or bytes below a folder, by path; return the folder."""
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)
        place.chmod(mode)
    return root
