"""Reinforcement learning in pure torch: trajectories, advantages, losses, replay and tasks."""
