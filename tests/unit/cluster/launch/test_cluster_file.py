"""cluster.toml: what it may say, and what an error names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchkit.cluster.launch.cluster import read_cluster_file
from patchkit.cluster.launch.cluster_file import (
    ClusterNode,
    ServeChoices,
    new_cluster_text,
)
from patchkit.errors import UsageError
from patchkit.runtime.rules.secret_texts import mask_secrets

NODE = '[[node]]\nssh = "spark-1"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lacks the key 'node'"),
        ("node = []", "node: a cluster has at least one node"),
        (f"{NODE}pear = 1\n", "node[1].pear: unknown key"),
        (f"{NODE}{NODE}", "node: spark-1 is named twice"),
        ('[[node]]\nssh = "-oX"\n', "node[1].ssh: '-oX' is not a host"),
        (f'{NODE}peer = "-oX"\n', "node[1].peer: '-oX' is not a host"),
        (
            f'{NODE}address = "$(touch x)"\n',
            "node[1].address: '$(touch x)' is not an IPv4",
        ),
        (f'venv = "here"\n{NODE}', "venv: is 'here', not a path from / or ~/"),
        (f'name = "A b"\n{NODE}', "name: is 'A b', not a short name"),
        (f'name = "llm-"\n{NODE}', "name: is 'llm-', not a short name"),
        (f"{NODE}[serve]\nmemory_floor = -1\n", "serve.memory_floor: is -1: 0, or"),
        (f"{NODE}[serve]\nmemory_floor = inf\n", "serve.memory_floor: is inf: 0, or"),
        (f"{NODE}[serve]\nport = 70000\n", "serve.port: is 70000, not a port"),
        (f'{NODE}[serve]\nlisten = "all"\n', "serve.listen: is 'all', not one of"),
        (f'{NODE}[models]\n"a/b" = "main"\n', "models.a/b: is 'main', not a commit"),
        (
            f'{NODE}[serve]\nargs = ["--api-key=x"]\n',
            "serve.args: every user of the node would see",
        ),
        (f'{NODE}[serve]\nargs = ["--hf_token=x"]\n', "what follows --hf-token;"),
        *(
            (f"{NODE}[serve]\nimage = '{text}'\n", "serve.image: is ")
            for text in (
                "--privileged",
                "a b",
                "a/$(x)",
                "a@sha256:12",
                "a/B",
                f"a@sha256:{'0' * 65}",
            )
        ),
        (f'{NODE}[serve]\nengine = "lxc"\n', "serve.engine: is 'lxc', not one of"),
        (f"{NODE}[serve]\nfrozen = 5\n", "serve.frozen: is 5: 0, or 30 seconds"),
        ("[[node]\n", "is not TOML"),
        (f"name = {'[' * 5000}", "is not TOML: it is nested too deeply"),
    ],
)
def test_what_it_must_not_say(text, says, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_cluster_file(path)
    assert says in caught.value.what
    assert mask_secrets(str(caught.value)) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f'{NODE}\n{NODE}address = "$(touch /tmp/x)"\n', "node[2].address: "),
        (f"{NODE}[serve]\n# 20\nfrozen = 20\n", "serve.frozen: is 20: 0, or 30 "),
        (f'{NODE}[models]\n"a/b.c" = "main"\n', "models.a/b.c"),
        ("[serve]\nport = 1\n\n[[node]\n", "(at line 4, column "),
        (f'image = "x"\n{NODE}', "image: unknown key; known are "),
        ("[serve]\nport = 1\n", "lacks the key 'node'"),
    ],
)
def test_an_error_leads_to_the_key_in_a_user_s_file(text, says, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_cluster_file(path)
    assert caught.value.what.startswith(f"{path}: ")
    assert says in caught.value.what
    assert caught.value.hint == f"correct {path}"


@pytest.mark.parametrize(
    "name",
    [
        "vllm/vllm-openai",
        "vllm/vllm-openai:v0.25.1",
        "Host-1.lan:5000/a/b__c",
        "nvcr.io/nvidia/vllm",
    ],
)
def test_an_image_has_one_local_name_once_it_is_pinned(name):
    assert ServeChoices(image=name).local_image == ""
    pinned = ServeChoices(image=f"{name}@sha256:{'0123456789abcdef' * 4}")
    assert pinned.local_image == "localhost/patchkit:0123456789ab"


def test_an_empty_peer_and_address_are_none(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(f'{NODE}peer = ""\naddress = ""\n', encoding="utf-8")
    assert read_cluster_file(path).members == (ClusterNode(ssh="spark-1"),)


def test_a_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(UsageError) as caught:
        read_cluster_file(tmp_path / "cluster.toml")
    assert "patchkit cluster init spark-1 spark-2" in caught.value.hint


HOSTS = st.text(
    st.characters(categories=["L", "N"], include_characters="@.-_\"'\\"), min_size=1
)
GOOD = HOSTS.filter(lambda text: not text.startswith("-"))


@given(names=st.lists(GOOD, min_size=1, max_size=4, unique=True), peer=GOOD)
def test_what_init_writes_is_read_back(names, peer, tmp_path_factory):
    nodes = [ClusterNode(ssh=name, peer=peer) for name in names]
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_text(new_cluster_text(nodes, {"topology": "socket"}), encoding="utf-8")
    found = read_cluster_file(path)
    assert found.members == tuple(nodes)
    assert (found.serve.topology, found.serve.listen) == ("socket", "local")


@given(port=st.integers(1024, 65535), other=st.integers(1024, 65535))
def test_clusters_with_ports_of_their_own_have_ranks_ports_of_their_own(port, other):
    """A user may take all of them; the default one keeps vLLM's."""
    ranks, others = (
        ServeChoices(port=each).ranks_port(29501) for each in (port, other)
    )
    assert ServeChoices().ranks_port(29501) == 29501
    assert 1024 <= ranks < 1 << 16
    assert (ranks == others) is (port == other)
