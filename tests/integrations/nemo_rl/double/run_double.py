"""A driver as NeMo RL's `run_grpo.py` and `run_ppo.py` are: Ray, settings, set-up, refits; then what was served.

run_double.py --algorithm grpo --config job.json --results results.json
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import ray
from nemo_rl.algorithms import grpo, ppo
from nemo_rl.algorithms.grpo import refit_policy_generation
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.models.generation import configure_generation_config

SEQUENCES = ((1, 2, 3, 4, 5, 6, 7, 8), (8, 6, 4, 2, 0, 9))


def module_path(_actor):
    import refit_transport

    return refit_transport.__file__


def asked(leaders):
    return ray.get([leader.logprobs.remote(SEQUENCES) for leader in leaders])


def refused(policy, generation, leaders):
    """A refit that fails, and what an engine then says to a request."""
    try:
        refit_policy_generation(policy, generation, False)
    except RuntimeError as error:
        found = {"error": str(error)}
    try:
        asked(leaders)
    except ray.exceptions.RayTaskError as error:
        found["fence"] = str(error.cause)
    return found


def main():
    parser = argparse.ArgumentParser()
    for name in ("algorithm", "config", "results"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    policy_config = json.loads(Path(arguments.config).read_text(encoding="utf-8"))
    clusters = [RayVirtualCluster([ranks]) for ranks in policy_config["double"]["ranks"]]
    generation_config = policy_config["generation"] = configure_generation_config(
        policy_config["generation"], SimpleNamespace(pad_token_id=0)
    )
    init_ray()
    master_config = SimpleNamespace(policy=policy_config, clusters=clusters)
    setup = {"grpo": grpo, "ppo": ppo}[arguments.algorithm].setup
    policy, generation, *_ = setup(master_config, None, None, None)
    synchronizer = generation.weight_synchronizer
    handles = [*policy.worker_group.workers, *generation.worker_group.workers]
    results = {
        "synchronizer": type(synchronizer).__name__,
        "load_format": generation_config["vllm_cfg"]["load_format"],
        "stale": [synchronizer.is_stale],
        "paths": ray.get([handle.__ray_call__.remote(module_path) for handle in handles]),
        "refits": [],
    }
    leaders = [generation.worker_group.workers[index] for index in generation.worker_group.dp_leader_worker_indices]
    for seed in policy_config["double"]["seeds"]:
        if seed is None:
            ray.get(policy.worker_group.workers[1].refuse.remote())
            results["refits"].append(refused(policy, generation, leaders))
            results["stale"].append(synchronizer.is_stale)
            continue
        ray.get(policy.worker_group.run_all_workers_single_data("seed", seed))
        before = [] if results["stale"][1:] and synchronizer.is_stale else asked(leaders)
        figures = refit_policy_generation(policy, generation, False)
        results["stale"].append(synchronizer.is_stale)
        [trained, *_] = ray.get(policy.worker_group.run_all_workers_single_data("logprobs", SEQUENCES))
        results["refits"].append({"figures": figures, "before": before, "served": asked(leaders), "trained": trained})
    generation.shutdown()
    policy.shutdown()
    Path(arguments.results).write_text(json.dumps(results), encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()
