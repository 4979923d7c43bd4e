"""The ledger: who is in the job, and what is news."""

from hypothesis import given
from hypothesis import strategies as st

from hocket.coordinator.ledger import Ledger

WORKERS = 4
EVENTS = st.tuples(st.sampled_from(["come", "die", "finish"]), st.integers(0, WORKERS - 1))


@given(events=st.lists(EVENTS, max_size=30))
def test_a_generation_rises_with_every_change_and_only_then(events: list[tuple[str, int]]) -> None:
    ledger = Ledger(WORKERS)
    gone: dict[int, str] = {}
    for what, rank in events:
        before = ledger.membership()
        if what == "come":
            assert ledger.welcome(rank, {"host": rank}) == (rank in gone)
            is_news = gone.pop(rank, None) is not None
        else:
            why = "was lost" if what == "die" else ""
            is_news = rank not in gone
            assert ledger.lose(rank, why) == is_news
            gone.setdefault(rank, why)
        after = ledger.membership()
        assert after.generation == before.generation + is_news
        assert ledger.live == after.ranks == [each for each in range(WORKERS) if each not in gone]
        assert list(ledger.gone.items()) == list(gone.items())  # the first one first


def test_who_is_expected_is_a_member_and_has_said_nothing() -> None:
    ledger = Ledger(2)
    assert ledger.welcome(1, {"host": "here"}) is False
    assert [(member.rank, member.said) for member in ledger.membership().members] == [(0, {}), (1, {"host": "here"})]
    assert ledger.membership().generation == 0
