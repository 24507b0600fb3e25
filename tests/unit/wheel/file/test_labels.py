"""A version that is a digest of facts."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.wheel.file.write import as_text, digest_label

JSON = st.dictionaries(
    st.text(), st.one_of(st.text(), st.integers(), st.lists(st.text()))
)


@given(JSON)
def test_a_label_is_kept_by_pip(facts):
    label = digest_label(as_text(facts))
    assert str(Version(f"1.0+gb10.{label}")) == f"1.0+gb10.{label}"
    assert label == digest_label(as_text(dict(reversed(facts.items()))))


def test_a_label_of_digits_alone_begins_with_a_letter():
    texts = (str(number) for number in range(10**6))
    digests = ((t, hashlib.sha256(t.encode()).hexdigest()[:10]) for t in texts)
    text, digits = next((t, d) for t, d in digests if d.isdigit())
    assert digest_label(text) == f"a{digits[1:]}"
