"""Random numbers: each device draws from generators of its own."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn import functional

pytestmark = [pytest.mark.simulation, pytest.mark.usefixtures("two_devices")]

DRAWS = {
    "rand": lambda device: torch.rand(4, device=device),
    "randn": lambda device: torch.randn(4, device=device),
    "randint": lambda device: torch.randint(100, (4,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "rand_like": lambda device: torch.rand_like(torch.ones(4, device=device)),
    "normal_": lambda device: torch.empty(4, device=device).normal_(),
    "bernoulli": lambda device: torch.bernoulli(torch.full((9,), 0.5, device=device)),
    "multinomial": lambda device: torch.multinomial(torch.ones(9, device=device), 4),
    "dropout": lambda device: functional.dropout(torch.ones(20, device=device)),
    "poisson": lambda device: torch.poisson(torch.full((9,), 5.0, device=device)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_seed_of_the_device(name: str) -> None:
    draw = DRAWS[name]
    torch.cuda.manual_seed(7)
    host = torch.get_rng_state()
    first, second = draw("cuda"), draw("cuda")
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(7)
    assert torch.equal(draw("cuda"), first)


def test_seeds_of_all_devices() -> None:
    torch.manual_seed(3)
    assert torch.cuda.initial_seed() == 3
    first = torch.rand(2, device="cuda:1")
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(2, device="cuda:1"), first)


def test_states() -> None:
    states = torch.cuda.get_rng_state_all()
    first = torch.rand(2, device="cuda:1")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.rand(2, device="cuda:1"), first)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(2, device="cuda")
    assert torch.equal(torch.cuda.get_rng_state(0), states[0])


def test_generators() -> None:
    generator = torch.Generator(device="cuda:1").manual_seed(5)
    assert generator.device == torch.device("cuda", 1)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    first = torch.randn(3, device="cuda:1", generator=generator)
    generator.manual_seed(5)
    copied = pickle.loads(pickle.dumps(generator))
    assert torch.equal(torch.randn(3, device="cuda:1", generator=generator), first)
    assert torch.equal(torch.randn(3, device="cuda:1", generator=copied), first)
    assert torch.Generator().device.type == "cpu"


def test_generators_of_the_wrong_device() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.rand(2, generator=torch.Generator(device="cuda"))
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type"):
        torch.ones(3).normal_(generator=torch.Generator(device="cuda"))
