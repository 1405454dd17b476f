"""Tasks by name, the built-in one, and seeds."""

from __future__ import annotations

from collections import Counter

import pytest

from refit_transport.rl.seeds import sample_seed
from refit_transport.rl.tasks import FirstDigitEcho, Task, task_from


class AlwaysOne:
    """A task of a user."""

    def __init__(self, *, reward: float = 1.0) -> None:
        self._reward = reward

    def prompts(self, *, step: int, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
        return ((1,),) * count

    def reward(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> float:
        return self._reward


class TestFirstDigitEcho:
    def test_prompts(self) -> None:
        task = FirstDigitEcho()
        prompts = task.prompts(step=3, count=2000, seed=7)
        assert {(prompt[0], prompt[-1], len(prompt)) for prompt in prompts} == {(1, 3, 6)}
        firsts = Counter(prompt[1] for prompt in prompts)
        assert sorted(firsts) == list(range(4, 14))
        assert all(140 < count < 260 for count in firsts.values())

    def test_a_step_is_the_same_whatever_was_asked_before(self) -> None:
        task = FirstDigitEcho()
        task.prompts(step=0, count=5, seed=7)
        assert task.prompts(step=3, count=9, seed=7)[:4] == FirstDigitEcho().prompts(step=3, count=4, seed=7)
        assert task.prompts(step=4, count=4, seed=7) != task.prompts(step=3, count=4, seed=7)
        assert task.prompts(step=3, count=4, seed=8) != task.prompts(step=3, count=4, seed=7)

    @pytest.mark.parametrize(
        ("response", "reward"),
        [((9,) * 8, 1.0), ((9,) * 7 + (2,), 7 / 8), ((2,), 0.0), ((8, 9, 8, 9), 0.25), ((9,) * 20, 1.0)],
    )
    def test_reward(self, response: tuple[int, ...], reward: float) -> None:
        assert FirstDigitEcho().reward((1, 9, 8, 7, 6, 3), response) == reward


class TestByName:
    def test_built_in(self) -> None:
        assert task_from("first_digit_echo", {"digits": 2}) == FirstDigitEcho(digits=2)

    def test_a_users(self) -> None:
        task = task_from(f"{AlwaysOne.__module__}:AlwaysOne", {"reward": 0.5})
        assert isinstance(task, Task)
        assert task.reward((1,), (2,)) == 0.5

    @pytest.mark.parametrize(
        ("name", "options", "what"),
        [
            ("nothing", {}, "unknown task 'nothing'; known: first_digit_echo, or"),
            ("no.such.module:Class", {}, "can't be imported: No module named 'no'"),
            ("json:Nothing", {}, "can't be imported"),
            ("json:JSONDecoder", {}, "needs the methods prompts and reward"),
            ("first_digit_echo", {"zebra": 1}, "can't be made with {'zebra': 1}"),
            ("first_digit_echo", {"digits": 0}, "digits must be a whole number of at least 1"),
        ],
    )
    def test_a_name_that_is_no_task(self, name: str, options: dict[str, int], what: str) -> None:
        with pytest.raises(ValueError, match=what):
            task_from(name, options)


def test_seeds_are_of_their_place_alone() -> None:
    places = [(step, prompt, sample) for step in range(8) for prompt in range(8) for sample in range(8)]
    seeds = [sample_seed(1, step=step, prompt=prompt, sample=sample) for step, prompt, sample in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, step=2, prompt=3, sample=4) == seeds[places.index((2, 3, 4))]
    assert sample_seed(2, step=2, prompt=3, sample=4) not in seeds
