"""`advise` in a job, and training over a link that is slow."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import children
import jobs
import pytest

MBIT = 5
"""Of the slow link, per second."""


def answers(width, ms, what, **options):
    return jobs.run("advising.py", (1, 1), json.dumps([width, ms, what]), **options)


@pytest.mark.slow  # errors of a process are told by what evaluation tells them with
def test_what_one_process_cannot_read_is_an_error_in_all():
    one, other = answers(4, [1.0, 1.0], "error")
    assert other == "OSError: the disk is gone"
    assert "process 1" in one and "the disk is gone" in one, one


@contextmanager
def two_hosts(mbit: int) -> Iterator[list[jobs.Host]]:
    """Two hosts, as far as the network is concerned, with a slow link in between."""
    tools = [shutil.which(name) for name in ("ip", "tc", "unshare")]
    if os.geteuid() != 0 or None in tools:
        pytest.skip("network namespaces need root, and the programs ip, tc and unshare")
    names = [f"elche-{os.getpid()}-{at}" for at in range(2)]
    addresses = [f"10.77.{os.getpid() % 250}.{at + 1}" for at in range(2)]
    hosts = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
    with ExitStack() as stack:
        for name in names:
            if children.run("ip", "netns", "add", name).returncode:
                pytest.skip("this system grants no network namespaces")
            stack.callback(children.run, "ip", "netns", "del", name)
            own = f"/etc/netns/{name}"
            os.makedirs(own)
            stack.callback(shutil.rmtree, own)
            with open(f"{own}/hosts", "w") as file:  # shown as /etc/hosts by `ip netns exec`
                file.write(f"127.0.0.1 localhost\n{hosts}")
        first, second = names
        commands = [
            f"ip link add link0 netns {first} type veth peer name link0 netns {second}",
            *(
                command
                for name, address in zip(names, addresses, strict=True)
                for command in (
                    f"ip -n {name} link set lo up",
                    f"ip -n {name} addr add {address}/24 dev link0",
                    f"ip -n {name} link set link0 up",
                    f"tc -n {name} qdisc add dev link0 root tbf rate {mbit}mbit burst 32k "
                    "latency 1s",
                )
            ),
        ]
        for command in commands:
            done = children.run(*command.split())
            assert done.returncode == 0, (command, done.stderr)
        # gloo asks for the address of the host's name
        named = 'hostname "$0" && exec "$@"'
        yield [
            jobs.Host(
                ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, name], address
            )
            for name, address in zip(names, addresses, strict=True)
        ]


@pytest.mark.slow  # about a minute: every exchange crosses the slow link
@pytest.mark.further  # on busy processors the speeds, and so the counts, are others
def test_over_a_slow_link_windows_grow_and_advice_is_diloco_with_int8():
    width, ms = 10_000, [1.0, 2.0]
    with two_hosts(MBIT) as hosts:
        one, other = answers(width, ms, "train", hosts=hosts)
    assert one == other
    advice = one["advice"]
    assert one["share"] > 0.1, one["text"]  # although its windows are as long as they may be
    assert min(advice["elche"]["counts"]) == 200
    assert advice["local_steps"]["name"] == "DiLoCo, int8"
    assert "The link is slow: exchanges take" in one["text"]
    # the anchor follows the time of the exchange: the slower device begins with 2 microbatches; how
    # many it has at the end depends on how long other work makes the steps
    assert min(one["counts"][0]) == 2 < min(one["counts"][-1])
