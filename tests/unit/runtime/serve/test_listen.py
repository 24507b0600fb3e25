"""Who may ask: this machine, those on the cable, those on the LAN; never everybody unasked."""

import pytest

from patchkit.errors import HostError, UsageError
from patchkit.runtime.host.host import Address, Host, Netdev, System
from patchkit.runtime.serve.request import (
    LOCAL,
    listen_address,
    listen_notes,
    models_url,
)
from tools import serve_lines

HEAD = {
    "role": "head",
    "topology": "roce",
    "executor": "mp",
    "nodes": 2,
    "head": "192.168.100.10",
}


def asked(**more):
    return serve_lines.request("0.33.0", {"model": "some/model", **more})


def netdev(name, *addresses, kind="ethernet", cage=None, state="up"):
    found = tuple(
        Address(address=each, prefix=24, family="inet", link_local=False)
        for each in addresses
    )
    return Netdev(
        name=name,
        state=state,
        carrier=True,
        mtu=1500,
        speed=None,
        mac="",
        driver="",
        pci="",
        port="",
        kind=kind,
        cage=cage,
        addresses=found,
        lanes=None,
        master="",
    )


def host(*netdevs):
    return Host(system=System(), memory=None, gpus=(), netdevs=netdevs, rdma=())


CABLE, LAN = (
    netdev("enp1s0f0np0", "192.168.100.10", cage=0),
    netdev("enP7s7", "10.0.0.10"),
)
DOCKER = netdev("docker0", "172.17.0.1", kind="virtual")
WIFI = netdev("wlP9s9", "10.0.1.10", kind="wifi")


@pytest.mark.parametrize(
    ("choice", "role", "netdevs", "address"),
    [
        ("local", HEAD, (CABLE, LAN), LOCAL),
        ("cable", HEAD, (CABLE, LAN), "192.168.100.10"),
        ("lan", HEAD, (CABLE, DOCKER, LAN), "10.0.0.10"),
        ("lan", {}, (DOCKER, WIFI), "10.0.1.10"),
        ("lan", {}, (netdev("eth1", "169.254.3.4"), LAN), "10.0.0.10"),
        ("lan", {**HEAD, "role": "worker"}, (), LOCAL),  # a worker answers nobody
    ],
)
def test_an_address_of_the_choice(choice, role, netdevs, address):
    assert listen_address(choice, asked(**role).node, host(*netdevs)) == address


@pytest.mark.parametrize(
    ("choice", "role", "netdevs", "error", "says"),
    [
        ("lan", HEAD, (CABLE, DOCKER), HostError, "no interface beside the QSFP cages"),
        (
            "lan",
            {},
            (LAN, WIFI),
            UsageError,
            "10.0.0.10 on enP7s7, 10.0.1.10 on wlP9s9",
        ),
        (
            "cable",
            {},
            (LAN,),
            HostError,
            "no QSFP cage is cabled and has an IPv4 address",
        ),
    ],
)
def test_no_address_of_the_choice(choice, role, netdevs, error, says):
    with pytest.raises(error) as caught:
        listen_address(choice, asked(**role).node, host(*netdevs))
    assert says in caught.value.what
    assert (
        "--host ADDRESS" in caught.value.hint or "--listen local" in caught.value.hint
    )


@pytest.mark.parametrize(
    ("address", "curl", "says"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/v1/models", "for this machine alone"),
        (
            "192.168.100.10",
            "http://192.168.100.10:8000/v1/models",
            "localhost:8000` is refused",
        ),
        (
            "fd00::1",
            "http://[fd00::1]:8000/v1/models",
            "`curl localhost:8000` is refused",
        ),
        ("0.0.0.0", "http://127.0.0.1:8000/v1/models", "on every interface"),
        ("::", "http://[::1]:8000/v1/models", "on every interface"),
    ],
)
def test_who_reaches_it_and_where(address, curl, says):
    request = asked(host=address, **HEAD)
    first, *more = listen_notes(request)
    assert says in first
    assert models_url(request) == curl
    # The Sparks of the cluster may ask: everybody else is worth a word.
    is_open = address not in ("127.0.0.1", "192.168.100.10")
    assert [f"everybody who reaches {address} can use" in each for each in more] == [
        True
    ] * is_open
