"""Read images: which leaves are images, smaller copies of them, and a small convolutional net.

An image is a leaf of three dimensions a step, or of two if its numbers are bytes. As in
Stable-Baselines3 the smallest of three dimensions holds the channels if it is the first; else the
last does. Bytes are scaled to [0, 1], other numbers are taken as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ope_gym import batches
from ope_gym.arrays import FloatArray
from ope_gym.batches import Tree

_SIDE = 48  # pixels of a side; of larger images blocks are averaged
_CELLS = 64  # averages of an image for a linear model
_SMALLEST = 6  # side at which no further convolution follows
_ROWS = 1 << 12  # images averaged at once
_BYTE = 255.0


def is_image(leaf: NDArray[Any]) -> bool:
    """Tell whether a leaf (n, ...) holds an image a step."""
    return leaf.ndim == 4 or (leaf.ndim == 3 and leaf.dtype == np.uint8)


def split(batch: Tree) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return the leaves of a batch that are images, and the others."""
    leaves = batches.leaves(batch)
    return [x for x in leaves if is_image(x)], [x for x in leaves if not is_image(x)]


@dataclass(frozen=True)
class Image:
    """Turn an image leaf into rows of pixels.

    Args:
        shape: Shape of one image as it was recorded.
        whole: whether pixels are bytes.
    """

    shape: tuple[int, ...]
    whole: bool

    @classmethod
    def of(cls, leaf: NDArray[Any]) -> Image:
        """Describe a leaf (n, ...)."""
        return cls(leaf.shape[1:], leaf.dtype == np.uint8)

    @property
    def first(self) -> bool:
        """Whether channels come first: they are fewer than rows and columns."""
        return len(self.shape) == 2 or int(np.argmin(self.shape)) == 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Channels, rows and columns as recorded."""
        if len(self.shape) == 2:
            return 1, self.shape[0], self.shape[1]
        a, b, c = self.shape
        return (a, b, c) if self.first else (c, a, b)

    @property
    def pooled(self) -> tuple[int, int, int]:
        """Channels, rows and columns of what the net sees."""
        channels, rows, columns = self.sizes
        block = self._block(_SIDE)
        return channels, -(-rows // block), -(-columns // block)

    def pixels(self, leaf: NDArray[Any]) -> NDArray[Any]:
        """Return rows (n, channels · rows · columns), bytes for bytes and else float32."""
        if leaf.shape[1:] != self.shape:
            raise ValueError(f"images have shape {leaf.shape[1:]}, those learned {self.shape}")
        return self._averaged(leaf, self._block(_SIDE), np.uint8 if self.whole else np.float32)

    def cells(self, leaf: NDArray[Any]) -> FloatArray:
        """Return at most `_CELLS` averages (n, d) of each image, or one a channel if these are."""
        channels, rows, columns = self.sizes
        block = 1
        while channels * -(-rows // block) * -(-columns // block) > max(_CELLS, channels):
            block += 1
        return self._averaged(leaf, block, np.float64) / (_BYTE if self.whole else 1.0)

    def _block(self, side: int) -> int:
        """Return the side of the blocks that leave at most `side` of them."""
        return max(1, -(-max(self.sizes[1:]) // side))

    def _averaged(self, leaf: NDArray[Any], block: int, dtype: Any) -> NDArray[Any]:
        channels, rows, columns = self.sizes
        down, right = np.arange(0, rows, block), np.arange(0, columns, block)
        area = np.outer(np.diff(down, append=rows), np.diff(right, append=columns))
        averages = np.empty((len(leaf), channels, down.size, right.size), dtype=dtype)
        for begin in range(0, len(leaf), _ROWS):
            some = leaf[begin : begin + _ROWS]
            some = some.reshape(-1, *self.sizes) if self.first else np.moveaxis(some, 3, 1)
            if block > 1:
                sums = np.add.reduceat(some, down, axis=2, dtype=np.float64)
                some = np.add.reduceat(sums, right, axis=3) / area
                some = np.rint(some) if dtype == np.uint8 else some
            averages[begin : begin + _ROWS] = some
        return averages.reshape(len(leaf), -1)


def convolutions(image: Image) -> tuple[Any, int]:
    """Return a net from rows of pixels to features, and how many there are.

    Convolutions of 3 × 3 with stride 2, 16 channels and then 32, until a side is at most 6.
    """
    from torch import nn

    channels, rows, columns = image.pooled
    layers: list[nn.Module] = [nn.Unflatten(1, image.pooled)]
    width = 16
    while len(layers) == 1 or max(rows, columns) > _SMALLEST:
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU()]
        rows, columns, channels, width = -(-rows // 2), -(-columns // 2), width, 32
    return nn.Sequential(*layers, nn.Flatten()), channels * rows * columns


def scaled(pixels: Any, image: Image) -> Any:
    """Return pixels of a torch tensor as float32, bytes within [0, 1]."""
    return pixels.float() / _BYTE if image.whole else pixels
