"""Load damaged and forged files, and check that nothing worse than an error comes of it.

    python benchmarks/fuzz.py [--mutations 100000] [--seed 0] [--workers 2]

Files of several kinds are damaged (bytes changed, cut, doubled, blocks moved, doubled, left out or
taken from another file) and forged (contents changed, checksums made right again), and loaded.

- Damage gives a `DamagedFileError`, or the data of the first whole blocks of some original, to the
  last bit: never other numbers.
- A forgery, which no checksum can tell, gives a `DamagedFileError` or columns that fit together.
- Read in chunks, cut from blocks or of whole blocks, a file gives the same episodes, to the last
  bit, where `Trajectories.load` gives some, and an error where it gives an error.
- No load imports, compiles or runs anything, writes or starts anything (seen by an audit hook),
  takes long, or needs much memory (limits of the process; only on POSIX).
- What was loaded is printed and evaluated, which gives a result or an error that names what is
  wrong, within the same time and memory.
- The processes that load do not crash.

The exit code is 1 if there was anything else, and a case is printed for each kind of finding.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from gymnasium import spaces as S
from numpy.typing import ArrayLike

import ope_gym
from ope_gym import batches
from ope_gym.batches import Tree
from ope_gym.data import block_writer, reader
from ope_gym.data import blocks as format_
from ope_gym.data.block_writer import BlockWriter
from ope_gym.data.blocks import MAGIC, DamagedFileError
from ope_gym.data.buffer import TrajectoryBuffer
from ope_gym.data.files import (
    raw_column,
    write_ahead,
    write_change,
    write_episodes,
    write_policy,
    write_spaces,
)
from ope_gym.data.reader import read_layout
from ope_gym.data.schema import BY_EPISODE, BY_STEP, Columns, join
from ope_gym.data.spaces import Space, to_columns
from ope_gym.data.trajectories import Trajectories, nothing, read_chunks
from ope_gym.policies import (
    DiagonalGaussian,
    EpsilonGreedyMlp,
    EpsilonGreedyTable,
    GaussianMlp,
    LinearSigmoid,
    Policy,
    SoftmaxLinear,
    SoftmaxMlp,
    Uniform,
    UnknownPolicy,
    policy_to_arrays,
)
from ope_gym.policies.mlp import Network

PORTION = 2500  # mutations, made from a seed of their own
SECONDS = 10  # of CPU time that a load may take
ROOM = 2**30  # bytes of memory that a process may ask for
# and a load: what docs/file_format.md promises
LOAD, TIMES = 64 * 2**20, 4
Blocks = list[bytes]

# The originals -------------------------------------------------------------------------------


def originals(folder: Path) -> dict[str, bytes]:
    """Return files as recorders and `save` write them, by name."""
    folder.mkdir(exist_ok=True)
    makers: dict[str, Callable[[Path], None]] = {
        "discrete": _discrete,
        "another": lambda path: _discrete(path, seed=1),
        "dict": _dict,
        "objects": _objects,
        "torch": _torch,
        "schedules": _schedules,
        "plain": _plain,
        "ahead": _ahead,
        **{kind: partial(_policy, kind=kind) for kind in KINDS},
    }
    found = {}
    for name, maker in makers.items():
        maker(folder / name)
        found[name] = (folder / name).read_bytes()
    return found


def write_episode(
    writer: BlockWriter,
    observations: Tree,
    actions: Tree,
    rewards: ArrayLike,
    log_probs: ArrayLike,
    policy_ids: ArrayLike,
    *,
    terminated: bool,
    truncated: bool = False,
    held_out: bool = False,
    start_clock: int | None = None,
    observation_space: Space | None = None,
    action_space: Space | None = None,
) -> None:
    """Write one finished episode, with the arguments that `TrajectoryBuffer.append` accepted.

    The spaces are those of the section. An episode with a `start_clock` follows schedule 0.
    """
    received = np.asarray(rewards, dtype=np.float64)
    n = len(received)
    seen, chosen = (
        to_columns(space, batch, n, name=name, where=str, copy=False)
        for space, batch, name in (
            (observation_space, observations, "observations"),
            (action_space, actions, "actions"),
        )
    )
    episode = Columns(
        seen,
        chosen,
        received,
        np.asarray(log_probs, dtype=np.float64),
        np.broadcast_to(np.asarray(policy_ids, dtype=np.int32), (n,)),
        np.array([0, n]),
        np.array([terminated]),
        np.array([truncated]),
        np.array([held_out]),
        np.array([-1 if start_clock is None else start_clock]),
        np.array([-1 if start_clock is None else 0], dtype=np.int32),
        observation_space=observation_space,
        action_space=action_space,
    )
    write_episodes(writer, episode)


def _discrete(path: Path, seed: int = 0) -> None:
    """Write a recorder's file: many blocks of equal size, which could pass for each other."""
    rng, spaces = np.random.default_rng(seed), (S.Discrete(5), S.Discrete(2))
    with BlockWriter(path) as writer:
        write_spaces(writer, *spaces, 8)
        write_policy(writer, Uniform(2))
        for _ in range(5):
            seen, rewards = rng.integers(5, size=8), rng.normal(size=8)
            write_episode(
                writer,
                seen,
                seen % 2,
                rewards,
                np.full(8, np.log(0.5)),
                0,
                terminated=True,
                observation_space=spaces[0],
                action_space=spaces[1],
            )


