"""Whether a worker can import this package: sent by value, because it runs where the answer may be no."""

from __future__ import annotations


def missing(_worker: object, wanted: str) -> str:
    """What is wrong in this process; "" when version `wanted` of the package can be imported."""
    import sys

    try:
        import refit_transport
    except ImportError as error:
        return f"{sys.executable} can't import refit_transport: {error}"
    found = refit_transport.__version__
    if found != wanted:
        return f"{sys.executable} has refit_transport {found} at {refit_transport.__file__}, the driver has {wanted}"
    return ""
