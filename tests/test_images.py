"""NetworkQ on images: a small gridworld seen as pictures, with exact values."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.data.trajectories import Trajectories
from ope_gym.models import NetworkQ
from ope_gym.models.base import Problem
from ope_gym.models.images import Image, is_image
from ope_gym.policies import Uniform

SIDE, STEPS = 4, 4
MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])


def picture(cells: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Draw cells (n,) of a grid of 4 × 4 as images (n, 8, 8, 3): red where one is, green nearby."""
    n = len(cells)
    found = np.zeros((n, SIDE, SIDE, 3), dtype=np.uint8)
    rows, columns = np.divmod(cells, SIDE)
    found[np.arange(n), rows, columns, 0] = 255
    found[np.arange(n), rows, :, 1] = 100
    return found.repeat(2, axis=1).repeat(2, axis=2)


def cells_of(images: Any) -> NDArray[np.int64]:
    red = np.asarray(images)[:, ::2, ::2, 0].reshape(len(images), -1)
    return np.asarray(red.argmax(axis=1))


class TowardsCorner(Uniform):
    """Go right or down with 0.4 each, else left or up."""

    def __init__(self) -> None:
        super().__init__(4)

    def probs(self, observations: Any) -> NDArray[np.float64]:
        return np.tile([0.4, 0.4, 0.1, 0.1], (batches.length(observations), 1))


def next_cells() -> NDArray[np.int64]:
    """Return (16, 4) where each move leads; walls stop it."""
    here = np.stack(np.divmod(np.arange(SIDE**2), SIDE), axis=1)
    there = np.clip(here[:, None] + MOVES, 0, SIDE - 1)
    return np.asarray(there[..., 0] * SIDE + there[..., 1])


# A step pays 1 in the last two columns of even rows: no function of averages of whole rows.
PAYS = (np.arange(SIDE**2) % SIDE >= 2) * (np.arange(SIDE**2) // SIDE % 2 == 0).astype(np.float64)


def exact() -> NDArray[np.float64]:
    """Return q (steps, 16, 4) of the target by dynamic programming."""
    found, v = np.empty((STEPS, SIDE**2, 4)), np.zeros(SIDE**2)
    for t in reversed(range(STEPS)):
        found[t] = PAYS[next_cells()] + v[next_cells()]
        v = found[t] @ [0.4, 0.4, 0.1, 0.1]
    return found


def played(episodes: int) -> Trajectories:
    """Play uniformly from uniform starts."""
    rng = np.random.default_rng(0)
    cell, seen, taken, paid = rng.integers(0, SIDE**2, episodes), [], [], []
    for _ in range(STEPS):
        action = rng.integers(0, 4, episodes)
        seen.append(picture(cell))
        cell = next_cells()[cell, action]
        taken.append(action)
        paid.append(PAYS[cell])
    return Trajectories.from_arrays(
        np.stack(seen, axis=1).reshape(-1, 2 * SIDE, 2 * SIDE, 3),
        np.stack(taken, axis=1).reshape(-1),
        np.stack(paid, axis=1).reshape(-1),
        np.full(episodes * STEPS, np.log(0.25)),
        offsets=np.arange(episodes + 1) * STEPS,
        policies=[Uniform(4)],
        terminated=True,
    )


def test_a_network_reads_images() -> None:
    data = played(300)
    model = NetworkQ((32,), epochs=8, batch=64, learning_rate=1e-2, tau=0.1)
    task = Problem(TowardsCorner(), 1.0, STEPS, np.random.default_rng(1))
    values = model.fit(data, task)
    truth = exact()[data.steps, cells_of(data.observations)]
    found = values.q_all(data.observations, data.steps)
    error = np.sqrt(np.mean((found - truth) ** 2))
    assert error < 0.3 * truth.std()
    # the time that is left alone does not get there
    blind = (
        truth - np.array([truth[data.steps == t].mean() for t in range(STEPS)])[data.steps, None]
    )
    assert error < 0.5 * blind.std()


def test_channels_may_come_first_or_last() -> None:
    """Both give the same numbers to the last bit, and a dict of both parts is read, too."""
    last = played(12)
    seen = np.asarray(last.observations)
    first = dataclasses.replace(last, observations=np.moveaxis(seen, 3, 1).copy())
    both = dataclasses.replace(last, observations={"a": seen, "b": seen[:, 0, 0, 0].astype(float)})
    task = Problem(TowardsCorner(), 1.0, STEPS, np.random.default_rng(1))
    model = NetworkQ((8,), epochs=1)
    found = []
    for data in (last, first, both):
        fresh = dataclasses.replace(task, rng=np.random.default_rng(1))
        found.append(model.fit(data, fresh).q_all(data.observations, data.steps))
    np.testing.assert_array_equal(found[0], found[1])
    assert found[2].shape == found[0].shape


def test_images_are_averaged_in_blocks() -> None:
    rng = np.random.default_rng(2)
    large = rng.integers(0, 256, (2, 100, 50, 3), dtype=np.uint8)
    image = Image.of(large)
    assert image.sizes == (3, 100, 50)
    assert image.pooled == (3, 34, 17)
    pixels = image.pixels(large).reshape(2, 3, 34, 17)
    assert pixels.dtype == np.uint8
    assert pixels[1, 2, 33, 16] == round(large[1, 99:, 48:, 2].mean())
    assert pixels[0, 1, 4, 5] == round(large[0, 12:15, 15:18, 1].mean())
    cells = image.cells(large)
    assert cells.shape[1] <= 64
    grey = large[..., 0]
    np.testing.assert_allclose(Image.of(grey).cells(grey)[1, 0], grey[1, :10, :10].mean() / 255)
    assert is_image(grey)
    assert not is_image(grey.astype(np.float64))
    real = Image.of(large / 255.0)
    np.testing.assert_allclose(real.cells(large / 255.0), cells)
    with pytest.raises(ValueError, match=r"shape \(3, 3, 3\), those learned \(100, 50, 3\)"):
        image.pixels(np.zeros((1, 3, 3, 3), dtype=np.uint8))
