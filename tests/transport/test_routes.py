"""The address that is chosen is one that all others reach."""

from hypothesis import given
from hypothesis import strategies as st

from hocket.transport import routes
from hocket.transport.routes import Node

ETH, DOCKER, LOOP = ("eth0", "10.0.0.2"), ("docker0", "172.17.0.1"), ("lo", "127.0.0.1")


def test_an_address_that_not_all_reach_is_not_taken() -> None:
    node = Node("b", [DOCKER, ETH, LOOP], None, {"a": {"10.0.0.2", "172.17.0.1"}, "c": {"10.0.0.2"}})
    assert routes.choose(node, same_network=False) == ETH


def test_where_ssh_leads_is_preferred() -> None:
    both = {"10.0.0.2", "172.17.0.1"}
    assert routes.choose(Node("b", [ETH, DOCKER], "172.17.0.1", {"a": both}), same_network=False) == DOCKER
    assert routes.choose(Node("b", [ETH, DOCKER], "192.168.0.9", {"a": both}), same_network=False) == ETH


def test_names_of_one_machine_meet_on_loopback() -> None:
    node = Node("b", [ETH, LOOP], "10.0.0.2", {"a": {"10.0.0.2", "127.0.0.1"}})
    assert routes.choose(node, same_network=True) == LOOP
    assert routes.choose(Node("a", [ETH, LOOP]), same_network=True) == LOOP, "alone"


def test_why_there_is_none_names_the_pair_and_what_was_tried() -> None:
    node = Node("b", [ETH, DOCKER, LOOP], None, {"a": set(), "c": {"10.0.0.2"}, "d": set()})
    assert routes.choose(node, same_network=False) is None
    text = routes.explain(node, None)
    assert text.startswith("a and d cannot reach it at 10.0.0.2 (eth0), 172.17.0.1 (docker0): ")
    assert "firewall" in text and "--interface" in text
    split = Node("b", [ETH, DOCKER], None, {"a": {"10.0.0.2"}, "c": {"172.17.0.1"}})
    assert "a reaches it at 10.0.0.2; c reaches it at 172.17.0.1" in routes.explain(split, None)
    assert "leave out --interface" in routes.explain(node, "eth0")


ADDRESSES = st.sets(st.sampled_from([ETH[1], DOCKER[1], LOOP[1]]))


@given(st.lists(st.sampled_from([ETH, DOCKER, LOOP]), unique=True), st.lists(ADDRESSES, max_size=3), st.booleans())
def test_whatever_is_chosen_all_reach(
    addresses: list[tuple[str, str]], reached: list[set[str]], same_network: bool
) -> None:
    node = Node("b", addresses, None, {str(i): found for i, found in enumerate(reached)})
    common = [entry for entry in addresses if all(entry[1] in found for found in reached)]
    chosen = routes.choose(node, same_network=same_network)
    assert (chosen in common) if common else chosen is None
