"""NeMo RL's `policy.generation.refit_transport: nccl_reshard`, served by this package.

    python -m refit_transport.integrations.nemo_rl examples/run_grpo.py --config job.yaml

or `install()` before the driver's own set-up. Only the driver's process is patched, and only at what `seams.SEAMS`
lists; to NeMo RL's workers our code goes as calls, see `delivery`.
"""

from refit_transport.integrations.nemo_rl.install import install

__all__ = ["install"]
