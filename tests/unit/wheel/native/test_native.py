"""Machine code of PTX, and libraries that get it, beside what a loader and readers make of them."""

import contextlib
import ctypes
import platform
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import lz4.block
import pytest
import zstandard
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.elf import Section
from patchkit.errors import BuildError, HostError, SourceError
from patchkit.fatbin import read_entries
from patchkit.target import targets
from patchkit.wheel.device.inspect import inspect_file, jit_entries
from patchkit.wheel.native import schedule
from patchkit.wheel.native.assemble import Job, Task
from patchkit.wheel.native.make import make_native
from patchkit.wheel.native.relink import replace_device_code
from patchkit.wheel.native.schedule import assemble_all
from support import write_files
from support.needed import need, need_ptxas

LIBRARIES = Path(__file__).parents[3] / "data" / "libraries"
GB10 = targets()["gb10"]
HERE = f"ptx-{platform.machine()}.so"
CPUS = ["aarch64", "x86_64"]
RECORDS = 5  # tests/data/libraries/records.c
_LOADER = """\
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
  void *library = dlopen(words[1], RTLD_NOW);
  if (!library) return puts(dlerror()), 1;
  const void *(*code_of)(int) = dlsym(library, "code_of");
  for (int i = 0; i < 5; i++) fwrite(code_of(i), 16, 1, stdout);
  return 0;
}
"""


@pytest.fixture(scope="module")
def assembler(tmp_path_factory):
    """Give one with a cache of its own for what it assembles."""
    made = need_ptxas()
    made.cache = tmp_path_factory.mktemp("native")
    return made


def native(assembler, folder, name=HERE):
    made = make_native(
        {name: LIBRARIES / name}, GB10, folder, assembler, lambda _d, _t: None
    )
    return made[0]


def heads(path):
    """Return the first 16 bytes of each fat binary that the records name, once it is loaded."""
    library = ctypes.CDLL(str(path))
    library.code_of.restype = ctypes.c_void_p
    return b"".join(
        ctypes.string_at(library.code_of(number), 16) for number in range(RECORDS)
    )


def stored_heads(path):
    """Return the same by the sections of the file, in order."""
    with path.open("rb") as stream:
        section = ELFFile(stream).get_section_by_name(".nv_fatbin")
        data, align = section.data(), section["sh_addralign"]
    starts = [
        at
        for at in range(0, len(data), align)
        if data.startswith(b"\x50\xed\x55\xba", at)
    ]
    return b"".join(data[at : at + 16] for at in starts)


@pytest.mark.parametrize("cpu", CPUS)
def test_ptx_becomes_machine_code(assembler, tmp_path, cpu):
    before = inspect_file(LIBRARIES / f"ptx-{cpu}.so")
    made = native(assembler, tmp_path, f"ptx-{cpu}.so")
    after = inspect_file(made.path)
    assert [entry.compression for entry in jit_entries(before, GB10)] == [
        "zstd",
        "lz4",
        "none",
    ]
    assert [[e.name for e in group] for group in after.fat_binaries] == [
        *[["sm_121"]] * 3,
        ["sm_120"],  # the device loads it: PTX and sm_90 beside it leave
    ]
    assert not jit_entries(after, GB10)
    assert len(made.ptx) == 3
    assert made.ptx[0] == made.ptx[1] != made.ptx[2]
    assert made.path.stat().st_size < before.size / 2  # a cut of whole pages
    assert native(assembler, tmp_path / "..", f"ptx-{cpu}.so").path.read_bytes() == (
        made.path.read_bytes()
    )


def test_the_loader_finds_it(assembler, tmp_path):
    made = native(assembler, tmp_path)
    assert heads(made.path) == stored_heads(made.path) != heads(LIBRARIES / HERE)


@pytest.mark.parametrize("size", [8, 1 << 12, 1 << 16])
@pytest.mark.parametrize("cpu", CPUS)
def test_sections_of_any_size(tmp_path, cpu, size):
    """A small one is cut, a middle one stays in place, a large one gets a segment."""
    source, dest = LIBRARIES / f"ptx-{cpu}.so", tmp_path / "lib.so"
    containers = [group[0].container for group in inspect_file(source).fat_binaries]
    new = [b"\x50\xed\x55\xba\1\0\x10\0" + size.to_bytes(8, "little") + bytes(size)]
    replace_device_code(source, dest, dict.fromkeys(containers, new))
    with source.open("rb") as old, dest.open("rb") as stream:
        ends = 0
        for segment in ELFFile(stream).iter_segments("PT_LOAD"):
            assert segment["p_vaddr"] >= ends
            assert (segment["p_vaddr"] - segment["p_offset"]) % segment["p_align"] == 0
            ends = segment["p_vaddr"] + segment["p_memsz"]
        for section in ELFFile(old).iter_sections():
            if section.name not in (".nv_fatbin", ".nvFatBinSegment", ".rela.dyn"):
                same = ELFFile(stream).get_section_by_name(section.name)
                assert (same.data(), same["sh_addr"]) == (
                    section.data(),
                    section["sh_addr"],
                )
    if cpu == platform.machine():
        assert heads(dest) == stored_heads(dest)


