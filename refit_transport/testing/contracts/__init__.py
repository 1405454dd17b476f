"""What every source, target, transport and fabric must do, as suites that pytest runs on a class of yours.

    from refit_transport.testing.contracts import SourceContract


    class TestMySource(SourceContract):
        def make_source(self): ...

A suite is a class whose `test_*` methods each prove one rule of the protocol's docstring. Subclass it under a name that
pytest collects, fill in the methods that raise `NotImplementedError`, and run pytest: a broken rule fails with what was
expected, and of which tensor, rank and box. The package's own classes run through the same suites. Nothing here imports
pytest. Suites need small tensors (a few thousand elements), a CPU, and a few seconds.
"""

from __future__ import annotations

from refit_transport.testing.contracts.fabric import FabricContract
from refit_transport.testing.contracts.source import SourceContract
from refit_transport.testing.contracts.target import TargetContract
from refit_transport.testing.contracts.transport import TransportContract

__all__ = ["FabricContract", "SourceContract", "TargetContract", "TransportContract"]
