"""What a policy is to learn: the prompts of each step, and the reward of a response."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

TokenIds = tuple[int, ...]


@runtime_checkable
class Task(Protocol):
    """A source of prompts and a judge of responses. Everything is in token ids; both methods are pure."""

    def prompts(self, *, step: int, count: int, seed: int) -> tuple[TokenIds, ...]:
        """The `count` prompts of a step. The same for the same step and seed, whatever was asked before."""
        ...

    def reward(self, prompt: TokenIds, response: TokenIds) -> float:
        """How good a response is; finite. A stop token, where one ended it, is the response's last token."""
        ...


@dataclass(frozen=True, slots=True)
class FirstDigitEcho:
    """Say the first digit of the prompt again and again.

    Vocabulary of 16: PAD 0, BOS 1, EOS 2, SEP 3, digit d is 4 + d. A prompt is BOS, `digits` random digits, SEP. The
    reward is the share of `response_length` tokens that are the first digit. The best policy that doesn't read its
    prompt gets about 0.1.

    >>> task = FirstDigitEcho()
    >>> task.reward((1, 9, 4, 5, 6, 3), (9, 9, 4, 9, 2))
    0.375
    """

    digits: int = 4
    response_length: int = 8

    PAD, BOS, EOS, SEP, ZERO = 0, 1, 2, 3, 4
    VOCAB_SIZE = 16

    def __post_init__(self) -> None:
        for name in ("digits", "response_length"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1 (got {getattr(self, name)!r})")

    def prompts(self, *, step: int, count: int, seed: int) -> tuple[TokenIds, ...]:
        digits = np.random.default_rng((seed, step)).integers(self.ZERO, self.ZERO + 10, (count, self.digits))
        return tuple((self.BOS, *row, self.SEP) for row in digits.tolist())

    def reward(self, prompt: TokenIds, response: TokenIds) -> float:
        return response[: self.response_length].count(prompt[1]) / self.response_length


BUILT_IN: Mapping[str, Callable[..., Task]] = {"first_digit_echo": FirstDigitEcho}


def task_from(name: str, options: Mapping[str, Any]) -> Task:
    """A built-in task, or that of "module:Class", made with `options` as keyword arguments.

    Raises:
        ValueError: an unknown name, a module that can't be imported, options that the class refuses, or a class whose
            objects aren't tasks.
    """
    make = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    try:
        task = make(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the task {name!r} can't be made with {dict(options)}: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(f"the task {name!r} needs the methods prompts and reward (got a {type(task).__name__})")
    return task


def _imported(name: str) -> Callable[..., Task]:
    module, separator, attribute = name.partition(":")
    if not (module and separator and attribute):
        raise ValueError(f"unknown task {name!r}; known: {', '.join(BUILT_IN)}, or 'package.module:Class'")
    try:
        found: Callable[..., Task] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the task {name!r} can't be imported: {error}") from error
    return found
