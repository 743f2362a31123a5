"""Pipelines: a step cut into stages, a plan for each, an order of their tasks."""
