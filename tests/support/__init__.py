"""Share what several tests need."""


def write_files(root, files, mode=0o644):
    """Write texts below a folder, by path; return the folder."""
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        place.chmod(mode)
    return root
