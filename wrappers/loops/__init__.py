"""Free values in the training loops of other libraries: TorchRL, Tianshou, RLlib.

`FreeValues` takes steps from any of them; the other modules make these steps, and each imports no
more than its own library.
"""

from wrappers.loops.values import FreeValues

__all__ = ["FreeValues"]
