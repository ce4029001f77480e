"""A few stretches of work to a turn of the event loop, in order, and nobody waits where nobody else does."""

from __future__ import annotations

import asyncio

from headway.server.edge.pacing import Pace, Shared
from headway.server.edge.timer import Timer


async def test_a_crowd_takes_turns_and_the_loop_goes_on_between_them() -> None:
    pace, log = Pace(3), []

    async def newcomer(number: int) -> None:
        await pace.turn()
        log.append(number)

    newcomers = [asyncio.create_task(newcomer(number)) for number in range(100)]
    done = asyncio.gather(*newcomers)
    between = []
    while not done.done():
        before = len(log)
        await asyncio.sleep(0)  # one turn of the loop
        between.append(len(log) - before)
    assert log == list(range(100))
    assert max(between) == 3 and sum(between) == 100


async def test_one_alone_does_not_wait() -> None:
    pace = Pace(1)
    for _ in range(5):
        turn = pace.turn()
        try:
            turn.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)


async def test_who_gives_up_takes_no_place_from_others() -> None:
    pace, log = Pace(1), []

    async def newcomer(number: int) -> None:
        await pace.turn()
        log.append(number)

    newcomers = [asyncio.create_task(newcomer(number)) for number in range(10)]
    await asyncio.sleep(0)
    for gone in newcomers[2:9]:
        gone.cancel()
    await asyncio.gather(*newcomers, return_exceptions=True)
    assert log == [0, 1, 9]
    await asyncio.sleep(0)
    await asyncio.wait_for(pace.turn(), 1)


async def test_what_is_shared_is_made_once_for_all_who_wait_and_not_all_the_time() -> None:
    made: list[float] = []

    def make() -> int:
        made.append(asyncio.get_running_loop().time())
        return len(made)

    shared = Shared(make, 0.05)
    assert await asyncio.gather(*(shared.get() for _ in range(100))) == [1] * 100
    first, second = await asyncio.gather(shared.get(), shared.get())
    assert first == second == 2 and made[1] - made[0] >= 0.045
    given_up = asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    given_up.cancel()
    assert await shared.get() == 3, "who gives up takes it from nobody"


async def test_a_timer_counts_from_when_it_was_set_last() -> None:
    loop, rung = asyncio.get_running_loop(), list[float]()
    timer = Timer(loop, lambda: rung.append(loop.time()))
    timer.set(10.0)
    timer.set(0.02)  # sooner than before
    timer.since_s += 0.02
    began = loop.time()
    await asyncio.sleep(0.08)
    assert len(rung) == 1 and rung[0] >= began + 0.035 and not timer.is_set
    timer.set(0.01)
    timer.stop()
    await asyncio.sleep(0.02)
    timer.set(0.01)
    timer.end()
    await asyncio.sleep(0.02)
    assert len(rung) == 1
