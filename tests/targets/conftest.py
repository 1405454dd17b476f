"""Scripts that tests start in processes of their own set vLLM's environment variables when they are imported."""

collect_ignore_glob = ["vllm_*.py"]