def test_a_loader_of_aarch64_takes_it(assembler, tmp_path):
    need("aarch64-linux-gnu-gcc", "qemu-aarch64")
    made, loader = native(assembler, tmp_path, "ptx-aarch64.so"), tmp_path / "loader"
    (tmp_path / "loader.c").write_text(_LOADER)
    subprocess.run(
        ["aarch64-linux-gnu-gcc", loader.with_suffix(".c"), "-o", loader], check=True
    )
    words = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", loader, made.path]
    assert subprocess.run(
        words, check=True, capture_output=True
    ).stdout == stored_heads(made.path)


def job_for(
    tmp_path,
    options="",
    *,
    version=(9, 0),
    text=b".version 8.0\n.target sm_80\n",
    flags=0,
    plain=0,
    name="x",
):
    """Return the job of a library whose one PTX has these options beside it.

    With ``flags`` for a compression, ``text`` is what lies in the file, and ``plain`` the size that
    its header promises.
    """
    pair = (72).to_bytes(4, "little") + len(options).to_bytes(4, "little")
    header = 72 + (len(options) + 7) // 8 * 8
    packed = len(text) if flags else 0
    fields = [(1, 2), (0x101, 2), (header, 4), (len(text), 8), (packed, 4), (64, 4)]
    fields += [
        (version[1], 2),
        (version[0], 2),
        (80, 4),
        (0, 8),
        (0x11 | flags, 8),
        (0, 8),
    ]
    fields += [(plain, 8)]
    head = b"".join(value.to_bytes(size, "little") for value, size in fields)
    body = (head + pair + options.encode()).ljust(header, b"\0") + text
    path = tmp_path / f"{name}.fatbin"
    path.write_bytes(
        b"\x50\xed\x55\xba\1\0\x10\0" + len(body).to_bytes(8, "little") + body
    )
    with path.open("rb") as stream:
        (entry,) = read_entries(stream, [Section("x", 0, len(body) + 16)], "lib.so")
    return Job(name="lib.so", path=path, entry=entry, arch="121")


CODE = b"\x50\xed\x55\xba\1\0\x10\0" + bytes(8)
KERNEL = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel() { ret; }\n"


# A hundred bytes of which ptxas makes gigabytes.
HUGE = KERNEL + b".visible .global .b8 huge[2000000000] = {1};\n"
LZ4, ZSTD = 0x2000, 0x8000


def frame_of(size):
    """Return the beginning of a frame that says it becomes so many bytes."""
    stream = zstandard.ZstdCompressor().compressobj(size=size)
    return stream.compress(KERNEL) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)


@pytest.mark.parametrize(
    ("flags", "packed", "plain"),
    [
        (ZSTD, frame_of(1 << 50), 4096),  # which no machine has memory for
        (ZSTD, zstandard.compress(KERNEL), len(KERNEL) + 1),
        (LZ4, lz4.block.compress(KERNEL, store_size=False), len(KERNEL) + 1),
        (LZ4, lz4.block.compress(bytes(1 << 26), store_size=False), 4096),
    ],
)
def test_ptx_has_the_size_that_its_header_says(tmp_path, flags, packed, plain):
    job = job_for(tmp_path, text=packed, flags=flags, plain=plain)
    with pytest.raises(SourceError, match=r"^lib\.so"):
        job.read_ptx()


def assemble_one(assembler, job):
    task = assembler.plan(job)
    assembler.make(task)
    return task


def test_ptx_of_no_size_that_there_can_be(tmp_path):
    with pytest.raises(SourceError, match="9,223,372,036,854,775,808 bytes of PTX"):
        job_for(tmp_path, flags=ZSTD, plain=1 << 63)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({"options": "-o /etc/passwd"}, "compiled with -o"),
        ({"options": "-maxrregcount 32; -x"}, "compiled with -maxrregcount"),
        ({"version": (9, 9)}, "is PTX 9.9; ptxas 13.2"),
        ({"text": b".version 8.0\n.target sm_80\n.nonsense\n"}, "ptxas"),
        ({"text": b"no text of a compiler"}, "not the text of PTX"),
        ({"text": KERNEL.replace(b"sm_80", b"sm_90a")}, "ptxas"),
        ({"options": "-v " * 2000}, "6000 bytes of options"),
        ({"text": HUGE}, "Memory allocation failure"),
    ],
)
def test_what_is_refused(assembler, tmp_path, case, says):
    with pytest.raises((BuildError, SourceError), match=says):
        assemble_one(assembler, job_for(tmp_path, **case))
    assert not list(assembler.cache.glob(".making*"))


