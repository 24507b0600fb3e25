"""Read the PTX in a fat binary, with its kernels and the options of its compiler."""

from __future__ import annotations

import re
import struct
from io import BufferedIOBase

import lz4.block  # type: ignore[import-untyped]
import zstandard

from patchkit.elf import damaged
from patchkit.frozen import frozen
from patchkit.wheel.device.fatbin import ENTRY, CodeEntry

_PAIR = struct.Struct("<II")
_MOST_OPTIONS = 4096  # bytes; nvcc leaves a few words
_WINDOW = 1 << 27  # bytes; the largest window of zstd's own program
# .visible .entry NAME(, .weak .entry NAME( …
_ENTRY_POINT = re.compile(rb"\.entry\s+([\w$]+)")


@frozen
class Ptx:
    """A PTX module: its ``text``, and the ``options`` for ptxas that its compiler recorded."""

    text: bytes
    options: tuple[str, ...]

    @property
    def kernels(self) -> set[str]:
        """Return the mangled names of the entry points."""
        return {match[1].decode() for match in _ENTRY_POINT.finditer(self.text)}


def read_ptx(stream: BufferedIOBase, entry: CodeEntry, name: str) -> Ptx:
    """Read a PTX entry and decompress it.

    Raises SourceError if the entry is damaged; the error calls the file ``name``.
    """

    def check_that(holds: bool, complaint: str) -> None:
        if not holds:
            raise damaged(name, f"the device code at byte {entry.offset}: {complaint}")

    stream.seek(entry.offset)
    data = stream.read(entry.size)
    check_that(
        entry.kind == "ptx" and len(data) == entry.size,
        "it is no PTX, or cut off",
    )
    _, _, header, size, packed, pair, *_ = ENTRY.unpack_from(data)
    check_that(packed <= size, "its sizes contradict each other")
    payload = data[header : header + packed]
    try:
        match entry.compression:
            case "zstd":
                # zstandard would allocate a size in the frame in spite of max_output_size.
                frame = zstandard.get_frame_parameters(payload).content_size
                sizes = (entry.unpacked_size, zstandard.CONTENTSIZE_UNKNOWN)
                check_that(frame in sizes, "its sizes contradict each other")
                reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
                text = reader.decompress(payload, max_output_size=entry.unpacked_size)
            case "lz4":
                text = lz4.block.decompress(
                    payload, uncompressed_size=entry.unpacked_size
                )
            case _:
                text = data[header:]
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise damaged(name, f"the PTX at byte {entry.offset}: {error}") from None
    check_that(len(text) == entry.unpacked_size, "its sizes contradict each other")

    # The text ends with NULs, which ptxas does not accept.
    text = text.rstrip(b"\0")
    check_that(b".target" in text and b"\0" not in text, "it is not the text of PTX")

    options = b""
    if pair + _PAIR.size <= header:
        place, length = _PAIR.unpack_from(data, pair)
        check_that(place + length <= header, "its options end behind its header")
        check_that(length <= _MOST_OPTIONS, f"it has {length} bytes of options")
        options = data[place : place + length]
    # -maxrregcount=32 is also written as two words.
    words = options.decode(errors="replace").replace("=", " ").split()
    return Ptx(text=text, options=tuple(words))
