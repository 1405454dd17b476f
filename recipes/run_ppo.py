"""PPO: python recipes/run_ppo.py recipes/ppo-tiny-dense-cpu.yaml. See `--help`."""

from refit_transport.cli_rl import launch

if __name__ == "__main__":
    launch("ppo")
