"""Seeds that depend on what they are for and on nothing else, so that a resumed run draws the same numbers."""

from __future__ import annotations

import numpy as np


def sample_seed(run_seed: int, *, step: int, prompt: int, sample: int) -> int:
    """The seed of one response, whatever engine or batch it is sampled in: at least 0 and below 2^63.

    `prompt` is the index of the prompt in its step, `sample` that of the response among those to the prompt.
    """
    state = np.random.SeedSequence((run_seed, step, prompt, sample)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
