"""Minari's DataCollector and the bare environment, in the same loop of the same process.

    python minari_runner.py [--repetitions 20]

Run by the python of an environment that has Minari; README.md says how to make one. Prints one JSON
line: the seconds of the processor of each run.
"""

import argparse
import json
import os
import tempfile
import warnings
from functools import partial

import minari
from peer_loop import ENVS, Run, cpu_seconds, play, random_actions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20)
    repetitions = parser.parse_args().repetitions
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an environment that is not registered cannot be restored
        os.environ["MINARI_DATASETS_PATH"] = folder
        for title, (make, steps) in ENVS.items():
            actions, collector = random_actions(steps), minari.DataCollector(make())
            runs: dict[str, Run] = {
                "bare": partial(play, make(), actions),
                "DataCollector": partial(play, collector, actions),
            }
            seconds[title] = cpu_seconds(runs, repetitions)
            collector.close()
    print(json.dumps({"library": "Minari", "version": minari.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
