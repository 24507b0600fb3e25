"""The pin of a model in cluster.toml: one line is written, the others stay byte by byte."""

import tomllib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from patchkit.cluster.launch.pinning import pin_image, pin_model
from patchkit.errors import UsageError

OLD, NEW = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f'[models]\n"org/a" = "{NEW}"\n'),
        ("x = 1", f'x = 1\n\n[models]\n"org/a" = "{NEW}"\n'),
        ("[models]", f'[models]\n"org/a" = "{NEW}"\n'),
        (
            f"[models]  # pins\n\"org/a\" = '{OLD}' # mine\n\n# the nodes\n[[node]]\n",
            f'[models]  # pins\n"org/a" = "{NEW}" # mine\n\n# the nodes\n[[node]]\n',
        ),
        (
            f'[models]\n"org/b" = "{OLD}"\n\n# the nodes\n[[node]]\n',
            f'[models]\n"org/a" = "{NEW}"\n"org/b" = "{OLD}"\n\n# the nodes\n[[node]]\n',
        ),
        (f'[models]\n"org/a" = "{NEW}"', f'[models]\n"org/a" = "{NEW}"'),
        (
            '#[models]\nx = "[models]"\n',
            f'#[models]\nx = "[models]"\n\n[models]\n"org/a" = "{NEW}"\n',
        ),
    ],
)
def test_one_line_is_written(before, after, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_bytes(before.encode())
    pin_model(file, "org/a", NEW)
    assert file.read_bytes() == after.encode()


def test_two_that_pin_at_once_lose_no_line(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[models]\n")
    names = [f"org/{number}" for number in range(12)]

    with ProcessPoolExecutor(4, get_context("fork")) as pool:
        list(pool.map(pin_model, [file] * 12, names, [NEW] * 12))

    assert tomllib.loads(file.read_text())["models"] == dict.fromkeys(names, NEW)


@pytest.mark.parametrize(
    "text",
    [
        "[models",
        'models = "~/models"\n',
        f'models = {{"org/a" = "{OLD}"}}\n',
        f'models."org/a" = "{OLD}"\n',
        f'[models]\n"org/\\u0061" = "{OLD}"\n',
        '[other]\nimage = "a"\n[serve]\nimage = "b"\n',
        'serve = {image = "a"}\n',
    ],
)
def test_what_cannot_be_edited_by_lines_is_refused_with_the_line(text, tmp_path):
    (tmp_path / "cluster.toml").write_text(text)
    write = pin_image if "image" in text else partial(pin_model, repo="org/a")
    with pytest.raises(UsageError) as refused:
        write(
            tmp_path / "cluster.toml", **{"image" if "image" in text else "commit": NEW}
        )
    assert (tmp_path / "cluster.toml").read_text() == text
    assert f' = "{NEW}"' in refused.value.hint


@pytest.mark.parametrize(
    ("before", "former", "after"),
    [
        (
            "[serve] # x\n image = 'a:1' # b\n",
            False,
            '[serve] # x\n image = "NEW" # b\n',
        ),
        ('serve.image="a"\n[x]\n', False, 'serve.image="NEW"\n[x]\n'),
        (
            '[serve]\nimage = "a"\n',
            True,
            '[serve]\n# image = "a"  # before --apply\nimage = "NEW"\n',
        ),
        ('[serve]\nimage = "NEW"\n', True, '[serve]\nimage = "NEW"\n'),
    ],
)
def test_an_image_is_written_in_its_place(before, former, after, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(before)
    pin_image(file, "NEW", former=former)
    assert file.read_text() == after