def _dict(path: Path) -> None:
    rng = np.random.default_rng(2)
    space = S.Dict(x=S.Box(-1, 1, (2,)), y=S.Tuple([S.Discrete(3), S.MultiBinary(2)]))
    buffer = TrajectoryBuffer(space, S.Box(-np.inf, np.inf, (1,), np.float64))
    k = buffer.add_policy(Uniform(2))
    for n in (2, 3):
        seen = {
            "x": rng.normal(size=(n, 2)).astype(np.float32),
            "y": (rng.integers(3, size=n), rng.integers(2, size=(n, 2)).astype(np.int8)),
        }
        buffer.append(
            seen,
            rng.normal(size=(n, 1)),
            rng.normal(size=n),
            rng.normal(size=n),
            k,
            terminated=True,
            held_out=n == 2,
        )
    buffer.save(path)


def _objects(path: Path) -> None:
    space = S.Dict(
        text=S.Text(5), some=S.Sequence(S.Discrete(4)), one=S.OneOf([S.Discrete(2), S.Text(3)])
    )
    buffer = TrajectoryBuffer(space, S.Discrete(2))
    k = buffer.add_policy(Uniform(2))
    space.seed(3)
    for n in (1, 3):
        rows = [space.sample() for _ in range(n)]
        seen = {key: [row[key] for row in rows] for key in space.spaces}
        buffer.append(seen, [0] * n, [1.0] * n, [-0.7] * n, k, terminated=True)
    buffer.save(path)


def _torch(path: Path) -> None:
    """Write what a `TorchPolicy` leaves in a file, without torch."""
    from ope_gym.policies import UnavailablePolicy

    rng = np.random.default_rng(4)
    state = {"0.weight": rng.normal(size=(3, 2)), "0.bias": np.zeros(3), "steps": np.array(7)}
    buffer = TrajectoryBuffer(S.Box(-1, 1, (2,)), S.Discrete(3))
    k = buffer.add_policy(UnavailablePolicy("torch", state))
    seen = rng.normal(size=(4, 2)).astype(np.float32)
    buffer.append(seen, [0, 1, 2, 0], np.ones(4), np.full(4, -1.1), k, terminated=True)
    buffer.save(path)


def _schedules(path: Path) -> None:
    """Write two runs into one file, with policies that change inside episodes."""
    spaces = S.Box(-1, 1, (2,)), S.Discrete(2)
    for run in range(2):
        with BlockWriter(path) as writer:
            write_spaces(writer, *spaces, None)
            policies: list[Policy] = [LinearSigmoid(np.array([0.5, run])), Uniform(2)]
            for k, policy in enumerate(policies):
                write_policy(writer, policy)
                write_change(writer, k, 3 * k, mid_episode=k > 0)
            for start, ids in ((0, [0, 0, 0, 1]), (4, [1, 1])):
                n = len(ids)
                write_episode(
                    writer,
                    np.full((n, 2), 0.1 * run),
                    [0] * n,
                    np.arange(n) + 10.0 * run,
                    [-0.5] * n,
                    ids,
                    terminated=True,
                    start_clock=start,
                    observation_space=spaces[0],
                    action_space=spaces[1],
                )


def _network(outputs: int, n_states: int = 0) -> Network:
    rng = np.random.default_rng(6)
    sizes = (n_states or 2, 3, outputs)
    layers = [
        (rng.normal(size=(after, before)), rng.normal(size=after))
        for before, after in pairwise(sizes)
    ]
    return Network(tuple(layers), n_states=n_states)  # type: ignore[arg-type]


