"""What may become of a compile, with workers that die, hang or answer as told; no compiler runs."""

import json
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from jaxscaler import PlanError
from jaxscaler.verify import targets, worker
from jaxscaler.verify.targets import target_of
from jaxscaler.verify.worker import Program, compile_for

PROGRAM = Program(b"never read", {"d": 8}, {}, "digest")
MEMORY = {"argument": 100, "output": 60, "alias": 50, "temp": 30, "generated_code": 5, "host": 0,
          "peak": 130}  # fmt: skip
HLO = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %r = f32[16]{0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def fake(code: str) -> tuple[str, ...]:
    """A worker that runs `code` with its folder as `folder`."""
    head = "import sys, json, os, signal; from pathlib import Path; folder = Path(sys.argv[1]); "
    return sys.executable, "-S", "-c", head + code


def answering(result: dict, text: str | None = None) -> tuple[str, ...]:
    write = f"(folder / 'hlo.txt').write_text({text!r}); " if text else ""
    answer = f"(folder / 'result.json').write_text({json.dumps(result)!r})"
    return fake(write + answer)


def run(command, target="cpu:8", **options):
    return compile_for(target, PROGRAM, worker=command, **{"cache": False, **options})


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [
        ("print('LLVM ERROR: out of registers', file=sys.stderr, flush=True); os.abort()",
         worker.ABORTED, "LLVM ERROR: out of registers"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", worker.ABORTED, "SIGSEGV"),
        ("sys.exit(3)", worker.ABORTED, "exit status 3"),
        ("pass", worker.ABORTED, "exit status 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", worker.KILLED, "SIGKILL"),
        ("signal.pause()", worker.TIMED_OUT, "0.5 s"),
        ("raise MemoryError", worker.WORKER_MEMORY, "fewer layers"),
        ("print(\"what():  std::bad_alloc\", file=sys.stderr, flush=True); os.abort()",
         worker.WORKER_MEMORY, "SIGABRT"),
    ],
)  # fmt: skip
def test_the_death_of_a_worker_is_a_named_result(code, status, word, monkeypatch):
    monkeypatch.setattr(worker, "_oom_kills", lambda: 0)
    found = run(fake(code), timeout=0.5 if status == worker.TIMED_OUT else 60.0)
    assert found.status == status
    assert word in found.detail
    assert not found.ok
    assert found.bytes is None and found.collectives is None


def test_a_worker_that_linux_kills_for_memory_was_out_of_memory(monkeypatch):
    counts = iter((3, 4))
    monkeypatch.setattr(worker, "_oom_kills", lambda: next(counts))
    found = run(fake("os.kill(os.getpid(), signal.SIGKILL)"))
    assert found.status == worker.WORKER_MEMORY


HBM = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Allocation (size=1) would exceed memory: "
    "CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 23.50G of 15.75G hbm. Exceeded hbm capacity by 7.75G."
)
TEMPORARIES = (
    "JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the "
    "total memory required for HLO temporaries (18.00G) exceeds available HBM (15.75G)."
)


@pytest.mark.parametrize(
    ("error", "status", "needs"),
    [
        (HBM, worker.TOO_BIG, 23.5 * 2**30),
        (TEMPORARIES, worker.TOO_BIG, 18 * 2**30),
        ("JaxRuntimeError: INVALID_ARGUMENT: Mosaic failed to compile", worker.REFUSED, None),
        ("XlaRuntimeError: PJRT plugin version 0.1 is not supported", worker.SKEW, None),
    ],
)
def test_what_the_compiler_raises_is_a_named_result(error, status, needs):
    found = run(answering({"error": error}))
    assert (found.status, found.needs, found.bytes) == (status, needs, needs)
    assert error in found.detail


def test_a_compiled_program_has_memory_and_collectives():
    found = run(answering({"memory": MEMORY, "seconds": 2.0}, HLO))
    assert found.ok and found.status == worker.COMPILED
    assert found.bytes == found.memory.total == 100 + 60 - 50 + 30
    (reduce,) = found.collectives
    assert (reduce.kind, reduce.axes, reduce.bytes) == ("all_reduce", ("d",), 64)
    assert found.unknown == targets.UNKNOWN["cpu"]


@pytest.mark.parametrize("text", [None, "this is no HLO"])
def test_memory_is_told_when_the_text_is_not_to_be_had(text):
    result = {"memory": MEMORY, "seconds": 2.0, "no_text": "XlaRuntimeError: RET_CHECK"}
    found = run(answering(result, text))
    assert found.ok and found.status == worker.NO_TEXT
    assert found.detail
    assert found.bytes == 140
    assert found.collectives is None


def test_the_partitioners_remarks_are_kept():
    line = "E0101 00:00:00.0 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization."
    code = (
        f"print({line!r}, file=sys.stderr, flush=True); "
        + answering({"memory": MEMORY, "seconds": 1.0}, HLO)[-1].split("sys.argv[1]); ", 1)[1]
    )
    assert run(fake(code)).remarks == ("[SPMD] Involuntary full rematerialization.",)