def test_ptx_goes_to_the_oldest_ptxas_that_reads_it(assembler, tmp_path):
    """A later one than torch's CUDA is never taken: PTX that is newer was compiled by it."""
    text = KERNEL.replace(b"8.0", b"9.2").replace(b"sm_80", b"sm_121")
    with pytest.raises(BuildError, match=r"Unsupported \.version 9\.2"):
        assemble_one(assembler, job_for(tmp_path, text=text))
    try:
        made = assemble_one(assembler, job_for(tmp_path, version=(9, 2), text=text))
    except (SourceError, HostError) as error:
        pytest.skip(f"ptxas 13.2 cannot be had here: {error}")
    assert made.place.is_file()
    assert assembler.version.endswith("13.2.86")


def test_a_ptxas_that_is_killed_is_no_refusal(assembler, tmp_path, monkeypatch):
    """Else a wheel would depend on the memory that there was."""
    write_files(tmp_path, {"bin/ptxas": "#!/bin/sh\nkill -9 $$\n"}, mode=0o755)
    monkeypatch.setattr(assembler, "_unpack", lambda _cuda, progress: tmp_path)
    with pytest.raises(HostError, match="what is assembled already is kept"):
        assemble_all(
            assembler, [job_for(tmp_path, "-O0", text=KERNEL)], lambda _d, _t: None
        )


def test_an_interrupt_ends_a_ptxas_that_runs(assembler, tmp_path, monkeypatch):
    write_files(tmp_path, {"bin/ptxas": "#!/bin/sh\nexec sleep 60\n"}, mode=0o755)
    monkeypatch.setattr(assembler, "_unpack", lambda _cuda, progress: tmp_path)
    here = threading.get_ident()
    threading.Timer(1, signal.pthread_kill, (here, signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        assemble_all(
            assembler, [job_for(tmp_path, "-O1", text=KERNEL)], lambda _d, _t: None
        )
    assert time.monotonic() - began < 20


def test_no_more_texts_are_read_at_once_than_there_is_memory_for(
    assembler, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        schedule, "available_memory", lambda: 10
    )  # bytes: one goes on at a time
    together, plan = threading.Barrier(2), assembler.plan

    def meet(job):
        with pytest.raises(threading.BrokenBarrierError):
            together.wait(0.3)
        together.reset()
        return plan(job)

    monkeypatch.setattr(assembler, "plan", meet)
    jobs = [job_for(tmp_path, text=KERNEL, name=name) for name in ("one", "two")]
    assert len(assemble_all(assembler, jobs, lambda _d, _t: None)) == 2


def test_what_takes_too_much_leaves_the_others(assembler, tmp_path):
    jobs = [job_for(tmp_path, text=HUGE, name="huge"), job_for(tmp_path, text=KERNEL)]
    results = assemble_all(assembler, jobs, lambda _d, _t: None)
    assert [type(results[job]) for job in jobs] == [BuildError, Task]


def test_what_is_large_is_split_the_same_everywhere(assembler, tmp_path):
    """Its number of threads stands in a note of the machine code."""
    large = KERNEL + b"//".ljust(24_000_000, b"x") + b"\n"
    words = [
        assembler.plan(job_for(tmp_path, text=text)).words for text in (KERNEL, large)
    ]
    assert words == [("-arch=sm_121",), ("-arch=sm_121", "--split-compile=8")]


def test_an_assembly_tells_how_far_it_is(assembler, tmp_path):
    told = []
    text = KERNEL + b"//".ljust(1_000_000, b"y") + b"\n"
    assemble_all(
        assembler, [job_for(tmp_path, text=text)], lambda *now: told.append(now)
    )
    assert told == [(0, len(text)), (len(text), len(text))]


def test_options_reach_ptxas(assembler, tmp_path):
    """Results are kept by PTX and options; what a power cut left of one is made again."""
    plain, other = (
        assemble_one(assembler, job_for(tmp_path, options, text=KERNEL))
        for options in ("", " -O1 -maxrregcount=32 ")
    )
    assert plain.ptx == other.ptx
    assert plain.place != other.place
    whole = plain.place.read_bytes()
    plain.place.write_bytes(whole[:100])
    assert (
        assemble_one(assembler, job_for(tmp_path, text=KERNEL)).place.read_bytes()
        == whole
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 15), st.integers(0, 255)), min_size=1, max_size=3
    )
)
def test_mutated_libraries(changes):
    """Whatever bytes are changed, the result has the code that was given, or it is an error."""
    mutated = bytearray((LIBRARIES / HERE).read_bytes())
    for place, value in changes:
        mutated[place % len(mutated)] = value
    with tempfile.TemporaryDirectory() as folder:
        source, dest = Path(folder, "old.so"), Path(folder, "new.so")
        source.write_bytes(mutated)
        with contextlib.suppress(SourceError, BuildError):
            groups = inspect_file(source).fat_binaries
            replace_device_code(
                source, dest, {group[0].container: [CODE] for group in groups}
            )
            # A fat binary without code is not listed.
            assert not inspect_file(dest).live
            assert stored_heads(dest).count(CODE) >= len(groups)