KINDS: dict[str, Callable[[], Policy]] = {
    "linear-sigmoid": lambda: LinearSigmoid(np.array([0.5, -0.2])),
    "softmax-linear": lambda: SoftmaxLinear(np.array([[0.1, 0.2], [0.3, -0.4], [0.0, 0.1]])),
    "epsilon-greedy-table": lambda: EpsilonGreedyTable(np.array([0, 2, 1, 1, 0]), 0.3, 3),
    "uniform": lambda: Uniform(3),
    "diagonal-gaussian": lambda: DiagonalGaussian(np.ones((1, 2)), np.zeros(1), np.zeros(1)),
    "softmax-mlp": lambda: SoftmaxMlp(_network(3)),
    "epsilon-greedy-mlp": lambda: EpsilonGreedyMlp(_network(3, n_states=5), 0.2),
    "gaussian-mlp": lambda: GaussianMlp(_network(1), np.zeros(1, np.float32)),
    "unknown": UnknownPolicy,
}


def _policy(path: Path, kind: str) -> None:
    """Write episodes of a policy of one kind."""
    rng, policy = np.random.default_rng(7), KINDS[kind]()
    states = kind in ("epsilon-greedy-table", "epsilon-greedy-mlp")
    actions: Space = S.Box(-9, 9, (1,), np.float64) if "gaussian" in kind else S.Discrete(3)
    if kind == "linear-sigmoid":
        actions = S.Discrete(2)
    buffer = TrajectoryBuffer(S.Discrete(5) if states else S.Box(-9, 9, (2,)), actions)
    k = buffer.add_policy(policy)
    for n in (3, 2, 4):
        seen = rng.integers(5, size=n) if states else rng.normal(size=(n, 2)).astype(np.float32)
        if kind == "unknown":
            chosen, log_probs = rng.integers(3, size=n), np.full(n, -1.1)
        else:
            chosen = policy.sample(seen, rng)
            log_probs = policy.log_prob(seen, chosen)
        buffer.append(seen, chosen, rng.normal(size=n), log_probs, k, terminated=True)
    buffer.save(path)


def _plain(path: Path) -> None:
    """Write episodes without spaces, by several policies, in one block."""
    rng = np.random.default_rng(5)
    Trajectories.from_arrays(
        {"a": rng.normal(size=(12, 2)), "b": rng.integers(9, size=12)},
        rng.integers(2, size=12),
        rng.normal(size=12),
        np.full(12, -0.7),
        offsets=[0, 3, 4, 9, 12],
        terminated=True,
        policies=[LinearSigmoid(np.zeros(2)), Uniform(2)],
        policy_ids=np.repeat([0, 1], [4, 8]),
        held_out=[True, False, True, False],
    ).save(path)


def _ahead(path: Path) -> None:
    """Write a recorder's file whose last episodes are not in a block yet."""
    rng, spaces = np.random.default_rng(8), (S.Box(-9, 9, (2,)), S.Discrete(2))
    with BlockWriter(path) as writer:
        write_spaces(writer, *spaces, 9)
        write_policy(writer, LinearSigmoid(np.array([0.5, -0.2])))
        write_change(writer, 0, 0, mid_episode=False)
        for clock, lengths in ((0, [3]), (3, [2, 1]), (6, [2])):
            n = sum(lengths)
            rows = {
                "observations": rng.normal(size=(n, 2)).astype(np.float32),
                "actions": rng.integers(2, size=n),
                "rewards": rng.normal(size=n),
            }
            if clock == 6:
                rows["log_probs"] = np.full(n, -0.7)
            columns = [raw_column(name, array) for name, array in rows.items()]
            table = np.array([[x, 1, 0, 0, clock, 0] for x in lengths])
            known = [column for column in columns if column is not None]
            assert write_ahead(writer, 0, known, n, table.tobytes())


def blocks_of(data: bytes) -> Blocks:
    """Cut a good file into its blocks, each as bytes; `assembled` puts them together again."""
    found, position = [], len(MAGIC)
    while position < len(data):
        if not any(data[position : position + 24]):
            position = format_.tail_start(position)
        _, text, payload, *_ = struct.unpack_from("<IIQII", data, position)
        end = position + 24 + text + payload
        found.append(data[position:end])
        position = end
    return found


