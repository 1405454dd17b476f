"""Scripts that tests start in processes of their own: they import each other, and vLLM with variables of their own."""

collect_ignore_glob = ["vllm_*.py"]
