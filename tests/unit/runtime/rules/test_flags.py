"""Flags of `vllm serve`: of releases, and of files that are read."""

import pytest

from patchkit.errors import SourceError
from patchkit.runtime.rules.presets import flags, has_flag
from support import write_files

ENGINE = """
class EngineArgs:
    not_a_flag: int = 1

    @staticmethod
    def add_cli_args(parser):
        if not ("--help" in sys.argv):
            group.add_argument("--model", **model_kwargs["model"])
        group.add_argument("--tensor-parallel-size", "-tp", help="Not --this-one, nor --that.")
        for old, kind in [("--guided-decoding-backend", str)]:
            group.add_argument(old, type=kind, deprecated=True)
        return parser

    def create(self):
        print("--not-declared")
"""
SERVER = """
class BaseFrontendArgs:
    chat_template: str | None = None
    "The template."
    limit = 3

class FrontendArgs(BaseFrontendArgs):
    ssl_keyfile: str | None = None

class OtherArgs:
    other: str = ""

def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true")
"""
DECLARED = {
    *(
        "--help",
        "--model",
        "--tensor-parallel-size",
        "-tp",
        "--guided-decoding-backend",
    ),
    *("--chat-template", "--ssl-keyfile", "--headless"),
}
SERVE = "entrypoints/cli/serve.py"


@pytest.fixture
def home(tmp_path):
    serve = "def subparser_init(self, subparsers):\n    p.add_argument('--grpc')\n"
    files = {
        "engine/arg_utils.py": ENGINE,
        SERVE: serve,
        "entrypoints/common/cli_args.py": SERVER,
    }
    return write_files(tmp_path, files)


def test_an_installed_vllm_is_read(home):
    (home / "entrypoints/common").rename(home / "entrypoints/launchers")
    assert flags("0.33.0", home) == DECLARED | {"--grpc"}


def test_what_is_no_vllm_is_an_error(home):
    (home / SERVE).write_text("def")
    with pytest.raises(SourceError, match="is not Python"):
        has_flag("--model", "0.33.0", home)
    (home / "entrypoints/common/cli_args.py").unlink()
    with pytest.raises(SourceError, match=r"has no cli_args\.py"):
        has_flag("--model", "0.33.0", home)
    (home / "engine/arg_utils.py").unlink()
    with pytest.raises(SourceError, match="no such file"):
        has_flag("--model", "0.33.0", home)


def test_flags_by_release():
    for flag, version, there in (
        ("--attention-backend", "0.13.0", True),
        ("--swap-space", "0.18.0", False),
        ("--swap-space", "", True),
        ("--headless", "0.33.1.dev12+g1a2b", True),
        ("--max_model_len=8", "0.33.0", True),
        ("--no-enable-prefix-caching", "0.33.0", True),
        ("--disable-prefix-caching", "0.33.0", True),
        ("--compilation-config.mode=3", "0.33.0", True),
        ("-cc.mode", "0.33.0", True),
        ("-O3", "0.11.1", True),
        ("--enable-reasoning", "", False),
    ):
        assert has_flag(flag, version) is there, flag