def assembled(blocks: Blocks) -> bytes:
    """Make a file of blocks, with a gap in front of those that were written ahead."""
    data, gap = MAGIC, False
    for block in blocks:
        if not gap and b'"kind":"ahead"' in block:
            data, gap = data.ljust(format_.tail_start(len(data)), b"\0"), True
        data += block
    return data


def digest(found: Trajectories) -> str:
    """Return a digest of everything that was loaded, to the last bit."""
    hashed = hashlib.blake2b()

    def add(value: Any) -> None:
        for leaf in batches.leaves(value):
            content = repr(leaf.tolist()).encode() if leaf.dtype == object else leaf.tobytes()
            hashed.update(f"{leaf.dtype}{leaf.shape}".encode() + content)

    for name in (*BY_STEP, *BY_EPISODE, "offsets"):
        add(getattr(found, name))
    for policy in found.policies:
        kind, arrays = policy_to_arrays(policy)
        hashed.update(kind.encode())
        add(arrays)
    for schedule in found.schedules:
        add((schedule.clocks, schedule.policies))
    said = (found.observation_space, found.action_space, found.horizon)
    hashed.update(repr(said).encode())
    return hashed.hexdigest()


# Damage --------------------------------------------------------------------------------------


def damage(rng: np.random.Generator, data: bytes, other: bytes) -> tuple[str, bytes]:
    """Damage a file without regard for its checksums; return the kind of damage and the result."""
    name = str(rng.choice(list(_DAMAGES)))
    return name, _DAMAGES[name](rng, data, other)


