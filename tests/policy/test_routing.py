"""Routers: who gets a request, from what the queues of servers count."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headway.policy.admission.queue_bound import QueueLimits, Queues
from headway.policy.fleet.routing import MOST_OF_MEAN, PREFIX_TOKENS, ROUTERS, Router
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.request import Request
from headway.policy.step.sampling_params import SamplingParams

CLASSES = ClassTable((ServiceClass(name="chat", ttft_ms=200.0), ServiceClass(name="batch")), "chat")


def queues(*held: tuple[int, int, str]) -> list[Queues]:
    """The queues of servers, of which each holds (choices, prompt tokens in all, class)."""
    made = []
    for choices, tokens, name in held:
        of_one = Queues(QueueLimits(), CLASSES)
        assert of_one.place(name).take(choices, [tokens]) is None
        made.append(of_one)
    return made


def request(prompt: list[int] | None = None, service_class: str = "", salt: str = "") -> Request:
    return Request("1", prompt or [1, 2], SamplingParams(), [0], service_class=service_class, cache_salt=salt)


def test_round_robin_goes_round() -> None:
    router, servers = ROUTERS["round-robin"](CLASSES), queues((9, 9, "chat"), (0, 0, "chat"), (0, 0, "chat"))
    assert [router.choose(request(), servers) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert router.choose(request(), servers[:2]) in (0, 1)  # one has gone


def test_least_loaded_goes_where_the_fewest_are_and_then_by_their_prompts() -> None:
    router = ROUTERS["least-loaded"](CLASSES)
    assert router.choose(request(), queues((3, 10, "chat"), (2, 900, "chat"), (4, 0, "chat"))) == 1
    assert router.choose(request(), queues((2, 900, "chat"), (2, 10, "chat"))) == 1


def test_a_class_goes_where_the_least_waits_before_it() -> None:
    router = ROUTERS["class-aware"](CLASSES)
    servers = queues((1, 5000, "batch"), (1, 300, "chat"))
    assert router.choose(request(service_class="chat"), servers) == 0  # batch does not go before it
    assert router.choose(request(), servers) == 0  # chat is the default
    assert router.choose(request(service_class="batch"), servers) == 1


def test_servers_with_other_classes_are_chosen_by_those_that_they_have() -> None:
    router, other = ROUTERS["class-aware"](CLASSES), ClassTable((ServiceClass(name="batch"),))
    servers = [Queues(QueueLimits(), other), *queues((1, 5, "chat"))]
    assert router.choose(request(), servers) == 0 and router.choose(request(service_class="new"), servers) == 0


def test_prompts_that_begin_alike_go_to_one_server_until_it_has_too_much() -> None:
    router, rng = ROUTERS["prefix-affinity"](CLASSES), random.Random(1)
    idle = queues(*[(0, 0, "chat")] * 4)
    beginnings = [[rng.randrange(1000) for _ in range(PREFIX_TOKENS)] for _ in range(400)]
    first = [router.choose(request(each), idle) for each in beginnings]
    assert first == [router.choose(request([*each, rng.randrange(9)]), idle) for each in beginnings]
    assert min(Counter(first).values()) > 60  # of 100 on average
    assert any(router.choose(request(each, salt="a"), idle) != at for each, at in zip(beginnings, first, strict=True))
    fewer = [router.choose(request(each), idle[:3]) for each in beginnings]
    assert all(now == before for now, before in zip(fewer, first, strict=True) if before < 3)  # the others stay
    busy = queues((40, 0, "chat"), *[(2, 0, "chat")] * 3)
    assert 0 not in {router.choose(request(each), busy) for each in beginnings}


@pytest.mark.parametrize("name", ROUTERS)
def test_no_router_lets_a_server_have_far_more_than_the_others(name: str) -> None:
    router, rng = ROUTERS[name](CLASSES), random.Random(2)
    servers = queues(*[(0, 0, "chat")] * 5)
    for number in range(1000):
        alike = [number % 3] * PREFIX_TOKENS  # all requests begin in one of three ways
        chosen = _routed(router, request(alike, rng.choice(["chat", "batch"])), servers)
        assert 0 <= chosen < 5
    counts = [each.of_all.choices for each in servers]
    assert sum(counts) == 1000 and max(counts) <= MOST_OF_MEAN * 200 + 1 and min(counts) > 50


def _routed(router: Router, asked: Request, servers: list[Queues]) -> int:
    chosen = router.choose(asked, servers)
    assert servers[chosen].place(asked.service_class).take(1, [50]) is None
    return chosen
