"""Runs a NeMo RL driver script with this package as its `nccl_reshard` transport.

    python -m refit_transport.integrations.nemo_rl [--check] SCRIPT [ARGUMENTS...]

The script gets its arguments as if it had been started itself. `--check` only compares versions and the installed
NeMo RL with what is expected of them. `NEMO_RL_SOURCE`, by which our recipes name their bases, is the folder of the
installed NeMo RL unless it is set.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from refit_transport.errors import RefitTransportError
from refit_transport.integrations.nemo_rl.install import check, install
from refit_transport.integrations.nemo_rl.seams import SEAMS, source_folder

_SOURCE = "NEMO_RL_SOURCE"


def main(arguments: Sequence[str]) -> int:
    """The exit code; the script's own exceptions and exits pass through."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)  # noqa: T201 - a command's output
        return 0 if arguments else 2
    try:
        if arguments[0] == "--check":
            check()
            print(f"versions and all {len(SEAMS)} seams of NeMo RL are as expected")  # noqa: T201
            return 0
        script = Path(arguments[0])
        if not script.is_file():
            return _refused(f"there is no script {script}: give the driver's path, such as examples/run_grpo.py")
        install()
    except RefitTransportError as error:
        return _refused(str(error))
    os.environ.setdefault(_SOURCE, str(source_folder()))
    sys.argv = [str(script), *arguments[1:]]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _refused(reason: str) -> int:
    print(reason, file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