def _change_bytes(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for position in rng.integers(len(data), size=rng.integers(1, 9)):
        changed[position] ^= int(rng.integers(1, 256))
    return bytes(changed)


def _cut(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return data[: rng.integers(len(data))]


def _stretch(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Leave out, double or zero a stretch of bytes, or put another file's in its place."""
    first, last = sorted(rng.integers(len(data) + 1, size=2).tolist())
    begin = int(rng.integers(len(other)))
    middle = (b"", data[first:last] * 2, bytes(last - first), other[begin : begin + last - first])
    return data[:first] + middle[rng.integers(4)] + data[last:]


def _lengths(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Change the lengths in a header, and make its own checksum right."""
    blocks = blocks_of(data)
    i = int(rng.integers(len(blocks)))
    magic, *lengths, crc, _ = struct.unpack_from("<IIQII", blocks[i])
    which = int(rng.integers(2))
    value = [0, 1, 63, 64, 2**31, 2**32 - 1, 2**60, 2**64 - 1, lengths[which] + 64][rng.integers(9)]
    lengths[which] = min(value, 2 ** (32, 64)[which] - 1)
    head = struct.pack("<IIQI", magic, *lengths, crc)
    blocks[i] = head + struct.pack("<I", zlib.crc32(head)) + blocks[i][24:]
    return assembled(blocks)


def _move_blocks(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Swap, double or leave out whole blocks, or put another file's in their place."""
    blocks, others = blocks_of(data), blocks_of(other)
    for _ in range(rng.integers(1, 3)):
        i, j = rng.integers(len(blocks), size=2)
        k = int(rng.integers(len(others)))
        how = rng.integers(6)
        if how == 0:
            blocks[i], blocks[j] = blocks[j], blocks[i]
        elif how == 1:
            blocks.insert(j, blocks[i])
        elif how == 2 and len(blocks) > 1:
            del blocks[i]
        elif how == 3:
            blocks[i] = others[k]
        elif how == 4:
            blocks[i:] = others[k:]
        else:
            blocks[i] = others[k][:24] + blocks[i][24:]  # the header only
    return assembled(blocks)


_DAMAGES: dict[str, Callable[[np.random.Generator, bytes, bytes], bytes]] = {
    "bytes": _change_bytes,
    "cut": _cut,
    "stretch": _stretch,
    "lengths": _lengths,
    "blocks": _move_blocks,
}

# Forgery -------------------------------------------------------------------------------------

_ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    64,
    *(
        around
        for limit in (16, 20, 26, 30, 40)
        for around in (2**limit - 1, 2**limit, 2**limit + 1)
    ),
    2**27,
    2**31,
    2**60,
    2**63,
    10**30,
    0.5,
    1e308,
    -0.0,
    "",
    "a",
    "rewards",
    "Box",
    "|O",
    "<f8",
    "<i8",
    "|b1",
    [],
    {},
    [0],
    [2**60],
    [[]],
    {"type": "Tuple"},
    {"tuple": []},
    {"dict": []},
    {"json": "rewards"},
    "torch",
    "uniform",
    [1] * 70,
    "x" * 3000,
]


def forge(rng: np.random.Generator, data: bytes, other: bytes) -> tuple[str, bytes]:
    """Change the contents of blocks and make the checksums right, as somebody could on purpose."""
    blocks = [taken_apart(block) for block in blocks_of(data)]
    kinds = []
    for _ in range(rng.integers(1, 4)):
        i = int(rng.integers(len(blocks)))
        meta, payload = blocks[i]
        kind = str(rng.choice(["json", "payload", "order", "numbers", "greedy"]))
        kinds.append(kind)
        if kind == "json":
            blocks[i] = (_change_json(rng, meta), payload)
        elif kind == "payload" and payload:
            blocks[i] = (meta, _change_bytes(rng, payload, payload))
        elif kind == "numbers" and payload:
            blocks[i] = (meta, _change_number(rng, payload))
        elif kind == "greedy":
            blocks[i : i + 1] = _greedy(rng, meta, payload)
        elif kind == "order":
            others = [taken_apart(block) for block in blocks_of(other)]
            blocks.insert(i, (blocks + others)[rng.integers(len(blocks) + len(others))])
    return "forged " + "+".join(sorted(set(kinds))), put_together(blocks)


def _change_number(rng: np.random.Generator, payload: bytes) -> bytes:
    """Put a whole number around a limit in the place of a number of eight bytes."""
    changed = bytearray(payload)
    place = 8 * int(rng.integers(max(len(payload) // 8, 1)))
    value = 2 ** int(rng.choice([0, 10, 20, 26, 30, 40, 62])) + int(rng.integers(-1, 2))
    changed[place : place + 8] = struct.pack("<q", value)[: len(payload) - place]
    return bytes(changed)


def _greedy(rng: np.random.Generator, meta: Any, payload: bytes) -> list[tuple[Any, bytes]]:
    """Return blocks that are small, but could make a reader ask for much memory."""
    whole = isinstance(meta, dict) and isinstance(meta.get("arrays"), dict)
    kind = meta.get("kind") if whole else None
    if kind == "spaces":
        sections = [dict(meta) for _ in range(rng.integers(1, 5))]
        for section in sections:
            for name in ("observation_space", "action_space"):
                if rng.random() < 0.7:
                    section[name] = _greedy_space(rng)
        return [(section, payload) for section in sections]
    if kind == "episodes" and meta["arrays"]:
        name = str(rng.choice(list(meta["arrays"])))
        part = str(rng.choice(["[]", "[0]", "0", "{}", '""', "[[]]", "0.5"]))
        depth = int(rng.integers(1, 3))
        text = "[" * depth + ",".join([part] * int(10 ** rng.uniform(3, 6))) + "]" * depth
        return [(meta, payload), _with_array(meta, payload, name, "|u1", text.encode())]
    if kind == "changes":
        n, dtypes = int(10 ** rng.uniform(3, 5.5)), ("<i8", "<i4", "|i1")
        for name, usual in (("clocks", "<i8"), ("policies", "<i4")):
            dtype = usual if rng.random() < 0.7 else str(rng.choice(dtypes))
            numbers = np.arange(n) if name == "clocks" and rng.random() < 0.7 else np.arange(n) % 2
            meta, payload = _with_array(meta, payload, name, dtype, numbers.astype(dtype).tobytes())
        return [(meta, payload)]
    if kind == "policy":
        empty = {"dtype": "|i1", "shape": [0], "offset": 0}
        more = {f"{i:x}": empty for i in range(int(10 ** rng.uniform(2, 4)))}
        return [({**meta, "arrays": {**meta["arrays"], **more}}, payload)]
    return [(meta, payload)]


def _greedy_space(rng: np.random.Generator, depth: int = 0) -> Any:
    kind = rng.choice(["Box", "Box", "Tuple", "Sequence", "Graph"]) if depth < 3 else "Box"
    if kind == "Tuple":
        parts = [_greedy_space(rng, depth + 1) for _ in range(rng.integers(1, 6))]
        return {"type": "Tuple", "spaces": parts}
    if kind == "Sequence":
        stack = bool(rng.random() < 0.5)
        return {"type": "Sequence", "space": _greedy_space(rng, depth + 1), "stack": stack}
    if kind == "Graph":
        return {"type": "Graph", "node_space": _greedy_space(rng, depth + 1), "edge_space": None}
    more = {"more": int(rng.integers(9))} if rng.random() < 0.2 else {}
    dtype, n = str(rng.choice(["float64", "uint8"])), int(10 ** rng.uniform(4, 7))
    return {"type": "Box", "dtype": dtype, "shape": [n], "low": 0, "high": 1, **more}


def _with_array(meta: Any, payload: bytes, name: str, dtype: str, data: bytes) -> tuple[Any, bytes]:
    """Put an array of other bytes behind the payload, and in the place of the one of that name."""
    offset = -(-len(payload) // 64) * 64
    shape = [len(data) // np.dtype(dtype).itemsize]
    entry = {"dtype": dtype, "shape": shape, "offset": offset}
    arrays = {**meta["arrays"], name: entry}
    return {**meta, "arrays": arrays}, payload.ljust(offset, b"\0") + data + b"U"


def taken_apart(block: bytes) -> tuple[Any, bytes]:
    """Return JSON and payload of a block, without the checksum of the block before it."""
    length = struct.unpack_from("<I", block, 4)[0]
    meta = json.loads(block[24 : 24 + length])
    meta.pop("after", None)
    return meta, block[24 + length :]


def put_together(blocks: list[tuple[Any, bytes]]) -> bytes:
    """Make a file of blocks with these contents."""
    data, last, end = MAGIC, 0, 0
    for meta, payload in blocks:
        chained = {**meta, "after": last} if isinstance(meta, dict) else meta
        if isinstance(meta, dict) and meta.get("kind") == "ahead":
            if not end:
                end = len(data)
                data = data.ljust(format_.tail_start(end), b"\0")
            if isinstance(meta.get("end"), int):
                chained["end"] = end
        block, last = raw_block(len(data), chained, payload)
        data += block
    return data


def raw_block(offset: int, meta: Any, payload: bytes) -> tuple[bytes, int]:
    """Make a block with right checksums for a place in the file; also return that of its header."""
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    text += b" " * (-(offset + 24 + len(text)) % 64)
    crc = zlib.crc32(payload, zlib.crc32(text))
    head = struct.pack("<IIQI", 0x4B4C424F, len(text), len(payload), crc)
    checksum = zlib.crc32(head)
    return head + struct.pack("<I", checksum) + text + payload, checksum


def _change_json(rng: np.random.Generator, value: Any) -> Any:
    """Replace, leave out or double one value somewhere in JSON data."""
    places = list(_places(value))
    if not places:
        return _ODD[rng.integers(len(_ODD))]
    holder, key = places[rng.integers(len(places))]
    changed: Any = json.loads(json.dumps(value))
    inner: Any = changed
    for step in holder:
        inner = inner[step]
    how = rng.integers(8)
    if how == 0:
        del inner[key]
    elif how == 1 and isinstance(inner, list):
        inner.insert(int(key), inner[key])
    elif how == 2:
        for _ in range(int(rng.choice([3, 30, 3000]))):
            inner[key] = [inner[key]] if rng.random() < 0.5 else {"tuple": [inner[key]]}
    else:
        inner[key] = _ODD[rng.integers(len(_ODD))]
    try:
        json.dumps(changed)
    except RecursionError:
        return value
    return changed


def _places(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if not isinstance(value, dict | list) or len(trail) > 100:
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield trail, key
        yield from _places(value[key], (*trail, key))


# Loading under guard -------------------------------------------------------------------------

# What a load has no business doing. Opening is judged by its mode.
_FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "marshal.",
    "pickle.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.truncate",
    "subprocess.",
    "socket.",
    "ctypes.",
    "code.__new__",
    "mmap.",
)


class Watch:
    """Watch, by an audit hook, what the interpreter does while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)  # for good: there is no way to take it off

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            mode = arguments[1]
            if isinstance(mode, str) and set(mode) & set("wax+"):
                self.seen.append(f"open {arguments}")
        elif event.startswith(_FORBIDDEN):
            self.seen.append(f"{event} {arguments}"[:200])

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[str]]:
        """Watch inside the block; give a list of the forbidden things that were seen."""
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


class TooSlow(BaseException):
    """Raised in a load that takes longer than `SECONDS`."""


def _stop(*_: object) -> None:
    raise TooSlow


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Limit memory and set an alarm for time, where the system has them."""
    if sys.platform == "win32":
        yield
        return
    handler = signal.signal(signal.SIGPROF, _stop)
    try:
        with memory(ROOM):
            yield
    finally:
        signal.signal(signal.SIGPROF, handler)


@contextlib.contextmanager
def memory(room: int) -> Iterator[None]:
    """Let the process ask for so many bytes more, on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # a busy machine is no finding
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fits_together(found: Trajectories) -> bool:
    """Return whether an evaluation could use the columns of a forged file."""
    steps, episodes = len(found.rewards), len(found)
    rows = [leaf for name in BY_STEP for leaf in batches.leaves(getattr(found, name))]
    return (
        all(len(leaf) == steps for leaf in rows)
        and all(len(getattr(found, name)) == episodes for name in BY_EPISODE)
        and found.offsets[0] == 0
        and found.offsets[-1] == steps
        and bool((found.lengths >= 1).all())
        and bool(np.isfinite(found.rewards).all())
        and bool((found.log_probs > -np.inf).all())
        and (not steps or 0 <= found.policy_ids.min() <= found.policy_ids.max())
        and (not steps or int(found.policy_ids.max()) < len(found.policies))
    )


def use(found: Trajectories, i: int) -> str:
    """Print and evaluate what was loaded; return "used", or what went wrong.

    Errors that say what is wrong with the data are fine: a forgery may be nonsense.
    """
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for shown in (found, *found.policies):
                if len(repr(shown)) > 100_000:
                    return f"LONG {type(shown).__name__}"
            if len(found):
                names = None if i % 10 == 0 else ["NFIS", "BIS"]
                str(ope_gym.evaluate(found, "last", names, held_out=False))
    except (ValueError, TypeError, RuntimeError):
        return "used"
    except (Exception, TooSlow) as error:
        return f"USE {error!r}"[:300]
    return "used"


Read = Callable[[], Trajectories]


def attempt(read: Read, watch: Watch) -> tuple[str, Trajectories | None]:
    """Read, and return "error", "data", or what went wrong; and the data."""
    try:
        with alarm(), watch() as seen, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", UserWarning)
            found = read()
    except DamagedFileError:
        return (f"FORBIDDEN {seen}" if seen else "error"), None
    except (Exception, TooSlow) as error:
        return f"RAISED {error!r}"[:300], None
    if seen:
        return f"FORBIDDEN {seen}", None
    return "data", found


def loaded(path: Path, *, recover: bool, allowed: set[str] | None, watch: Watch) -> Any:
    """Load a file and judge the result, as `attempt` does.

    Args:
        path: The file.
        recover: As `Trajectories.load` has it.
        allowed: Digests of the data that may come; None if only their form is judged.
        watch: Sees what the load does.
    """
    came, found = attempt(lambda: Trajectories.load(path, recover=recover), watch)
    if found is None:
        return came, None
    if allowed is not None:
        good = digest(found) in allowed
        return ("data" if good else f"WRONG NUMBERS {found!r}"), found
    return ("data" if fits_together(found) else f"DOES NOT FIT {found!r}"), found


def read_in_chunks(path: Path, steps: int) -> Trajectories:
    """Read the episodes of a file, so many steps at a time, and join them."""
    parts = []
    for section in read_layout(path):
        none = nothing(section.observation_space, section.action_space, section.horizon)
        joined = join([none, *read_chunks(section, steps)])
        parts.append(
            dataclasses.replace(joined, policies=section.policies, schedules=section.schedules)
        )
    return parts[0].merge(*parts[1:]) if len(parts) > 1 else [*parts, nothing()][0]


def compared(path: Path, came: str, found: Trajectories | None, steps: int, watch: Watch) -> str:
    """Read the file in chunks, and compare with the result of `Trajectories.load`."""
    came_too, in_chunks = attempt(lambda: read_in_chunks(path, steps), watch)
    if came_too not in GOOD:
        return f"IN CHUNKS {came_too}"
    if came_too != came:
        return f"DOORS DIFFER: load {came}, in chunks {came_too}"
    if found is None or in_chunks is None or digest(found) == digest(in_chunks):
        return came_too
    return f"DOORS DIFFER: {in_chunks!r}"


GOOD = ("error", "data", "used")
Findings = dict[str, tuple[str, bytes]]


def run(mutations: int, seed: list[int], folder: Path) -> tuple[collections.Counter[str], Findings]:
    """Count how each kind of mutation ended, and keep one case of each kind of finding."""
    # a small gap: bytes that are changed shall be others than its zeros
    with mock.patch.object(format_, "GAP", 2**12), mock.patch.object(block_writer, "_TAIL", 2**11):
        return _run(mutations, seed, folder)


def _run(
    mutations: int, seed: list[int], folder: Path
) -> tuple[collections.Counter[str], Findings]:
    files = originals(folder)
    path, names, watch = folder / "fuzzed", list(files), Watch()
    allowed = set()
    for data in files.values():
        blocks = blocks_of(data)
        for n in range(len(blocks) + 1):
            path.write_bytes(assembled(blocks[:n]))
            with contextlib.suppress(DamagedFileError):
                allowed.add(digest(Trajectories.load(path)))
    rng = np.random.default_rng(seed)
    counts: collections.Counter[str] = collections.Counter()
    findings: Findings = {}
    with warnings.catch_warnings():  # kernels are compiled or loaded once, before time counts
        warnings.simplefilter("ignore")
        ope_gym.evaluate(folder / "discrete", "last", held_out=False)
    with guarded():
        for i in range(mutations):
            name, other = (str(x) for x in rng.choice(names, size=2))
            if rng.random() < 0.3:
                other = {"discrete": "another", "another": "discrete"}.get(name, other)
            forged = rng.random() < 0.5
            kind, data = (forge if forged else damage)(rng, files[name], files[other])
            path.write_bytes(data)
            digests = None if forged else allowed
            with memory(max(LOAD, TIMES * len(data))):
                came, found = loaded(path, recover=i % 3 == 0, allowed=digests, watch=watch)
            results = {"": came}
            if i % 3 and came in GOOD:
                whole, steps = ((0, 1), (0, 10), (1 << 24, 1), (1 << 24, 1000))[rng.integers(4)]
                with mock.patch.object(reader, "_WHOLE", whole):
                    results[" in chunks"] = compared(path, came, found, steps, watch)
            if found is not None and came in GOOD:
                results[" use"] = use(found, i)
            for door, result in results.items():
                counts[f"{kind}{door}: {result if result in GOOD else 'FOUND'}"] += 1
                if result not in GOOD:
                    says = f"mutation {i} of seed {seed}, of {name!r}: {result}"
                    findings.setdefault(f"{kind}{door}: {result[:60]}", (says, data))
    return counts, findings


def run_all(
    mutations: int, seed: int, workers: int, folder: Path
) -> tuple[collections.Counter[str], Findings]:
    """Run all mutations in portions, each in a process of its own, which may crash."""
    counts: collections.Counter[str] = collections.Counter()
    findings: Findings = {}
    sizes = [min(PORTION, mutations - first) for first in range(0, mutations, PORTION)]
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(sizes), workers):
        numbers = range(first, min(first + workers, len(sizes)))
        with ProcessPoolExecutor(workers, context) as pool:
            started = {n: pool.submit(run, sizes[n], [seed, n], folder / f"{n}") for n in numbers}
            for n, portion in started.items():
                try:
                    some, found = portion.result()
                except BrokenProcessPool as error:  # the file that it was reading is still there
                    left = folder / f"{n}" / "fuzzed"
                    data = left.read_bytes() if left.exists() else b""
                    found = {f"CRASHED {n}": (f"seed {[seed, n]}: {error}", data)}
                    some = collections.Counter()
                counts += some
                findings = {**found, **findings}
    return counts, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="processes at the same time")
    parser.add_argument("--keep", type=Path, help="folder for a file of each finding")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        counts, findings = run_all(
            arguments.mutations, arguments.seed, arguments.workers, Path(folder)
        )
    for what, count in sorted(counts.items()):
        print(f"{what:<50}{count:>9,}")
    totals: collections.Counter[str] = collections.Counter()
    for what, count in counts.items():
        door = next((x for x in ("in chunks", "use") if f" {x}: " in what), "load")
        totals[f"{door}: {what.rpartition(': ')[2]}"] += count
    print(*(f"{what:<50}{count:>9,}" for what, count in sorted(totals.items())), sep="\n")
    seconds = time.perf_counter() - start
    print(
        f"{sum(n for what, n in totals.items() if what.startswith('load')):,} loads and "
        f"{sum(n for what, n in totals.items() if what.startswith('in')):,} readings in chunks in "
        f"{seconds:.0f} s, {len(findings)} kinds of finding"
    )
    for number, (what, (says, data)) in enumerate(findings.items()):
        print(f"\n{what}\n  {says}")
        if arguments.keep:
            arguments.keep.mkdir(exist_ok=True)
            (arguments.keep / f"{number}").write_bytes(data)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
