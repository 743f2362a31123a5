"""The examples run as their users run them; each learns, and says which plan it ran."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ["mnist_nnx", "gpt_linen", "resnet_batchnorm", "lora", "eval_checkpoint"]


def run(name):
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # with the flags that conftest.py sets
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    said = run(name)
    losses = [float(x) for x in re.findall(r"^loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == 5, said
    assert losses[-1] < losses[0]
    digests = re.search(r"^plan ([0-9a-f]{16})(?: then ([0-9a-f]{16}))?$", said, re.MULTILINE)
    assert digests, said
    if name == "eval_checkpoint":
        assert digests[1] != digests[2]
        before, after = re.search(
            r"evaluation ([\d.]+), restored on 4 devices ([\d.]+)", said
        ).groups()
        assert float(before) == pytest.approx(float(after), abs=2e-4)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60
