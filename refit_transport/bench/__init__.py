"""Benchmarks: refits in a lab of rate-limited network namespaces, and what planning costs."""
