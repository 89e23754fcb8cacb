"""What was in use at two deaths of engines is refused to its tenant for a while, on a simulated clock."""

from collections.abc import Callable
from itertools import count

import pytest
from msgspec.structs import replace

from loraplex.engine.errors import AdapterQuarantined, PromptQuarantined
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.errors import GrammarTooCostly
from loraplex.platform.engines.poison_memory import PoisonMemory, PoisonPolicy

NUMBERS = count()
POLICY = PoisonPolicy(refusal_s=60.0, max_refusal_s=200.0, suspect_s=3600.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> PoisonMemory:
    return PoisonMemory(POLICY, clock)


def request(tenant: str, adapter: str | None = None, grammar: bytes | None = None) -> EngineRequest:
    """The engine request of a new client request."""
    namespace = tenant.encode().ljust(32, b".")
    return EngineRequest(
        request_id=f"r{next(NUMBERS)}",
        namespace=namespace,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        adapter=adapter and AdapterRef(namespace=namespace, digest=adapter, blob_path="/b") or None,
        grammar=grammar,
    )


def another(client_request: EngineRequest) -> EngineRequest:
    """The same use by another client request."""
    return replace(client_request, request_id=f"r{next(NUMBERS)}")


def refused(memory: PoisonMemory, wanted: EngineRequest) -> bool:
    try:
        memory.check(wanted, "tools")
    except (AdapterQuarantined, GrammarTooCostly, PromptQuarantined):
        return True
    return False


def test_an_adapter_is_refused_after_two_deaths_and_to_its_tenant_alone(memory: PoisonMemory) -> None:
    mine, others, plain = request("a", "d1"), request("b", "d1"), request("a")
    memory.record_death([mine, mine, plain])
    assert not refused(memory, mine)
    memory.record_death([another(mine)])
    with pytest.raises(AdapterQuarantined, match="this adapter; it is refused for 60 s"):
        memory.check(mine, None)
    assert not any(refused(memory, each) for each in (others, plain, request("a", "d2")))
    assert memory.refusals == {"adapter": 1}


def test_a_grammar_is_refused_by_the_name_of_its_field(memory: PoisonMemory) -> None:
    for _ in range(2):
        memory.record_death([request("a", grammar=b"spec")])
    with pytest.raises(GrammarTooCostly) as error:
        memory.check(request("a", grammar=b"spec"), "response_format")
    assert error.value.param == "response_format"
    assert not refused(memory, request("a", grammar=b"other"))
    assert memory.refusals == {"grammar": 1}


def test_a_prompt_without_either_is_refused_to_its_tenant_alone(memory: PoisonMemory) -> None:
    poison = replace(request("a"), prompt_token_ids=[1, 2, 3])
    memory.record_death([poison, request("b")])
    assert not memory.refuses(poison)
    memory.record_death([another(poison)])
    with pytest.raises(PromptQuarantined, match="this prompt; it is refused for 60 s"):
        memory.check(poison, None)
    assert not any(refused(memory, each) for each in (request("a"), request("b")))
    assert not refused(memory, replace(poison, namespace=b"b" * 32))
    assert not refused(memory, replace(poison, grammar=b"spec"))
    memory.record_finished([another(poison)])
    assert not memory.refuses(poison)


def test_many_prompts_push_no_adapter_out(memory: PoisonMemory) -> None:
    for _ in range(2):
        prompts = [replace(request("a"), prompt_token_ids=[n]) for n in range(2 * POLICY.max_tenant_entries)]
        memory.record_death([*prompts, request("a", "d1")])
    assert refused(memory, request("a", "d1"))


def test_a_normal_end_counts_for_what_it_used(memory: PoisonMemory) -> None:
    both = request("a", "d1", b"spec")
    memory.record_death([both])
    memory.record_finished([request("a", "d1"), request("b", grammar=b"spec")])
    memory.record_death([another(both)])
    assert not refused(memory, request("a", "d1"))
    assert refused(memory, request("a", grammar=b"spec"))


def test_deaths_of_one_request_that_is_submitted_once_more_count_once_for_everyone(
    memory: PoisonMemory,
) -> None:
    """`streaming` is not submitted again; it asks again, as another request, while `poison` runs once more."""
    poison, innocent, streaming = request("a", "d1"), request("b", "d2"), request("c", "d3")
    memory.record_death([poison, innocent, streaming])
    memory.record_death([poison, innocent, another(streaming)])
    assert not any(refused(memory, each) for each in (poison, innocent, streaming))
    memory.record_death([another(poison)])
    assert [refused(memory, each) for each in (poison, innocent, streaming)] == [True, False, False]


def test_requests_that_overlap_hide_every_second_death_at_most(memory: PoisonMemory) -> None:
    first, second, third = (request("a", "d1") for _ in range(3))
    memory.record_death([first])
    memory.record_death([first, second])
    assert not refused(memory, first)
    memory.record_death([second, third])
    assert refused(memory, first)


def test_one_normal_end_takes_back_one_death(memory: PoisonMemory) -> None:
    poison = request("a", "d1")
    for _ in range(3):
        memory.record_death([another(poison)])
    memory.record_finished([poison, another(poison)])
    assert refused(memory, poison)
    memory.record_finished([poison])
    assert not refused(memory, poison)
    memory.record_death([another(poison)])
    assert refused(memory, poison)


def test_a_refusal_ends_and_lasts_longer_after_each_further_death(memory: PoisonMemory, clock: Clock) -> None:
    poison = request("a", "d1")
    memory.record_death([another(poison)])
    lasted = []
    for _ in range(4):
        memory.record_death([another(poison)])
        start = clock.now
        while refused(memory, poison):
            clock.now += 1.0
        lasted.append(clock.now - start)
    assert lasted == [60.0, 120.0, 200.0, 200.0]


def test_any_number_of_deaths_has_a_refusal(memory: PoisonMemory, clock: Clock) -> None:
    poison = request("a", "d1")
    for _ in range(1_100):
        memory.record_death([another(poison)])
    assert refused(memory, poison)
    clock.now += POLICY.max_refusal_s
    assert not refused(memory, poison)


def test_a_suspect_is_forgotten_after_its_time(memory: PoisonMemory, clock: Clock) -> None:
    poison = request("a", "d1")
    memory.record_death([another(poison)])
    clock.now += POLICY.suspect_s
    memory.record_death([another(poison)])
    assert not refused(memory, poison)
    memory.record_death([another(poison)])
    assert refused(memory, poison)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (PoisonPolicy(max_tenant_entries=3), lambda tenant, number: number >= 7 or tenant == "small"),
        (PoisonPolicy(max_entries=5), lambda tenant, number: number >= 6 or tenant == "small"),
    ],
)
def test_it_is_bounded_and_the_oldest_of_the_largest_tenant_go(
    clock: Clock, policy: PoisonPolicy, kept: Callable[[str, int], bool]
) -> None:
    memory = PoisonMemory(policy, clock)
    wanted = [("small", 0), *(("large", number) for number in range(10))]
    for tenant, number in wanted:
        for _ in range(2):
            memory.record_death([request(tenant, f"d{number}")])
    for tenant, number in wanted:
        assert refused(memory, request(tenant, f"d{number}")) == kept(tenant, number), (tenant, number)
    assert memory.entries <= 5


def test_nothing_is_left_of_cleared_and_expired_entries(memory: PoisonMemory, clock: Clock) -> None:
    memory.record_death([request("a", "d1", b"spec"), request("b", "d1")])
    assert memory.entries == 3
    memory.record_finished([request("a", "d1", b"spec")])
    assert memory.entries == 1
    clock.now += POLICY.suspect_s
    memory.record_death([])
    assert memory.entries == 0
