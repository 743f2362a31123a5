"""`jaxscaler estimate`: its arguments, and what they come to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxscaler.cluster.mixed import Mixed
from jaxscaler.errors import ConfigError, InfeasibleError
from jaxscaler.estimate import failures
from jaxscaler.estimate.compression import COMPRESSIONS
from jaxscaler.estimate.config import FAMILIES, ModelConfig, model_of, named_models
from jaxscaler.estimate.constants import STACKS
from jaxscaler.estimate.estimate import MOST, Estimate, estimate
from jaxscaler.estimate.fleet import mixed_of
from jaxscaler.estimate.inference import WEIGHTS, serve
from jaxscaler.estimate.memory import OPTIMIZERS
from jaxscaler.estimate.options import ROOM, SEARCHED
from jaxscaler.estimate.parallel import SCHEDULES, ParallelConfig
from jaxscaler.estimate.rlhf import METHODS
from jaxscaler.estimate.search import grower
from jaxscaler.estimate.show import explained, served_data, show_served
from jaxscaler.target import DONE, Report, cluster_of, progress, setting, traceable

SIZES = ("hidden", "layers", "heads", "kv_heads", "head_size", "ffn", "vocab", "context",
         "experts", "chosen")  # fmt: skip
DEGREES = ("tp", "pp", "dp", "cp", "ep", "zero", "shard", "chunks")


def add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """Of `jaxscaler estimate`."""
    command.set_defaults(run=_start)
    command.add_argument(
        "model", nargs="?",
        help="a name, the path of a Hugging Face config.json or its folder, or MODULE:FUNCTION of "
        f"a workload; names: {', '.join(named_models())}",
    )  # fmt: skip
    sizes = command.add_argument_group("sizes, where no model is named")
    sizes.add_argument("--family", choices=FAMILIES, default="llama")
    for name in SIZES:
        sizes.add_argument(_flag(name), type=int, metavar="N")
    for name in ("gated", "tied"):
        sizes.add_argument(_flag(name), action="store_true")
    where = command.add_argument_group("where")
    where.add_argument("--device", help="such as h100; the number of them is recommended")
    where.add_argument(
        "--cluster", help="such as h100:8x4, or a file NAME.toml; of two kinds: h100:8x4+a100:8x4"
    )
    where.add_argument("--devices", type=int, metavar="N", help="how many")
    where.add_argument("--most", type=int, default=MOST, metavar="N",
                       help="of the scaling curve (default: %(default)s)")  # fmt: skip
    training = command.add_argument_group("the run")
    training.add_argument("--batch", type=int, help="samples a step (serving: at a time)")
    training.add_argument("--seq", type=int, help="tokens a sample")
    training.add_argument("--tokens", type=float, help="of the run (default: 20 per parameter)")
    training.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    training.add_argument("--no-master", action="store_true", help="no copy of parameters in f32")
    training.add_argument("--dtype", help="of products (default: bfloat16 where there is)")
    training.add_argument("--stack", choices=STACKS, default="jax")
    training.add_argument(
        "--attention",
        choices=("flash", "unfused"),
        help="default: flash, where the model has a kernel",
    )
    training.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters alone"
    )
    training.add_argument(
        "--base", choices=WEIGHTS[1:], default="", help="dtype of the frozen model"
    )
    training.add_argument(
        "--compress", choices=COMPRESSIONS, default="",
        help="gradients where they are reduced (int8: with error feedback)",
    )  # fmt: skip
    way = command.add_argument_group("the way to spread it (default: searched)")
    for name in DEGREES:
        way.add_argument(_flag(name), type=int, metavar="N")
    way.add_argument("--no-sp", action="store_true", help="tensor parallelism without sequence")
    way.add_argument(
        "--only",
        metavar="FAMILY",
        help="search a family alone: data, tensor, pipeline, tensor+pipeline, …",
    )
    way.add_argument("--schedule", choices=SCHEDULES)
    way.add_argument(
        "--schedules", type=lambda text: tuple(text.split(",")), default=SEARCHED, metavar="NAMES",
        help=f"of pipelines that are searched (default: {','.join(SEARCHED)})",
    )  # fmt: skip
    way.add_argument("--micro-batch", type=int, metavar="N")
    way.add_argument("--recompute", choices=("none", "selective", "full"))
    goal = command.add_argument_group("time and money")
    goal.add_argument("--deadline-days", type=float, metavar="DAYS")
    goal.add_argument("--budget", type=float)
    goal.add_argument("--price-per-hour", type=float, help="of one device")
    goal.add_argument("--mtbf-hours", type=float, default=failures.MTBF_HOURS, metavar="HOURS",
                      help="of one device (default: %(default).0f)")  # fmt: skip
    goal.add_argument("--measured-tflops", type=float, metavar="TFLOPS",
                      help="that one device reached on this model")  # fmt: skip
    serving = command.add_argument_group("serving")
    serving.add_argument("--serve", action="store_true")
    serving.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    serving.add_argument("--answer", type=int, default=256, metavar="TOKENS")
    serving.add_argument("--weights", choices=WEIGHTS[1:], default="", help="dtype they lie in")
    serving.add_argument("--kv-cache", choices=WEIGHTS[1:], default="", help="dtype it lies in")
    rlhf = command.add_argument_group(
        "reinforcement learning from feedback (--batch answers an iteration, --prompt, --answer)"
    )
    rlhf.add_argument("--rlhf", choices=METHODS, metavar="METHOD", help="ppo or grpo")
    rlhf.add_argument(
        "--updates", type=int, default=1, metavar="N", help="optimizer steps an epoch"
    )
    rlhf.add_argument("--epochs", type=int, default=1, metavar="N", help="over the same answers")
    rlhf.add_argument("--critic", metavar="MODEL", help="of ppo (default: as the actor)")
    rlhf.add_argument("--reward", metavar="MODEL", help="default: of ppo as the actor, else a rule")
    out = command.add_argument_group("output")
    out.add_argument("--explain", action="store_true", help="each number's formula and source")
    out.add_argument("--json", action="store_true", help="print the result as JSON")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")
    out.add_argument("--quiet", action="store_true", help="no progress")
    step = command.add_argument_group("of a workload")
    step.add_argument("--size", help="the workload's size")
    step.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], type=setting, dest="settings",
        help="any other argument of FUNCTION; may be given again",
    )  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _start(args: argparse.Namespace) -> int:
    with progress(args.quiet) as report:
        run(args, report)
    return DONE


def run(args: argparse.Namespace, report: Report) -> None:
    """Answer what was asked."""
    cluster: Any = None
    if args.cluster is not None:
        two = "+" in args.cluster
        cluster = mixed_of(args.cluster, cluster_of) if two else cluster_of(args.cluster)
    if args.model is not None and ":" in args.model:
        args.target = args.model
        work, batch = traceable(args, report)
        found = estimate(
            work.step, work.state, *batch, cluster=cluster, price_per_hour=args.price_per_hour,
            mtbf_hours=args.mtbf_hours,
        )  # fmt: skip
        print(json.dumps(found.to_dict())) if args.json else found.show()
        return
    model = _model(args)
    if args.serve:
        _serve(args, model, cluster)
        return
    found = estimate(
        model, device=args.device, cluster=cluster, devices=args.devices, batch=args.batch,
        seq=args.seq, tokens=args.tokens, parallel=_parallel(args), micro_batch=args.micro_batch,
        recompute=args.recompute, deadline_days=args.deadline_days, budget=args.budget,
        price_per_hour=args.price_per_hour, mtbf_hours=args.mtbf_hours,
        measured_tflops=args.measured_tflops, most=args.most, only=args.only, rlhf=_rlhf(args),
        compress=args.compress, schedules=args.schedules,
        optimizer=args.optimizer, master=not args.no_master, dtype=args.dtype,
        stack=args.stack, attention=args.attention,
        lora=args.lora, base=args.base,
    )  # fmt: skip
    if args.plot is not None:
        if not isinstance(found, Estimate):
            raise ConfigError("plot: neither fleets nor rlhf are drawn")
        found.plot(args.plot)
    if args.json:
        print(json.dumps(found.to_dict()))
        return
    console = Console()
    found.show()
    if args.explain:
        console.print(explained(found.explain()))


def _model(args: argparse.Namespace) -> ModelConfig:
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.model is not None:
        if given:
            raise ConfigError(f"{', '.join(given)}: {args.model} has sizes of its own")
        return model_of(args.model)
    lacking = [name for name in ("hidden", "layers", "heads") if name not in given]
    if lacking:
        raise ConfigError(f"name a model, or give {', '.join(map(_flag, lacking))}")
    name = f"{args.family}-{given['layers']}x{given['hidden']}"
    return ModelConfig(name, args.family, gated=args.gated, tied=args.tied, **given)


def _rlhf(args: argparse.Namespace) -> dict[str, Any] | None:
    given = {name: getattr(args, name) for name in ("critic", "reward")}
    models = {name: model_of(value) for name, value in given.items() if value is not None}
    if args.rlhf is None:
        if models or args.updates != 1 or args.epochs != 1:
            raise ConfigError("critic, reward, updates, epochs: options of --rlhf")
        return None
    return {
        "method": args.rlhf, "prompt": args.prompt, "answer": args.answer,
        "updates": args.updates, "epochs": args.epochs, **models,
    }  # fmt: skip


def _parallel(args: argparse.Namespace) -> ParallelConfig | None:
    given = {name: getattr(args, name) for name in DEGREES if getattr(args, name) is not None}
    if args.schedule is not None:
        given["schedule"] = args.schedule
    if args.no_sp:
        given["sp"] = False
    return ParallelConfig(**given) if given else None


def _serve(args: argparse.Namespace, model: ModelConfig, cluster: Any) -> None:
    """On the way that is given, or the fewest devices that hold the model and its cache."""
    if isinstance(cluster, Mixed) or args.rlhf is not None:
        raise ConfigError("serve: on one kind of devices, and without rlhf")
    if (args.device is None) == (cluster is None):
        raise ConfigError("give one of device (such as h100) and cluster (such as h100:8x4)")
    options = {
        "batch": args.batch or 1, "prompt": args.prompt, "answer": args.answer,
        "dtype": args.dtype, "weights": args.weights, "cache": args.kv_cache, "stack": args.stack,
        "memory": ROOM,
    }  # fmt: skip
    if cluster is not None:
        parallel = _parallel(args) or ParallelConfig(tp=cluster.num_devices)
        served = serve(model, parallel, cluster, **options)
    else:
        served = fewest_to_serve(model, args.device, _parallel(args), args.devices, options)
    if args.json:
        print(json.dumps(served_data(served)))
    else:
        show_served(served, args.price_per_hour)


def fewest_to_serve(
    model: ModelConfig, device: str, parallel: ParallelConfig | None, devices: int | None,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Served on the fewest devices, all of them one tensor parallel group, that it fits."""
    grow, sizes = grower(device)
    if parallel is not None:
        return serve(model, parallel, grow(devices or parallel.devices), **options)
    for n in [devices] if devices else sizes(64):
        if model.heads % n:
            continue
        served = serve(model, ParallelConfig(tp=n), grow(n), **options)
        if served.fits or devices:
            return served
    raise InfeasibleError(
        f"{model.name}: its weights and cache fit no 64 {device} as one tensor parallel group: "
        "give --tp and --pp, a smaller batch, or narrower weights"
    )
