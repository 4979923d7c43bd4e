"""What is predicted from simulated links that were measured, against what each algorithm then takes over them."""

import pytest
import torch
from products import product

from comm.algorithms.members import simulated, values
from comm.tcp_groups import groups, together
from hocket.comm.algorithm_choice import Choice, Pick, choices
from hocket.comm.algorithms.ring import Ring
from hocket.comm.link_measurement import measure
from hocket.comm.link_model import LinkModel
from hocket.comm.tcp_group import TcpGroup
from hocket.transport.point_to_point import PointToPoint
from hocket.transport.simulated import Simulation, Speed
from hocket.transport.simulated_links import Trunk

SPEED, TRUNK = Speed(1e-4, 125e6), 12.5e6
SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20]
ALTERNATING = [0, 1] * 3
"""The site of each rank, where the sites alternate."""


class Place:
    """Simulated members, who may be in two sites, and are busy for some time with each message."""

    def __init__(self, size: int, in_sites: bool, busy: float) -> None:
        self.size, self._busy = size, busy
        self._trunk = Trunk(ALTERNATING[:size], TRUNK) if in_sites else None

    def measure(self) -> LinkModel:
        simulation, found = Simulation(), list[LinkModel]()
        self._run(lambda links: found.append(measure(links, simulation.now)), simulation)
        assert all(model == found[0] for model in found)
        return found[0]

    def time(self, pick: Pick, nbytes: int) -> float:
        """Seconds of an all-reduce; of a short one where several follow each other, as the buckets of an exchange."""

        def several(count: int) -> float:
            def call(links: PointToPoint) -> None:
                for _ in range(count):
                    pick.allreduce(links, torch.zeros(nbytes // 4), "sum")

            return self._run(call, Simulation()) / count

        alone = several(1)
        return alone if alone > 0.01 else several(max(3, min(10, int(0.005 / alone))))

    def _run(self, call: object, simulation: Simulation) -> float:
        return simulated(self.size, call, SPEED, self._trunk, self._busy, simulation)[1]  # type: ignore[arg-type]


@pytest.mark.few(3)
@product(place=[*((size, False) for size in range(2, 7)), (4, True), (5, True), (6, True)], busy=[1e-5, 8e-5])
def test_predictions_hold_and_the_pick_is_nearly_the_best(place: tuple[int, bool], busy: float) -> None:
    members = Place(*place, busy)
    model = members.measure()
    assert model.has_sites == place[1]
    choice = Choice("auto", members.size, model)
    for nbytes in SIZES:
        picks = {name: choice.predict(name, nbytes) for name in choices(model)}
        took = {name: members.time(pick, nbytes) for name, pick in picks.items()}
        for name, pick in picks.items():
            assert pick.seconds == pytest.approx(took[name], rel=0.15), (name, nbytes)
        assert took[choice.pick(nbytes).algorithm.name] <= 1.1 * min(took.values()), nbytes


def test_sites_that_alternate_do_not_make_bytes_slower() -> None:
    model = Place(4, True, 1e-5).measure()
    assert model.order == [0, 2, 1, 3]
    assert model.large == pytest.approx(1, rel=0.05)


@pytest.mark.few(2)
@product(place=[(2, False), (6, False), (4, True), (6, True)], busy=[1e-5, 8e-5])
def test_measuring_takes_some_tenths_of_a_second(place: tuple[int, bool], busy: float) -> None:
    simulation = Simulation()
    members = Place(*place, busy)
    assert members._run(lambda links: measure(links, simulation.now), simulation) < 0.6


def test_slow_links_are_measured_with_few_bytes() -> None:
    simulation = Simulation()
    found: list[LinkModel] = []

    def learn(links: PointToPoint) -> None:
        found.append(measure(links, simulation.now))

    took = simulated(2, learn, Speed(1e-2, 1e6), simulation=simulation)[1]
    assert took < 2 and found[0].slowest == pytest.approx(1e6, rel=0.1)
    assert found[0].predict(Ring(), 1 << 20) == pytest.approx((1 << 20) / 1e6, rel=0.15)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_measure_the_same(size: int) -> None:
    def learn(group: TcpGroup) -> LinkModel:
        found: list[LinkModel] = []
        group.run(lambda links: found.append(measure(links)), 0, "a test")
        group.choice.learn(found[0])
        return found[0]

    mine = values(size, 100_000, torch.float64)
    whole = torch.stack(mine).sum(0)
    with groups(size) as members:
        first, *others = together(members, learn)
        assert all(other == first for other in others)
        assert isinstance(first, LinkModel) and 0 < first.latency < 1 and first.slowest > 0
        together(members, lambda group: group.allreduce(mine[group.rank], "sum", "a test"))
        assert all(torch.allclose(each, whole) for each in mine)
        assert all(use.told == use.times == 1 for group in members for use in group.uses.values())
