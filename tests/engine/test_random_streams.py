"""Random numbers of a client: the same alone and among others, by every operation, and when a part
is computed again."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stratafl.engine.random_streams import (
    BLOCK,
    ClientStream,
    RandomOverride,
    RandomSource,
    client_rng,
    multinomial,
    round_down,
)
from tests.engine.pairs import CLOSE, compare
from tests.flat import client_options

CPU = torch.device("cpu")
CLIENTS = torch.tensor([4, 0, 9])
KINDS = ("words", "uniform", "normal", "exponential", "order")


@pytest.mark.parametrize("count", [1, 5, BLOCK // 2 + 1, 2 * BLOCK + 7])
def test_a_client_draws_the_same_alone_and_among_others(count: int) -> None:
    together, alone = RandomSource(ClientStream(3, CLIENTS, 8)), RandomSource(ClientStream(3, 9, 8))
    for kind in KINDS[: 5 if count < BLOCK else 2]:
        both = getattr(together, kind)((3, count), CPU)[2], getattr(alone, kind)((count,), CPU)
        assert torch.equal(*both), kind
    assert torch.equal(together.chance(0.3, (3, count), CPU)[2], alone.chance(0.3, (count,), CPU))


def test_steps_may_be_tensors_and_differ_between_clients() -> None:
    own = RandomSource(ClientStream(3, CLIENTS, torch.tensor([1, 2, 8]))).words((3, 4), CPU)
    for place, step in enumerate((1, 2, 8)):
        same = RandomSource(ClientStream(3, CLIENTS, torch.tensor(step))).words((3, 4), CPU)
        assert torch.equal(own[place], same[place])
        assert torch.equal(own[place], RandomSource(ClientStream(3, int(CLIENTS[place]), step)).words((4,), CPU))


def test_seed_client_step_and_draw_change_the_numbers() -> None:
    keys = [ClientStream(3, 4, 8), ClientStream(2, 4, 8), ClientStream(3, 5, 8), ClientStream(3, 4, 9)]
    drawn = [RandomSource(key).words((64,), CPU) for key in keys]
    source = RandomSource(keys[0])
    drawn += [source.words((64,), CPU), source.words((64,), CPU)]
    assert len({tuple(words.tolist()) for words in drawn}) == len(keys) + 1, "the first draw again is the same"


def test_distributions_of_random_numbers() -> None:
    source = RandomSource(ClientStream(1, 2, 3))
    uniform, normal = (getattr(source, kind)((40_000,), CPU) for kind in ("uniform", "normal"))
    waiting = source.exponential((40_000,), CPU)
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() - 1 / 12) < 0.003 and uniform.min() >= 0
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    assert abs(waiting.mean() - 1) < 0.02 and waiting.min() > 0
    for share in (0.0, 0.2, 0.9, 1.0):
        assert abs(source.chance(share, (40_000,), CPU).double().mean() - share) < 0.01
    assert source.order((50,), CPU).sort().values.tolist() == list(range(50))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_number_is_rounded_up_to_one(dtype: torch.dtype) -> None:
    assert round_down(torch.tensor([1 - 2.0**-53], dtype=torch.float64), dtype).item() < 1


def test_multinomial_follows_the_weights() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0], [1.0, 1.0, 0.0]]).expand(4000, 2, 3)
    source = RandomSource(ClientStream(1, 2, 3))
    drawn = multinomial(source, weights, 4, replacement=True)
    assert drawn.shape == (4000, 2, 4) and abs((drawn[:, 0] == 2).double().mean() - 0.75) < 0.02
    assert not (drawn[:, 0] == 0).any() and not (drawn[:, 1] == 2).any()
    without = multinomial(source, weights, 2, replacement=False)
    assert (without.sort(dim=-1).values == torch.tensor([[1, 2], [0, 1]])).all()


def of_client(function: Callable[[Tensor], Tensor], x: Tensor, stream: ClientStream) -> Tensor:
    with torch.random.fork_rng(), client_rng(stream, CPU):
        return function(x.clone())


FORMS = {
    "function": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: F.dropout(x, 0.5, inplace=True),
    "module": nn.Dropout(0.5),
    "torch": lambda x: torch.dropout(x, 0.5, train=True),
    "by hand": lambda x: x * torch.empty_like(x).bernoulli_(0.5) / 0.5,
    "a probability each": lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
}


def test_every_form_of_dropout_draws_the_same() -> None:
    x = torch.ones(6, 5)
    masks = [of_client(form, x, ClientStream(3, 4, 5)) for form in FORMS.values()]
    assert all(torch.equal(mask, masks[0]) for mask in masks) and 0 < int((masks[0] > 0).sum()) < 30


def test_a_samples_mask_does_not_depend_on_later_samples() -> None:
    longer, shorter = (of_client(FORMS["function"], torch.ones(length, 7), ClientStream(3, 4, 5)) for length in (6, 4))
    assert torch.equal(longer[:4], shorter)


def test_the_same_operations_draw_for_many_clients() -> None:
    def drawn(x: Tensor) -> list[Tensor]:
        kinds = [torch.rand_like(x), torch.randn_like(x), x.new_empty(x.shape).exponential_(2.0)]
        kinds += [F.rrelu(x - 0.5, training=True), x.new_empty(x.shape).uniform_(-1, 1), torch.normal(x, 2 * x)]
        return [*kinds, x.new_empty(x.shape).normal_(1, 2), torch.randint_like(x, 5), torch.bernoulli(x)]

    x = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0))
    with RandomOverride(RandomSource(ClientStream(3, CLIENTS, 5))):
        together = drawn(x)
    for place, client in enumerate(CLIENTS.tolist()):
        with RandomOverride(RandomSource(ClientStream(3, client, 5))):
            alone = drawn(x[place])
        assert all(torch.equal(a[place], b) for a, b in zip(together, alone, strict=True))


HALF = torch.full((6,), 0.5)
INTO: dict[str, Callable[..., Tensor]] = {
    "rand": lambda **out: torch.rand(6, **out),
    "randn": lambda **out: torch.randn(6, **out),
    "bernoulli": lambda **out: torch.bernoulli(HALF, **out),
    "normal": lambda **out: torch.normal(HALF, HALF, **out),
    "normal of numbers": lambda **out: torch.normal(0.0, 1.0, (6,), **out),
    "randint": lambda **out: torch.randint(9, (6,), **out),
    "randint from": lambda **out: torch.randint(3, 9, (6,), **out),
    "randperm": lambda **out: torch.randperm(6, **out),
    "multinomial": lambda **out: torch.multinomial(HALF, 6, **out),
}


@pytest.mark.parametrize("name", INTO)
def test_out_gets_what_would_be_returned(name: str) -> None:
    stream = ClientStream(0, 1, 2)
    with client_rng(stream, torch.device("cpu")):
        expected = INTO[name]()
    room = torch.full((6,), -7).to(expected.dtype)
    with client_rng(stream, torch.device("cpu")):
        assert INTO[name](out=room) is room
    assert torch.equal(room, expected) and torch.equal(HALF, torch.full((6,), 0.5))


def test_out_of_another_type_or_size() -> None:
    room = torch.empty(2, dtype=torch.float16)
    with client_rng(ClientStream(0, 1, 2), torch.device("cpu")), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tensor that is made larger need not have been empty
        torch.rand(100_000, out=room)
    assert len(room) == 100_000 and room.min() >= 0 and room.max() < 1


def test_an_explicit_generator_is_respected() -> None:
    drawn = []
    for client in (1, 2):
        with torch.random.fork_rng(), client_rng(ClientStream(3, client, 5), CPU):
            drawn.append(torch.rand(4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_parts_draw_the_same_numbers(reentrant: bool) -> None:
    def inner(x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x) * torch.rand_like(x), 0.5)

    slopes = []
    for again in (False, True):
        x = torch.ones(5, 4, requires_grad=True)
        with torch.random.fork_rng(), client_rng(ClientStream(3, 4, 5), CPU):
            h = F.dropout(x, 0.3)
            y = checkpoint(inner, h, use_reentrant=reentrant) if again else inner(h)
            (F.dropout(y, 0.3) ** 2).sum().backward()
        slopes.append(x.grad)
    assert torch.equal(*slopes)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3), nn.Dropout(0.2)).double()


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("epochs", [None, 1])
def test_dropout_agrees_at_clients_own_steps(chunk: int | None, epochs: int | None) -> None:
    """Clients that count epochs of their own data are at different steps."""
    more = {} if epochs is None else {"leaf": client_options(0.05, epochs=epochs), "periods": [2]}
    assert compare(chunk=chunk, model=dropping, **more) < CLOSE
