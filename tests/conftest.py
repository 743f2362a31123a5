"""Eight simulated CPU devices for every test, set up before JAX starts a backend."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAXSCALER_CACHE"] = "off"  # a test that finds an old plan tests nothing
# Tests compile much and run little: LLVM's optimisations cost more than they give. What partitions
# a program comes before LLVM and is not touched.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_num_cpu_devices", 8)

# Derandomised: a red run must be red again. No deadline: compile times vary with the machine.
settings.register_profile("jaxscaler", derandomize=True, deadline=None)
settings.load_profile("jaxscaler")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight simulated devices."""
    found = jax.devices()
    assert len(found) == 8, "JAX started before conftest could ask for 8 devices"
    return found
