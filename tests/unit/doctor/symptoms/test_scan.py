"""How texts are found in logs: what varies, what stands before a line, what is hostile."""

from string import ascii_lowercase
from time import process_time

import pytest

from patchkit.doctor.symptoms.lines import FORMS, LONGEST, log_line
from patchkit.doctor.symptoms.scan import merged_scan, scan
from patchkit.doctor.symptoms.symptom import text_pattern

FREE = text_pattern(
    "Free memory on device {} ({free}/{total} GiB) on startup ... utilization"
)
UNIQUE = text_pattern(
    "should have a unique IP address. Got {nodes} nodes...unique IP addresses"
)
TABLE = text_pattern("CmaTotal:  0 kB  CmaFree:  {free} kB")
TEXTS = (FREE, UNIQUE, TABLE)


def found_in(chunks, texts=TEXTS):
    return merged_scan(scan(chunks, texts, (), ()).streams)


WRAPPED = """\
(RayWorkerWrapper pid=12, ip=10.0.0.1) Every node should have a unique IP address. Got 2 nodes with
(APIServer pid=13) INFO 11-22 10:00:00 [a.py:1] all is well
(RayWorkerWrapper pid=12, ip=10.0.0.1) node ids [...] and 1 unique IP addresses {'192.168.0.110'}.
"""


@pytest.mark.parametrize(("line", "who", "text"), FORMS["example"])
def test_what_stands_before_a_line(line, who, text):
    found = log_line(1, line)
    assert (found.who, found.text) == (who, text)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_pieces_and_ends_of_lines_do_not_matter(end, size):
    data = f"first\n{WRAPPED}CmaTotal:       0 kB\nCmaFree:   940 kB\n".replace(
        "\n", end
    ).encode()
    found = found_in(data[at : at + size] for at in range(0, len(data), size))
    assert [len(found.hits.get(each.text, ())) for each in TEXTS] == [0, 1, 1]
    assert found.hits[UNIQUE.text][0].number == 2
    assert found.hits[UNIQUE.text][0].values == {"nodes": "2"}
    assert found.hits[TABLE.text][0].values == {"free": "940"}


def test_words_end_where_they_end():
    number = text_pattern("CUDA error: 222")
    assert found_in([b"CUDA error: 222: PTX\n"], [number]).hits.get(number.text)
    assert not found_in([b"CUDA error: 2220\nXCUDA error: 222\n"], [number]).hits


ENDLESS = [b"a" * 3, b"\x1b[", b"(", b"Free memory on device ("]


@pytest.mark.parametrize(
    "data", [bytes(range(256)) * 100, *(each * LONGEST for each in ENDLESS)]
)
def test_rubbish_does_not_disturb(data):
    good = b"\nFree memory on device cuda:0 (33.9/121.6 GiB) on startup is less than utilization\n"
    found = found_in([data, good, data])
    assert [hit.values for hit in found.hits[FREE.text]] == [
        {"free": "33.9", "total": "121.6"}
    ]


def test_repeated_lines_are_noted_and_not_kept():
    line = b"%d Free memory on device x (%d/9 GiB) on startup utilization\n"
    found = found_in(line % (n, n) for n in range(999))
    assert found.last == {FREE.text: 999}
    assert len(found.hits[FREE.text]) < 10


def test_a_log_that_would_take_hours_is_read_in_part():
    line = "%s Free memory on device x (1/9 GiB) on startup utilization\n"
    log = "".join(line % (letter * 1000) for letter in ascii_lowercase).encode()
    looked = scan([log], [FREE], (), (), most=100_000)
    assert looked.unread == "after line 5: 4 different lines were looked at"
    assert [*looked.streams[""].last.values()] == [4]
    assert not scan([log], [FREE], (), ()).unread


def test_a_long_word_before_an_error_takes_no_time():
    line = "Error: " + "a." * 4000
    log = "".join(f"{line}{end}\n" for end in ascii_lowercase).encode()
    began = process_time()
    found = found_in([log], [text_pattern("{name}Error: ")])
    assert not found.hits
    assert process_time() - began < 2
