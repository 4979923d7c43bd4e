"""How hosts are called in messages."""

from hocket.job.introductions import _name


def host(name: str, machine: str) -> dict[str, str]:
    return {"name": name, "machine": machine}


def test_hosts_keep_their_names() -> None:
    assert _name([host("a", "1"), host("b", "2")]) == ("a", "b")


def test_machines_of_one_name_get_numbers() -> None:
    hosts = [host("localhost", "1"), host("localhost", "2"), host("a", "3"), host("localhost", "4")]
    assert _name(hosts) == ("localhost", "localhost (2)", "a", "localhost (3)")


def test_workers_of_one_machine_that_count_as_hosts_share_its_name() -> None:
    assert _name([host("a", "1"), host("a", "1"), host("b", "2")]) == ("a", "a", "b")
