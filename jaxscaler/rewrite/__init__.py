"""What changes the forward computation of a marked loss before JAX differentiates it."""
