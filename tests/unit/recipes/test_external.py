"""What CMake files fetch, and that no form of fetching passes unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from patchkit.edit.cmake import Branch
from patchkit.errors import DriftError
from patchkit.recipes.vllm.build import known_externals, wanted
from patchkit.recipes.vllm.external import External, externals, for_cuda

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DECLARED = """\
if(DEFINED ENV{FOO_SRC_DIR})
  set(FOO_SRC_DIR $ENV{FOO_SRC_DIR})
endif()
if(FOO_SRC_DIR)
  FetchContent_Declare(foo SOURCE_DIR ${FOO_SRC_DIR})
else()
  set(FOO_TAG v1.2)
  FetchContent_Declare(
    foo
    GIT_REPOSITORY https://example.org/foo.git # a comment
    GIT_TAG ${FOO_TAG}
    GIT_SUBMODULES "third-party/a" b
    SOURCE_SUBDIR python/foo
  )
endif()
FetchContent_MakeAvailable(foo)
"""
FOO = External(
    name="foo",
    variable="FOO_SRC_DIR",
    url="https://example.org/foo",
    pin="v1.2",
    submodules=("third-party/a", "b"),
    path="CMakeLists.txt",
    line=8,
)


@pytest.fixture
def found(make_tree):
    """The sources of a CMakeLists.txt, and of files beside it."""

    def find(text, **files):
        named = {f"cmake/{name}.cmake": content for name, content in files.items()}
        return externals(make_tree("0.25.1", {"CMakeLists.txt": text, **named}))

    return find


def test_a_declared_source_is_read_whole(found):
    assert found(DECLARED) == (FOO,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "FetchContent_Declare(x URL https://example.org/x.tgz)",
            "1: x is not fetched with git",
        ),
        (
            f"FetchContent_Declare(x GIT_REPOSITORY y GIT_TAG {COMMIT})",
            "no variable names a folder",
        ),
        (
            "ExternalProject_Add(x URL y)",
            "externalproject_add fetches something in an unknown way",
        ),
        ("file(DOWNLOAD https://example.org x)", "file fetches"),
        (
            "execute_process(COMMAND git clone https://example.org/x)",
            "execute_process fetches",
        ),
        (
            "execute_process(COMMAND /usr/bin/curl -O https://example.org)",
            "execute_process fetches",
        ),
        ("add_custom_command(OUTPUT x COMMAND wget y)", "add_custom_command fetches"),
        (DECLARED.replace("GIT_TAG ${FOO_TAG}", ""), "8: foo has no GIT_TAG"),
        (
            DECLARED.replace("set(FOO_TAG v1.2)", "set(FOO_TAG a)\nset(FOO_TAG b)"),
            "one text",
        ),
        (DECLARED + DECLARED, "24: foo is fetched twice"),
        (
            "add_subdirectory(csrc)",
            "add_subdirectory(csrc/CMakeLists.txt) leads to no file",
        ),
    ],
)
def test_what_is_not_understood_is_an_error(found, text, says):
    with pytest.raises(DriftError) as caught:
        found(text)
    assert says in caught.value.what
    assert caught.value.hint


# What is known about them


def released(of, **change):
    """A source as the newest known release fetches it."""
    known = next(each for each in known_externals() if each.name == of)
    pin = known.pins[-1]
    fields = {
        "name": of,
        "variable": "X_SRC_DIR",
        "url": pin.url,
        "pin": pin.pin,
        "submodules": None,
        "path": "CMakeLists.txt",
        "line": 1,
    }
    return External(**{**fields, **change})


def test_a_release_that_fetches_something_else_is_an_error():
    for external, says in (
        (
            released("cutlass", name="newcomer"),
            "fetches newcomer, which patchkit does not know",
        ),
        (released("cutlass", pin="v4.7.2"), "at v4.7.2 instead of"),
        (released("qutlass", pin=COMMIT), f"at {COMMIT} instead of"),
        (
            released("qutlass", url="https://example.org/q"),
            "fetches https://example.org/q at",
        ),
    ):
        with pytest.raises(DriftError, match=says):
            wanted((external,), Version("0.33.0"), release=True)


# Terms of a condition: CMake's words, and Python's with the unknown ones left open.
TERMS = [
    (("VLLM_GPU_LANG", "STREQUAL", "CUDA"), "True"),
    (("VLLM_TARGET_DEVICE", "STREQUAL", "cpu"), "False"),
    (("A",), "a"),
    (("B", "VERSION_LESS", "9"), "b"),
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["AND", "OR"]), st.integers(0, 2), st.sampled_from(TERMS)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_branch_is_only_left_aside_if_no_cuda_build_takes_it(parts):
    words, python = [], []
    for joint, negations, (cmake, other) in parts:
        words += [joint, *(["NOT"] * negations), *cmake]
        python += [joint.lower(), *(["not"] * negations), other]
    condition = tuple(words[1:])
    results = {
        eval(" ".join(python[1:]), {"a": a, "b": b})
        for a in (True, False)
        for b in (True, False)
    }
    taken = for_cuda((Branch(condition, (), 0),))
    passed = for_cuda((Branch((), (condition,), 0),))
    assert taken or True not in results
    assert passed or False not in results
