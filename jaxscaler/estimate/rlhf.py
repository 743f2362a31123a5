"""Reinforcement learning from feedback (PPO, GRPO): answers are generated, scored and trained on.

An iteration generates `batch` answers with the actor, scores them with the frozen models, and
trains on them. It runs

- on the same devices: phases take turns, weights are gathered from the way they are trained in into
  the way they generate in (as Sheng et al. 2024, "HybridFlow", section 5, does), and what training
  keeps leaves less memory for keys and values, unless it is moved to the host and back;
- on separate devices: some generate, the others score and train, and weights are sent over. In turn
  each side waits for the other; one iteration behind (off-policy by one step) they overlap.

Generation is priced by `serve` (prompts, then a token at a time at the rate of memory), scoring by
`score`, training by `price`. Answers are as long as `answer` says, all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxscaler.cluster.cluster import Cluster, Level
from jaxscaler.cluster.mesh import Axis, Part, join_axes
from jaxscaler.cluster.parts import link_between, sub_clusters
from jaxscaler.cost.collective import collective_time
from jaxscaler.errors import ClusterError, ConfigError, InfeasibleError
from jaxscaler.estimate.config import ModelConfig
from jaxscaler.estimate.constants import Constants, constants_for
from jaxscaler.estimate.inference import Served, score, serve, serving_memory
from jaxscaler.estimate.memory import (
    BYTES,
    GB,
    leaves_of,
    local_parameters,
    overhead_bytes,
    stages_of,
)
from jaxscaler.estimate.options import Options
from jaxscaler.estimate.parallel import ParallelConfig, axes_of, level_of
from jaxscaler.estimate.price import Priced, dtype_for, price
from jaxscaler.estimate.search import best_ways, fast_domain

WAYS = 8  # of training that are looked at until the models fit
SPLITS = 6  # numbers of generating devices that are looked at
MOVES = ("reshard weights", "send weights", "move to the host and back")
STATES = ("parameters", "master parameters", "optimizer")  # that stay between steps
ACTOR, CRITIC, REFERENCE, REWARD = "actor", "critic", "reference", "reward"


class Method(NamedTuple):
    """Which models train, and which only score."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]


# Schulman et al. 2017 with Ouyang et al. 2022; Shao et al. 2024 (no critic; rewards are often
# rules, so that a reward model is there only where it is named).
METHODS: Mapping[str, Method] = {
    "ppo": Method((ACTOR, CRITIC), (REFERENCE, REWARD)),
    "grpo": Method((ACTOR,), (REFERENCE,)),
}