def test_a_lasting_result_is_kept_and_a_passing_failure_is_not(tmp_path):
    dead = fake("os.abort()")
    first = run(answering({"memory": MEMORY, "seconds": 2.0}, HLO), cache=tmp_path)
    again = run(dead, cache=tmp_path)
    assert not first.cached and again.cached
    assert (again.memory, again.collectives) == (first.memory, first.collectives)
    assert again.text == HLO
    # another target, other options: other entries, and a death is none
    assert run(dead, "cpu:4", cache=tmp_path).status == worker.ABORTED
    assert run(dead, cache=tmp_path, compiler_options={"a": True}).status == worker.ABORTED
    assert run(answering({"error": HBM}), "cpu:4", cache=tmp_path).status == worker.TOO_BIG


def test_flags_of_the_compiler_count(tmp_path, monkeypatch):
    run(answering({"memory": MEMORY, "seconds": 2.0}, HLO), cache=tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=elsewhere")
    assert run(fake("os.abort()"), cache=tmp_path).status == worker.ABORTED


def test_a_spoilt_entry_is_made_anew(tmp_path):
    good = answering({"memory": MEMORY, "seconds": 2.0}, HLO)
    run(good, cache=tmp_path)
    (entry,) = (tmp_path / "compiled").iterdir()
    (entry / "result.json").write_text("{")
    assert not run(good, cache=tmp_path).cached


def test_progress_is_shown():
    said = []
    run(answering({"error": "x"}), progress=lambda phase, detail: said.append((phase, detail)))
    assert said[0] == ("compile", "for cpu:8, 0 s")


def test_the_worker_has_an_environment_of_its_own():
    code = (
        "keys = ['JAX_PLATFORMS', 'TPU_SKIP_MDS_QUERY', 'ALLOW_MULTIPLE_LIBTPU_LOAD']; "
        "(folder / 'result.json').write_text(json.dumps("
        "{'error': str([os.environ.get(k) for k in keys])}))"
    )
    assert run(fake(code)).detail == "['cpu', '1', '1']"


# --- targets ----------------------------------------------------------------------------------


def versions_of(**installed):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return version


def test_gpus_are_described_to_the_compiler():
    target = target_of("h100:8x4")
    assert (target.platform, target.devices) == ("cuda", 32)
    assert target.options["topology"] == "1x4x8"
    text = target.options["target_config"]
    assert "core_count: 132" in text and "major: 9" in text and "NVIDIA H100 80GB HBM3" in text


@pytest.mark.parametrize("name", ["v100-16", "v100-32", "a100-40", "a100-80", "h200", "b200"])
def test_every_gpu_of_the_table_is_a_target(name):
    target = target_of(f"{name}:8")
    assert f"device_memory_size: {int(target.memory)}" in target.options["target_config"]


@pytest.mark.parametrize(
    ("cluster", "topology", "options", "devices"),
    [
        ("v5e:4x4", "v5e:4x4", {}, 16),
        ("v5p:4x4x8", "v5p:4x4x8", {}, 128),
        ("v4:2x2x2", "v4:2x2x2", {"chip_config_name": "megacore"}, 8),
        ("v6e:4x4x2", "v6e:4x4", {"num_slices": 2}, 32),
    ],
)
def test_tpus_are_slices_of_a_torus(cluster, topology, options, devices):
    target = target_of(cluster)
    assert target.platform == "tpu"
    assert (target.topology, target.options, target.devices) == (topology, options, devices)


def test_a_device_without_a_compiler_is_refused_by_name():
    with pytest.raises(PlanError, match=r"mi300x.*v100-16.*v5p"):
        target_of("mi300x:8")


def test_packages_that_lack_or_differ_are_told():
    gpu, tpu = target_of("h100:8"), target_of("v5e:2x2")
    assert targets.missing(tpu, versions_of(jaxlib="1")) == ("libtpu",)
    plugins = {"jax-cuda12-plugin": "1", "jax-cuda12-pjrt": "2", "nvidia-cuda-nvcc-cu12": "12"}
    version = versions_of(jaxlib="1", **plugins)
    assert targets.missing(gpu, version) == ()
    assert targets.skewed(gpu, version) == "jax-cuda12-pjrt 2 with jaxlib 1"


def test_missing_extras_are_a_result_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "missing", lambda target: ("libtpu",))
    found = run(fake("os.abort()"), "v5e:2x2")
    assert found.status == worker.EXTRAS_MISSING
    assert "pip install 'jaxscaler[tpu]'" in found.detail


def test_version_skew_is_a_result(monkeypatch):
    monkeypatch.setattr(targets, "missing", lambda target: ())
    monkeypatch.setattr(targets, "skewed", lambda target: "jax-cuda12-plugin 1 with jaxlib 2")
    found = run(fake("os.abort()"), "h100:8")
    assert (found.status, found.ok) == (worker.SKEW, False)
