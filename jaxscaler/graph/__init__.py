"""From a traced step to an op graph: ops, values, factors, phases, roles, repeated layers."""