@dataclass(frozen=True)
class Rollouts:
    """An iteration: `batch` prompts of `prompt` tokens with an answer of `answer` tokens each; on
    these `epochs` times `updates` optimizer steps. critic, reward: None as the method has it."""

    method: str
    batch: int
    prompt: int
    answer: int
    updates: int = 1
    epochs: int = 1
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"rlhf={self.method!r}: one of {', '.join(METHODS)}")
        for name in ("batch", "prompt", "answer", "updates", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: a whole number, 1 or more")
        if self.batch % self.updates:
            raise ConfigError(f"updates={self.updates} does not divide batch={self.batch}")
        if self.critic is not None and CRITIC not in METHODS[self.method].trained:
            raise ConfigError(f"critic={self.critic.name}: rlhf={self.method!r} has none")

    def models(self, actor: ModelConfig) -> tuple[dict[str, ModelConfig], dict[str, ModelConfig]]:
        """(those that train, those that only score) by role."""
        given = {CRITIC: self.critic or actor, REWARD: self.reward or actor}
        method = METHODS[self.method]
        trained = {role: given.get(role, actor) for role in method.trained}
        frozen = {role: given.get(role, actor) for role in method.frozen}
        return trained, frozen | ({REWARD: self.reward} if self.reward else {})


@dataclass(frozen=True)
class Training:
    """The side that scores and trains. memory: bytes by component on a device, all models."""

    cluster: Cluster
    ways: Mapping[str, Priced]  # of the models that train; the others lie as the actor does
    scoring: Mapping[str, float]  # seconds by role
    memory: Mapping[str, float]
    seconds: float  # of all updates

    @property
    def resident(self) -> float:
        """Bytes on a device that stay while others take their turn."""
        return sum(x for name, x in self.memory.items() if name.split(": ")[1] in STATES)


@dataclass(frozen=True)
class Generation:
    """The side that generates: `rounds` of `served.batch` answers at a time on each replica."""

    served: Served
    rounds: int

    @property
    def seconds(self) -> float:
        return self.rounds * self.served.seconds


@dataclass(frozen=True)
class Placed:
    """An iteration in one of the placements. phases: seconds by name, in order; those of separate
    devices that overlap are both there. memory: bytes by side and component."""

    name: str
    phases: Mapping[str, float]
    seconds: float
    training: Training
    generation: Generation
    memory: Mapping[str, Mapping[str, float]]
    on_policy: bool = True


@dataclass(frozen=True)
class Feedback:
    """What an iteration takes: the best of each placement, fastest first."""

    model: ModelConfig
    cluster: Cluster
    rollouts: Rollouts
    options: Options
    placed: tuple[Placed, ...]

    @property
    def best(self) -> Placed:
        """The fastest on the policy that is trained."""
        return next(x for x in self.placed if x.on_policy)

    def explain(self) -> list[Any]:
        """Each number with formula, values and source: `explain.Line`s."""
        from jaxscaler.estimate.show_rlhf import lines

        return lines(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from jaxscaler.estimate.show_rlhf import feedback_data

        return feedback_data(self)

    def show(self) -> None:
        """Print tables."""
        from jaxscaler.estimate.show_rlhf import show_feedback

        show_feedback(self)


def feedback(
    model: ModelConfig, cluster: Cluster, rollouts: Rollouts, options: Options
) -> Feedback:
    """Price an iteration in all placements. InfeasibleError where none fits."""
    options = replace(
        options, batch=rollouts.batch // rollouts.updates, seq=rollouts.prompt + rollouts.answer
    )
    found, faults = [], []
    for place in (_same_devices, _separate):
        try:
            found += place(model, cluster, rollouts, options)
        except InfeasibleError as fault:
            faults.append(str(fault))
    if not found:
        raise InfeasibleError("; ".join(faults))
    return Feedback(
        model, cluster, rollouts, options, tuple(sorted(found, key=lambda x: x.seconds))
    )


def _same_devices(
    model: ModelConfig, cluster: Cluster, rollouts: Rollouts, options: Options
) -> list[Placed]:
    device = cluster.device
    best: Placed | None = None
    for side in trainings(model, cluster, rollouts, options):
        for moved in (False, True):  # what training keeps, to the host
            kept = 0.0 if moved else side.resident
            there = 2 * side.resident / device.host_bandwidth if moved else 0.0
            for generation in generations(model, cluster, rollouts, options, kept):
                layout = generation.served.parallel
                phases = {
                    "move to the host and back": there,
                    "reshard weights": resharding(side.ways[ACTOR], layout, cluster),
                    "generate": generation.seconds,
                    **{f"score: {role}": seconds for role, seconds in side.scoring.items()},
                    "train": side.seconds,
                }
                phases = {name: seconds for name, seconds in phases.items() if seconds}
                seconds = sum(phases.values())
                if best is None or seconds < best.seconds:
                    while_generating = dict(generation.served.memory)
                    if kept:
                        while_generating["kept for training"] = kept
                    best = Placed(
                        "same devices", phases, seconds, side, generation,
                        {"training": side.memory, "generation": while_generating},
                    )  # fmt: skip
    if best is None:
        raise InfeasibleError(
            f"{model.name}: weights and one answer's keys and values fit nowhere on {cluster.name}"
        )
    return [best]


def _separate(
    model: ModelConfig, cluster: Cluster, rollouts: Rollouts, options: Options
) -> list[Placed]:
    """The best in turn, and the best one iteration behind, over the numbers that may generate."""
    found: dict[str, Placed] = {}
    fault: InfeasibleError | None = None
    for mine, theirs in splits(cluster):
        try:
            side = next(trainings(model, mine, rollouts, options))
        except InfeasibleError as error:
            fault = fault or error  # of the most devices that train
            continue
        ways = generations(model, theirs, rollouts, options, 0.0)
        generation = min(ways, key=lambda x: x.seconds, default=None)
        if generation is None:
            continue
        send = sending(model, generation.served.parallel, cluster, mine.num_devices, options)
        phases = {
            "generate": generation.seconds,
            **{f"score: {role}": seconds for role, seconds in side.scoring.items()},
            "train": side.seconds,
            "send weights": send,
        }
        memory = {"training": side.memory, "generation": generation.served.memory}
        work = side.seconds + sum(side.scoring.values())
        for name, seconds, on_policy in (
            ("separate, in turn", sum(phases.values()), True),
            ("separate, one iteration behind", max(generation.seconds, work) + send, False),
        ):
            if name not in found or seconds < found[name].seconds:
                found[name] = Placed(name, phases, seconds, side, generation, memory, on_policy)
    if not found:
        raise fault or InfeasibleError(
            f"{model.name}: {cluster.name} has no parts of which one generates and one trains"
        )
    return list(found.values())


def splits(cluster: Cluster) -> Iterator[tuple[Cluster, Cluster]]:
    """(devices that train, devices that generate): whole nodes, or parts of the only one."""
    n = cluster.num_devices
    inner = next((x for x in cluster.levels if x.size > 1), cluster.levels[-1])
    unit = n // inner.size
    counts = range(1, inner.size)
    step = max(1, len(counts) // SPLITS)
    for k in counts[::step]:
        try:
            mine, theirs = sub_clusters(cluster, (n - k * unit, k * unit))
        except ClusterError:  # no box
            continue
        yield mine, theirs


# -- the sides -------------------------------------------------------------------------------------


def trainings(
    model: ModelConfig, cluster: Cluster, rollouts: Rollouts, options: Options
) -> Iterator[Training]:
    """The fastest ways to score and train that fit beside each other, at least one.

    InfeasibleError where none does.
    """
    trained, frozen = rollouts.models(model)
    least, any_ = math.inf, False
    for way in best_ways(model, cluster, options)[:WAYS]:
        try:
            side = _training(way, cluster, trained, frozen, rollouts, options)
        except ConfigError:  # the critic does not divide so
            continue
        used = sum(side.memory.values())
        least = min(least, used)
        if used <= way.memory_limit:
            any_ = True
            yield side
    if not any_:
        roles = ", ".join({**trained, **frozen})
        raise InfeasibleError(
            f"{model.name}: {roles} take {least / GB:.4g} GB of a device of {cluster.name} or more "
            f"while training, of {options.memory * cluster.device.hbm_bytes / GB:.4g}: take more "
            "devices"
        )


def _training(
    way: Priced, cluster: Cluster, trained: Mapping[str, ModelConfig],
    frozen: Mapping[str, ModelConfig], rollouts: Rollouts, options: Options,
) -> Training:  # fmt: skip
    ways = {ACTOR: way}
    for role in trained:
        if role not in ways:
            ways[role] = price(
                trained[role], way.parallel, cluster, micro_batch=way.micro_batch,
                recompute=way.recompute, **options.keywords(),
            )  # fmt: skip
    memory: dict[str, float] = {}
    for role, priced in ways.items():
        # the fullest moment is the actor's: the others wait, with what stays between steps
        stays = priced.memory if role == ACTOR else {
            name: nbytes for name, nbytes in priced.memory.items() if name in STATES
        }  # fmt: skip
        memory |= {f"{role}: {name}": nbytes for name, nbytes in stays.items()}
    memory |= {
        f"{role}: parameters": _frozen_bytes(frozen[role], way.parallel, BYTES[way.dtype])
        for role in frozen
    }
    asked = dict(frozen)
    asked |= {role: trained[role] for role in trained if role != ACTOR}
    if rollouts.updates * rollouts.epochs > 1:  # later updates need the first policy's word
        asked[ACTOR] = trained[ACTOR]
    scoring = {
        role: score(
            scored, way.parallel, cluster, batch=rollouts.batch, seq=options.seq,
            micro_batch=way.micro_batch, dtype=options.dtype, stack=options.stack,
            constants=options.constants,
        )
        for role, scored in asked.items()
    }  # fmt: skip
    seconds = rollouts.epochs * rollouts.updates * sum(x.seconds for x in ways.values())
    return Training(cluster, ways, scoring, memory, seconds)


def _frozen_bytes(model: ModelConfig, p: ParallelConfig, nbytes: float) -> float:
    leaves = leaves_of(model, p.tp, p.ep)
    local = max(local_parameters(leaves, model, x, p.pp).all for x in stages_of(model.layers, p.pp))
    return nbytes * local / (p.shards if p.zero == 3 else 1)


def generations(
    model: ModelConfig, cluster: Cluster, rollouts: Rollouts, options: Options, kept: float
) -> Iterator[Generation]:
    """Generation in each tensor-parallel degree that fits beside `kept` bytes, with as many answers
    at a time as their keys and values leave room for."""
    device, n = cluster.device, cluster.num_devices
    dtype = options.dtype or dtype_for(device)
    nbytes = BYTES["bfloat16" if dtype == "float8" else dtype]
    constants = options.constants or constants_for(device, options.stack)
    room = options.memory * device.hbm_bytes - kept
    prompt, seq = rollouts.prompt, rollouts.prompt + rollouts.answer
    for tp in (t for t in range(1, fast_domain(cluster) + 1) if n % t == 0):
        wide = max(tp, model.kv_heads) % min(tp, model.kv_heads) == 0
        if model.heads % tp or model.ffn % tp or not wide:
            continue
        way = ParallelConfig(tp=tp, dp=n // tp, sp=prompt % tp == 0)
        each = -(-rollouts.batch // way.dp)
        for rounds in range(1, each + 1):
            at_a_time = -(-each // rounds)
            used = serving_memory(
                model, way, at_a_time, seq, prompt, nbytes, nbytes, nbytes,
                overhead_bytes(constants.memory_gb, options.stack, device.name),
            )  # fmt: skip
            if sum(used.values()) <= room:
                served = serve(
                    model, way, cluster, batch=at_a_time, prompt=prompt, answer=rollouts.answer,
                    dtype=options.dtype, stack=options.stack, constants=options.constants,
                    memory=options.memory,
                )  # fmt: skip
                yield Generation(served, rounds)
                break


# -- weights on their way --------------------------------------------------------------------------


def resharding(way: Priced, layout: ParallelConfig, cluster: Cluster) -> float:
    """Seconds until devices have the weights that they generate with, from those they train with.

    A device's part of every layer comes from all stages, from the tensor-parallel devices that have
    pieces of it and, with ZeRO-3, from all shards: an all-gather among them, a layer at a time.
    """
    p, model = way.parallel, way.model
    shards = p.shards if p.zero == 3 else 1
    inner = math.gcd(p.tp, layout.tp)
    sizes = {"pp": p.pp, "replica": p.dp * p.cp // shards, "shard": shards, "more": p.tp // inner,
             "tp": inner}  # fmt: skip
    axes = axes_of(cluster, sizes)
    among = [axes[name] for name in ("pp", "shard", "more") if axes[name].size > 1]
    if not among:
        return 0.0
    axis = join_axes(among)
    nbytes = model.parameters / layout.tp * _width(way.dtype)
    once = float(collective_time("all_gather", axis, nbytes / model.layers))
    return model.layers * once / _speed(way.constants, axis)


def sending(
    model: ModelConfig, layout: ParallelConfig, cluster: Cluster, training: int, options: Options
) -> float:
    """Seconds until separate devices have the weights: every port carries its part of them, those
    of the replica that takes them first, or of the devices that send if these are fewer; replicas
    pass them on while they come in."""
    link = link_between(cluster, training - 1, training)
    axis = Axis("send", (Part(Level("send", 2, link), 2),))
    constants = options.constants or constants_for(cluster.device, options.stack)
    dtype = options.dtype or dtype_for(cluster.device)
    nbytes = model.parameters / min(layout.tp, training) * _width(dtype)
    return float(collective_time("collective_permute", axis, nbytes)) / _speed(constants, axis)


def _width(dtype: str) -> float:
    return BYTES["bfloat16" if dtype == "float8" else dtype]


def _speed(constants: Constants, axis: Axis) -> float:
    return {"fabric": constants.fabric, "network": constants.network}[level_of(axis)]
