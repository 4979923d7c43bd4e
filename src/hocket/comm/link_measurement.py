"""Measuring the links between the members of a group, before the first exchange that is worth it.

All members meet in pairs, round after round, and in each round all pairs send both ways at once, so that what several
links share shows. If some links look slower than others, perhaps by chance, all are measured once more. Then some
all-reduces are timed, and the model is corrected by them: they also show whether hosts share a machine.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from hocket.comm.algorithms.collective_algorithm import CollectiveAlgorithm
from hocket.comm.algorithms.direct import Direct
from hocket.comm.algorithms.halving_doubling import HalvingDoubling
from hocket.comm.algorithms.ring import Ring
from hocket.comm.algorithms.star import Star
from hocket.comm.algorithms.tree import Tree
from hocket.comm.link_model import LinkModel, leaves, rehearse, rounds
from hocket.transport.point_to_point import Members, PointToPoint

_TRIP, _TRIPS = 64, 8  # bytes, and messages, by which latency is measured
_SHORT, _LONG = 1 << 18, 1 << 20  # bytes whose times differ by what the link carries
_ENOUGH = 0.015  # seconds of the short message from which the long one tells nothing new
_SMALL, _MIDDLE, _LARGE = 1 << 12, 1 << 16, 1 << 20  # bytes of the all-reduces by which predictions are corrected
_HUGE = 1 << 22  # bytes of one that caches do not hold
_FEW_BYTES = (Direct, HalvingDoubling, Ring, Star, Tree)  # the algorithms by which small ones are timed
_TIMES = 3  # of each; the median counts, since the best time is not what a run will see
_IN_A_ROW = 2  # of the small ones by which overheads are fitted, twice
_QUICK = 0.01  # predicted seconds up to which an all-reduce is timed for what else the prediction has left out
_MANY = 10  # of these that follow each other, at most
_MOST = 3.0  # times that it may be off
_LONG_TIME = 0.03  # seconds of the large one from which it is made smaller, and timed once
_PARTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # of a small message's time, in which each end may be busy with it
_NOISE = 5e7  # bytes per second from which on a link may have looked slow since its ends were busy otherwise
_FEW = 8  # members up to which that is looked at, and whether they share processors
_PROCESSORS = (1, 2, 3, 4, 6)
_BUSY = ((0.25, 1.0), (0.5, 1.0), (0.5, 8.0), (1.0, 8.0))
"""Of the time of bytes, the part that processors take; and how many times as fast a link is if it is not the limit."""

Clock = Callable[[], float]


def measure(links: PointToPoint, clock: Clock = time.perf_counter) -> LinkModel:
    """Measure the links of a group; collective. It takes some tenths of a second.

    Args:
        links: Messages between the members, of whom there are two or more.
        clock: Tells the time in seconds.
    """
    model = _measure_all(links, clock)
    if model.has_sites and model.slowest > _NOISE:
        again = _measure_all(links, clock)
        better = (tuple(map(max, *rows)) for rows in zip(model.rates, again.rates, strict=True))
        model = LinkModel(min(model.latency, again.latency), tuple(better))
    return _calibrate(links, _smoothed(model), clock)


def _measure_all(links: PointToPoint, clock: Clock) -> LinkModel:
    """Latency and rates of all links, while all members are busy."""
    size, rank = links.size, links.rank
    mine = torch.zeros(size + 1, dtype=torch.float64)  # by whom this member gets so many bytes per second; a latency
    latencies = []
    for pairs in rounds(size):
        _meet(links)
        peer = next((b if a == rank else a for a, b in pairs if rank in (a, b)), None)
        if peer is not None:
            latency, rate = _measure_link(links, peer, clock)
            latencies.append(latency)
            mine[peer] = rate
    mine[size] = sum(latencies) / len(latencies)
    table = _of_all(links, mine)
    rates = tuple(tuple(float(table[b][a]) for b in range(size)) for a in range(size))
    return LinkModel(float(table[:, size].median()), rates)


def _calibrate(links: PointToPoint, model: LinkModel, clock: Clock) -> LinkModel:
    """Correct a model by all-reduces that are timed, on all members together.

    Small ones by several algorithms tell how much of a message's time an end is busy with it: in some, one member has a
    message for each other one, and in some, messages follow each other from member to member. A large one tells what
    processors take for its bytes; where members share processors, by a star, too, which leaves most links idle.
    """
    in_a_row = _IN_A_ROW if links.size <= _FEW and not model.is_long else 1
    calls = [[each * in_a_row for each in rehearse(make(), links.size, _SMALL)] for make in _FEW_BYTES]
    took = _slowest(links, [_time(links, make(), _SMALL, _IN_A_ROW, clock, in_a_row) for make in _FEW_BYTES])
    fits = []
    processors = [count for count in _PROCESSORS if count < links.size <= _FEW]
    for part, at_once in itertools.product(_PARTS, (0, *processors)):
        fit = replace(model, overhead=model.latency * part, at_once=at_once)
        ratios = [seconds / fit.replay(each) * in_a_row for seconds, each in zip(took, calls, strict=True)]
        small = statistics.median(ratios)
        fits.append((sum(abs(math.log(ratio / small)) for ratio in ratios), replace(fit, small=_bounded(small))))
    model = min(fits, key=lambda fit: fit[0])[1]
    is_fast = model.predict(Ring(), _LARGE, model.order) < _LONG_TIME
    nbytes, times = (_LARGE, _TIMES) if is_fast else (_SHORT, 1)
    makes = (Ring, Star) if is_fast and model.at_once else (Ring,)
    took = _slowest(links, [_time(Members(links, model.order), make(), nbytes, times, clock) for make in makes])
    model = min((_fit_large(fit, makes, took, nbytes) for fit in _shares(model)), key=lambda fit: fit[0])[1]
    return replace(model, corrections=tuple(_corrections(links, model, clock)))


def _corrections(
    links: PointToPoint, model: LinkModel, clock: Clock
) -> Iterator[tuple[str, tuple[tuple[int, float], ...]]]:
    """What each algorithm takes, over what was predicted; 1 where that is long, and bytes over links count most."""
    for make in _FEW_BYTES:
        algorithm, factors = make(), []
        order = model.order if make is Ring else list(range(links.size))
        for nbytes in (_SMALL, _MIDDLE, _LARGE, _HUGE):
            predicted, factor = model.predict(algorithm, nbytes, order), 1.0
            if predicted < (_LONG_TIME if nbytes == _HUGE else _QUICK):
                in_a_row = 1 if nbytes == _HUGE else max(_TIMES, min(_MANY, int(_QUICK / 2 / predicted)))
                times = 1 if in_a_row == _TIMES else _TIMES
                took = _slowest(links, [_time(Members(links, order), algorithm, nbytes, times, clock, in_a_row)])
                factor = min(max(took[0] / predicted, 1 / _MOST), _MOST)
            factors.append((nbytes, factor))
        yield algorithm.name, tuple(factors)


def _shares(model: LinkModel) -> Iterator[LinkModel]:
    """The model with nothing, some or all of the time of bytes spent by processors that members share."""
    yield model
    each = model.at_once / (2 * sum(max(row) for row in model.rates))
    for part, alone in _BUSY if model.at_once else ():
        yield replace(model, handling=part * each, alone=alone)


def _fit_large(
    model: LinkModel, makes: Sequence[Callable[[], CollectiveAlgorithm]], took: Sequence[float], nbytes: int
) -> tuple[float, LinkModel]:
    """How far a model is off the times of large all-reduces, and the model with a factor that suits the first."""
    rest = [model.predict(make(), 1, model.order) for make in makes]
    of_bytes = [model.predict(make(), nbytes, model.order) - each for make, each in zip(makes, rest, strict=True)]
    large = _bounded(max(took[0] - rest[0], 0.0) / of_bytes[0])
    found = [each + large * more for each, more in zip(rest, of_bytes, strict=True)]
    error = sum(abs(math.log(seconds / each)) for seconds, each in zip(took, found, strict=True))
    return error, replace(model, large=large)


def _smoothed(model: LinkModel) -> LinkModel:
    """Links of members that are close to each other count as equal: what differs there is most often noise."""
    rates = [list(row) for row in model.rates]
    for ranks in leaves(model.sites):
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        for a, b in pairs:
            rates[a][b] = statistics.median(model.rates[c][d] for c, d in pairs)
    return replace(model, rates=tuple(map(tuple, rates)))


def _time(
    links: PointToPoint, algorithm: CollectiveAlgorithm, nbytes: int, times: int, clock: Clock, in_a_row: int = 1
) -> float:
    """Seconds that an all-reduce takes here, as a rule; of several that follow each other."""
    data, spent = torch.zeros(nbytes // 4), []
    for _ in range(times):
        _meet(links)
        begin = clock()
        for _ in range(in_a_row):
            algorithm.allreduce(links, data, "sum")
        spent.append((clock() - begin) / in_a_row)
    return statistics.median(spent)


def _slowest(links: PointToPoint, mine: list[float]) -> list[float]:
    """For each of several times, that of the member for which it was the longest."""
    return [float(each) for each in _of_all(links, torch.tensor(mine, dtype=torch.float64)).amax(0)]


def _bounded(factor: float) -> float:
    return min(max(factor, 0.1), 10.0)


def _meet(links: PointToPoint) -> None:
    """Wait until all members are here, so that they begin together what is timed."""
    _of_all(links, torch.zeros(1))


def _of_all(links: PointToPoint, mine: torch.Tensor) -> torch.Tensor:
    """What each member has, one row for each."""
    count = mine.numel()
    whole = mine.new_zeros(links.size * count)
    whole[links.rank * count :][:count] = mine
    Direct().allgather(links, whole, [(rank * count, (rank + 1) * count) for rank in range(links.size)])
    return whole.view(links.size, count)


def _measure_link(links: PointToPoint, peer: int, clock: Clock) -> tuple[float, float]:
    """Seconds of a small message to or from ``peer``, and bytes per second from there, both ways being used."""

    def swap(mine: torch.Tensor) -> tuple[float, torch.Tensor]:
        begin, theirs = clock(), torch.empty_like(mine)
        links.send(peer, mine)
        links.receive(peer, theirs)
        links.flush()
        return clock() - begin, theirs

    def seconds(nbytes: int) -> float:
        """The longer time of both ends: the other one may have been late, and all was there already."""
        spent, _ = swap(torch.zeros(nbytes // 8, dtype=torch.float64))
        return max(spent, float(swap(torch.tensor([spent], dtype=torch.float64))[1]))

    trips = sorted(seconds(_TRIP) for _ in range(_TRIPS))
    first = seconds(_SHORT)  # TCP is careful then
    short = seconds(_SHORT) if first > _ENOUGH else min(seconds(_SHORT) for _ in range(2))
    if short > _ENOUGH:
        return trips[_TRIPS // 4], _SHORT / short
    long = min(seconds(_LONG) for _ in range(3))
    return trips[_TRIPS // 4], (_LONG - _SHORT) / max(long - short, long / 2)
