"""A few stretches of work to a turn of the event loop, in order, and nobody waits where nobody else does."""

from __future__ import annotations

import asyncio

from headway.server.pacing import Pace


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
