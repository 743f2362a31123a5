"""Ordinary flax models and their train steps, as a user has them before planning."""

from models.workload import Workload

__all__ = ["Workload"]
