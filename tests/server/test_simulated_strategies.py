"""The strategies with parameter servers on many simulated workers: their laws, their bounds, and what losses do."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.simulated import SAMPLES, Job, Worker, are_equal, assert_close, loss_of, make_model, plain, take, values

from hocket.coordinator.dealer_client import Deal
from hocket.errors import DeadlineExceeded
from hocket.strategies.base import Why
from hocket.transport.simulated import Speed

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
]
Times = list[list[float]]  # seconds of every step of every worker

few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
seconds = st.floats(0.01, 10.0)


def times_of(workers: st.SearchStrategy[int], steps: int = 6) -> st.SearchStrategy[Times]:
    each = st.lists(seconds, min_size=1, max_size=steps)
    return workers.flatmap(lambda count: st.lists(each, min_size=count, max_size=count))


def share(rank: int, workers: int, batch: list[int]) -> list[int]:
    return batch[rank::workers]


@pytest.mark.few(12)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each[0])
@pytest.mark.parametrize("strategy", ["bsp", "ps(staleness=0)", "softsync(1)", "bsp(placement='greedy')"])
@pytest.mark.parametrize(("workers", "servers"), [(5, 1), (5, 2), (15, 1), (15, 3)])
def test_bulk_synchronous_is_one_process_with_all_batches(
    workers: int, servers: int, strategy: str, optimizer: Any
) -> None:
    # The last batch is smaller than there are workers, some of whom then have nothing to push.
    batches = [list(range(0, 25)), list(range(25, 57)), list(range(57, 60)), list(range(0, 40))]

    def work(worker: Worker) -> list[torch.Tensor]:
        for number, batch in enumerate(batches):
            mine = share(worker.rank, workers, batch)
            worker.simulation.sleep((worker.rank * 7 + number * 3) % 5)
            worker.step(mine or [0], weight=len(mine))
        return values(worker.model)

    one = plain(optimizer, batches)
    many = Job(strategy, workers, servers, optimizer).run(work)
    for each in many:
        assert_close(one, each)
        assert are_equal(many[0], each)


@pytest.mark.parametrize(("workers", "servers"), [(5, 1), (5, 2), (15, 3)])
def test_several_servers_clip_by_the_norm_over_all(workers: int, servers: int) -> None:
    batches = [list(range(start, start + 15)) for start in range(0, SAMPLES, 15)]

    def work(worker: Worker) -> list[torch.Tensor]:
        for batch in batches:
            worker.simulation.sleep(worker.rank % 3)
            worker.step(share(worker.rank, workers, batch), weight=15 / workers)
        return values(worker.model)

    one = plain(OPTIMIZERS[1], batches, clip=0.05)
    for each in Job("bsp(clip=0.05)", workers, servers, OPTIMIZERS[1]).run(work):
        assert_close(one, each)


@pytest.mark.few(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each[0])
@pytest.mark.parametrize(
    "strategy",
    ["bsp", "ssp(staleness=1)", "ssp", "asynchronous", "softsync(1)", "softsync(4)", "ssp(staleness_aware=True)"],
)
def test_one_worker_is_plain(strategy: str, optimizer: Any) -> None:
    batches = [slice(start, start + 7) for start in range(0, SAMPLES, 7)]

    def work(worker: Worker) -> list[torch.Tensor]:
        for batch in batches:
            worker.simulation.sleep(0.1)
            worker.step(batch)
        return values(worker.model)

    assert_close(plain(optimizer, batches), Job(strategy, 1, 2, optimizer).run(work)[0])


def expected_pushes(times: Times, bound: int | None) -> Times:
    """When every push arrives if a worker waits exactly as long as the bound demands; 0 is before the first."""
    arrived = [[0.0] for _ in times]
    for step in range(max(map(len, times))):
        for rank, own in enumerate(times):
            if step < len(own):
                begin = arrived[rank][step]
                if bound is not None and step > bound:  # all others have pushed step - bound times, or have left
                    begin = max(begin, *(each[min(step - bound, len(each) - 1)] for each in arrived))
                arrived[rank].append(begin + own[step])
    return arrived


@few
@given(times=times_of(st.integers(1, 5)), bound=st.sampled_from([0, 1, 2, 4, None]), servers=st.integers(1, 2))
def test_the_bound_holds_and_nobody_waits_longer_than_it_demands(times: Times, bound: int | None, servers: int) -> None:
    pushed = [0] * len(times)
    arrived: Times = [[0.0] for _ in times]
    left: set[int] = set()

    def work(worker: Worker) -> None:
        for step, duration in enumerate(times[worker.rank]):
            slowest = min((pushed[r] for r in range(len(times)) if r not in left), default=step)
            assert bound is None or step - slowest <= bound
            worker.simulation.sleep(duration)
            pushed[worker.rank] += 1
            arrived[worker.rank].append(worker.simulation.now())
            worker.step([step])
        left.add(worker.rank)
        worker.leave()

    job = Job(f"ps(staleness={bound})", len(times), servers)
    job.run(work)
    for seen, wanted in zip(arrived, expected_pushes(times, bound), strict=True):
        assert seen == pytest.approx(wanted)
    pushes = {int(rank): each["pushes"] for rank, each in job.services[0].report().workers.items()}
    assert pushes == {rank: len(own) for rank, own in enumerate(times)}


def test_a_larger_bound_lets_the_fast_ones_go_on() -> None:
    times = [[1.0] * 12, [1.0] * 12, [5.0] + [1.0] * 11]
    ends = {}
    for bound in (0, 2, 4, None):

        def work(worker: Worker) -> float:
            for duration in times[worker.rank]:
                worker.simulation.sleep(duration)
                worker.step([0])
            return worker.simulation.now()

        ends[bound] = Job(f"ps(staleness={bound})", 3).run(work)
    assert [max(ends[bound]) for bound in ends] == [16.0] * 4  # the one that was slow needs as long as ever
    assert [min(ends[bound]) for bound in ends] == [16.0, 14.0, 12.0, 12.0]


@few
@given(times=times_of(st.integers(2, 6)))
def test_asynchronous_never_waits(times: Times) -> None:
    def work(worker: Worker) -> float:
        for duration in times[worker.rank]:
            worker.simulation.sleep(duration)
            worker.step([0])
        return worker.simulation.now()

    job = Job("asynchronous", len(times))
    assert job.run(work) == [pytest.approx(sum(each)) for each in times]
    report = job.services[0].report()
    assert [each["waited"] for each in report.workers.values()] == [0.0] * len(times)
    assert report.updates == sum(map(len, times))


def trained(choice: str, times: Times, **options: Any) -> tuple[list[torch.Tensor], Job]:
    """The parameters in the end, of workers that take their batches in turn."""
    job = Job(choice, len(times), **options)

    def work(worker: Worker) -> None:
        for step, duration in enumerate(times[worker.rank]):
            worker.simulation.sleep(duration)
            worker.step([(step * len(times) + worker.rank) % SAMPLES])
        worker.leave()

    job.run(work)
    shard: Any = job.services[0].tables[0].shard
    return [flat.clone() for flat in shard.flats], job


@few
@given(times=times_of(st.integers(2, 6)))
def test_softsync_of_one_is_bulk_synchronous_and_of_all_is_unscaled_asynchronous(times: Times) -> None:
    assert are_equal(trained("softsync(1)", times)[0], trained("bsp", times)[0])
    assert are_equal(trained(f"softsync({len(times)})", times)[0], trained("asynchronous(scale=1.0)", times)[0])


@few
@given(
    workers=st.integers(1, 7),
    n=st.integers(1, 8),
    total=st.integers(1, 30),
    random=st.randoms(use_true_random=False),
)
def test_softsync_collects_as_many_gradients_as_it_says(workers: int, n: int, total: int, random: Any) -> None:
    job = Job(f"softsync({n})", workers)
    done: list[int] = []

    def work(worker: Worker) -> None:
        deal = Deal(worker.client)
        while (number := take(worker.client, deal, total)) is not None:
            worker.simulation.sleep(random.uniform(0.1, 2.0))
            worker.step([number], name=(deal.number, deal.epoch, number))
            deal.finish([number])
            done.append(number)
        worker.leave()

    job.run(work)
    size = max(1, workers // n)
    assert sorted(done) == list(range(total))
    assert job.services[0].report().updates == -(-total // size)  # the last may be of fewer


@few
@given(times=st.lists(seconds, min_size=3, max_size=8))
def test_a_staleness_of_one_is_not_scaled(times: list[float]) -> None:
    pair = [times, times]  # they take turns, so each is one update behind
    aware, job = trained("softsync(2, staleness_aware=True)", pair)
    assert are_equal(aware, trained("softsync(2)", pair)[0])
    ages = {age for each in job.services[0].report().workers.values() for age in each["staleness"]}
    assert ages == {"0", "1"}


def test_the_rate_is_divided_by_more_staleness() -> None:
    """Three workers push at once: their gradients are 0, 1 and 2 updates old."""

    def work(worker: Worker) -> list[torch.Tensor]:
        worker.simulation.sleep(1.0 + worker.rank / 10)
        worker.step([worker.rank])
        worker.client.gather("the end", b"")
        worker.strategy.settle(Why.REFRESH)
        return values(worker.model)

    many = Job("softsync(3, staleness_aware=True)", 3).run(work)
    model = make_model()
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for rank, divisor in enumerate([1, 1, 2]):
        model.zero_grad()
        loss_of(model, [rank]).backward()
        for each, parameter in zip(total, model.parameters(), strict=True):
            assert parameter.grad is not None
            each += parameter.grad / divisor
    wanted = [parameter.detach() - 0.1 * each for parameter, each in zip(model.parameters(), total, strict=True)]
    for each in many:
        assert_close(wanted, each)


@pytest.mark.parametrize("strategy", ["bsp", "ssp(staleness=1)", "softsync(1)", "softsync(2)"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_lost_worker_holds_nobody_back(strategy: str, servers: int) -> None:
    job = Job(strategy, 4, servers)
    said: list[str] = []
    job.served.coordinator.say = said.append

    def work(worker: Worker) -> float:
        for step in range(6):
            worker.simulation.sleep(1.0)
            if worker.rank == 3 and step == 2:
                worker.simulation.sleep(2.5)
                job.served.coordinator.lose(3, "was lost")
                break
            worker.step([step * 4 + worker.rank])
        return worker.simulation.now()

    ends = job.run(work)
    assert max(ends[:3]) <= 8.5 and min(ends[:3]) >= 6.0
    assert len(said) == 1 and "rank 3 was lost" in said[0]


def test_rounds_go_on_without_a_lost_worker() -> None:
    job = Job("bsp", 3, optimizer=OPTIMIZERS[0])

    def work(worker: Worker) -> list[torch.Tensor]:
        for step in range(5):
            if worker.rank == 2 and step == 2:
                worker.simulation.sleep(1.0)
                job.served.coordinator.lose(2, "was lost")
                return []
            worker.step([step * 3 + worker.rank])
        return values(worker.model)

    many = job.run(work)
    batches = [[step * 3 + rank for rank in range(3 if step < 2 else 2)] for step in range(5)]
    assert_close(plain(OPTIMIZERS[0], batches), many[0])
    assert are_equal(many[0], many[1])


def stalling(strategy: str) -> tuple[list[Any], Job]:
    """Worker 2 is away for a thousand seconds in its third step."""
    job = Job(strategy, 3)

    def work(worker: Worker) -> tuple[list[float], int]:
        pushes = []
        for step in range(6):
            worker.simulation.sleep(1000.0 if (worker.rank, step) == (2, 2) else 1.0)
            pushes.append(worker.simulation.now())
            worker.step([step * 3 + worker.rank])
        worker.leave()
        return pushes, worker.strategy.late

    return job.run(work), job


@pytest.mark.parametrize(("strategy", "bound"), [("bsp", 0), ("ssp(staleness=1)", 1)])
def test_who_stalls_is_waited_for_only_so_long_and_its_late_push_refused(strategy: str, bound: int) -> None:
    options = "patience=5.0" if strategy == "bsp" else "staleness=1, patience=5.0"
    found, job = stalling(f"{strategy.partition('(')[0]}({options})")
    for pushes, late in found[:2]:
        assert late == 0
        assert pushes[-1] == 11.0  # six steps, and once five seconds for nothing
        assert pushes[3 + bound] - pushes[2 + bound] == 6.0
    pushes, late = found[2]
    assert late == 1
    assert pushes == [1.0, 2.0, 1002.0, 1003.0, 1004.0, 1005.0]
    workers = job.services[0].report().workers
    assert [workers[rank]["pushes"] for rank in "012"] == [6, 6, 5]
    assert workers["2"]["late"] == 1


def test_without_a_bound_nobody_is_late() -> None:
    found, job = stalling("asynchronous(patience=5.0)")
    assert [late for _, late in found] == [0, 0, 0]
    assert job.services[0].report().updates == 18


def test_without_patience_the_deadline_ends_the_job() -> None:
    job = Job("bsp", 2, timeout=50.0)

    def work(worker: Worker) -> None:
        worker.simulation.sleep(100.0 * worker.rank)
        worker.step([0])

    with pytest.raises(DeadlineExceeded, match="rank 1 did not push a gradient within 50 s"):
        job.run(work)


def downpour_by_hand(times: Times, fetch: int, push: int, rate: float, adagrad: bool) -> list[torch.Tensor]:
    """Algorithm 7.1 of Dean et al. 2012, event after event."""
    server, here = make_model(), [make_model() for _ in times]
    kind: Any = torch.optim.Adagrad if adagrad else torch.optim.SGD
    rule = kind(server.parameters(), lr=rate)
    accrued = [[torch.zeros_like(p) for p in server.parameters()] for _ in times]
    events = [(now, rank, step) for rank, own in enumerate(times) for step, now in enumerate(itertools.accumulate(own))]
    for _, rank, step in sorted(events):
        model = here[rank]
        gradients = torch.autograd.grad(
            loss_of(model, [(step * len(times) + rank) % SAMPLES]), list(model.parameters())
        )
        with torch.no_grad():
            for total, parameter, gradient in zip(accrued[rank], model.parameters(), gradients, strict=True):
                total += gradient
                parameter -= 0.1 * gradient  # overwritten at once if it fetches
        if (step + 1) % push == 0:
            for parameter, total in zip(server.parameters(), accrued[rank], strict=True):
                parameter.grad = total.clone()
                total.zero_()
            rule.step()
        if (step + 1) % fetch == 0:
            model.load_state_dict(server.state_dict())
    return values(server)


@few
@given(
    times=times_of(st.integers(1, 5), steps=8),
    fetch=st.integers(1, 4),
    push=st.integers(1, 4),
    adagrad=st.booleans(),
    servers=st.integers(1, 2),
    random=st.randoms(use_true_random=False),
)
def test_downpour_is_what_the_paper_says(
    times: Times, fetch: int, push: int, adagrad: bool, servers: int, random: Any
) -> None:
    times = [[each + random.uniform(0, 0.01) for each in own] for own in times]  # no two events at once
    job = Job(f"downpour(fetch={fetch}, push={push}, rate=0.05, adagrad={adagrad})", len(times), servers)
    last: list[list[torch.Tensor]] = []

    def work(worker: Worker) -> None:
        for step, duration in enumerate(times[worker.rank]):
            worker.simulation.sleep(duration)
            worker.step([(step * len(times) + worker.rank) % SAMPLES])
        worker.client.gather("the end", b"")
        worker.strategy.settle(Why.REFRESH)
        last.append(values(worker.model))

    job.run(work)
    assert_close(downpour_by_hand(times, fetch, push, 0.05, adagrad), last[0])
    assert all(are_equal(last[0], each) for each in last)


def test_a_warm_start_lets_rank_0_go_ahead() -> None:
    begun: dict[int, float] = {}

    def work(worker: Worker) -> None:
        for _ in range(6):
            worker.simulation.sleep(1.0)
            loss = loss_of(worker.model, [0])
            begun.setdefault(worker.rank, worker.simulation.now())
            loss.backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()

    Job("downpour(warmup=4)", 3).run(work)
    assert begun == {0: 1.0, 1: 4.0, 2: 4.0}


def dealing(
    durations: list[float], total: int, lost: int | None = None, strategy: str = "asynchronous", timeout: float = 1e5
) -> Any:
    """Every worker takes batches as it gets ready; ``lost`` dies over its second one."""
    job = Job(strategy, len(durations), timeout=timeout)

    def work(worker: Worker) -> list[int]:
        deal, mine = Deal(worker.client), []
        while (number := take(worker.client, deal, total)) is not None:
            worker.simulation.sleep(durations[worker.rank])
            if worker.rank == lost and mine:
                job.served.coordinator.lose(worker.rank, "was lost")
                return mine
            worker.step([number % SAMPLES], name=(deal.number, deal.epoch, number))
            mine.append(number)
            deal.finish([number])
        worker.leave()
        return mine

    return job.run(work), job


@few
@given(
    durations=st.lists(st.floats(0.5, 5.0), min_size=1, max_size=6),
    total=st.integers(0, 40),
    strategy=st.sampled_from(["asynchronous", "bsp", "ssp(staleness=2)", "softsync(2)"]),
)
def test_every_batch_is_dealt_once(durations: list[float], total: int, strategy: str) -> None:
    taken, _ = dealing(durations, total, strategy=strategy)
    assert sorted(itertools.chain(*taken)) == list(range(total))


def test_a_slow_worker_takes_fewer_batches() -> None:
    taken, job = dealing([1.0, 1.0, 4.0], 36)
    assert [len(each) for each in taken] == [16, 16, 4]
    assert job.simulation.now() == 16.0


def test_what_was_taken_at_once_is_for_others_when_batches_get_slow() -> None:
    job = Job("asynchronous", 3)

    def work(worker: Worker) -> list[int]:
        deal, mine = Deal(worker.client), []
        deal.leases = True
        while (number := take(worker.client, deal, 3000)) is not None:
            worker.simulation.sleep(10.0 if worker.rank == 1 and len(mine) >= 100 else 0.001)
            mine.append(number)
            deal.finish([number])
        worker.leave()
        return mine

    taken = job.run(work)
    assert sorted(itertools.chain(*taken)) == list(range(3000))
    assert len(taken[1]) <= 102  # the others did the rest of its lease when they had nothing else
    assert job.simulation.now() < 21.0


def test_a_batch_is_waited_for_until_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="rank 1 did not end a batch within 50 s"):
        dealing([1.0, 52.0], 3, timeout=50.0)
    taken, _ = dealing([1.0, 49.0], 3, timeout=50.0)
    assert sorted(itertools.chain(*taken)) == [0, 1, 2]


@few
@given(
    durations=st.lists(st.floats(0.5, 5.0), min_size=2, max_size=5),
    total=st.integers(5, 30),
    strategy=st.sampled_from(["asynchronous", "bsp", "ssp(staleness=2)", "softsync(2)"]),
)
def test_what_a_lost_worker_held_is_dealt_again(durations: list[float], total: int, strategy: str) -> None:
    taken, job = dealing(durations, total, lost=0, strategy=strategy)
    assert sorted(itertools.chain(*taken)) == list(range(total))
    assert job.services[0].tables[0].tallies[0].pushes == len(taken[0]) <= 1


def test_messages_take_virtual_time() -> None:
    """A push and its answer: each has the latency, and the bytes of all parameters."""

    def work(worker: Worker) -> float:
        begin = worker.simulation.now()
        worker.step([0])
        return worker.simulation.now() - begin

    nbytes = sum(parameter.nbytes for parameter in make_model().parameters())
    found = Job("asynchronous", 1, speed=Speed(latency=0.5)).run(work)
    assert found == [pytest.approx(1.0)]
    found = Job("asynchronous", 1, speed=Speed(latency=0.5, bandwidth=1000.0)).run(work)
    assert 1.0 + 2 * nbytes / 1000 <= found[0] <= 1.0 + 2 * (nbytes + 64 * 4) / 1000  # whole cache lines
    halves = Job("asynchronous", 1, servers=2, speed=Speed(latency=0.5, bandwidth=1000.0)).run(work)
    assert halves[0] - 1.0 < 0.75 * (found[0] - 1.0)  # two servers are asked at once
