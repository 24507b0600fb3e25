"""Read an archive of `doctor --save` or `proof`."""

import io
import tarfile
from pathlib import Path


def archive_texts(archive: bytes | Path) -> dict[str, str]:
    """Return the text of each member by its name."""
    packed = archive if isinstance(archive, bytes) else archive.read_bytes()
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as members:
        for member in members:
            stream = members.extractfile(member)
            assert stream is not None, member.name
            texts[member.name] = stream.read().decode()
    return texts
