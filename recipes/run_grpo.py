"""GRPO: python recipes/run_grpo.py recipes/grpo-tiny-dense-cpu.yaml. See `--help`."""

from refit_transport.cli_rl import launch

if __name__ == "__main__":
    launch("grpo")
