"""Floating-point work: exact by component in closed form, and conventions by name.

A product of [m, k] and [k, n] counts 2 m k n. The backward pass is twice the forward pass. Looking
up a table counts nothing, the head does. Norms, activations and softmax are left out, as published
figures leave them out; the traced graph (`body.py`) counts them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxscaler.errors import ConfigError
from jaxscaler.estimate.config import ModelConfig

UNKNOWNS = ("parameters", "tokens", "seconds", "devices", "tflops")


@dataclass(frozen=True)
class Work:
    """FLOPs by component."""

    attention: float  # products with weights of q, k, v and out
    scores: float  # q k^T and its product with v
    mlp: float
    router: float
    head: float
    adapters: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def times(self, factor: float) -> Work:
        return Work(**{name: factor * x for name, x in vars(self).items()})


def forward(model: ModelConfig, batch: int, seq: int, causal: bool = False) -> Work:
    """Of a forward pass over `batch` samples of `seq` tokens; `causal`: scores counted in half.

    By layer: 2 T h (2 q + 2 kv) for q of heads * head_size and kv of kv_heads * head_size,
    4 T s q of scores, 2 T n h f of an MLP of n matrices (times the chosen experts); 2 T h V of the
    head. Of a pair of T5, which reads and writes `seq` tokens each, three and two of them; one of
    the three is causal. Scaling book, "Transformer math"; PaLM, appendix B.
    """
    tokens, m = float(batch) * seq, model
    scores = 4 * tokens * seq * m.query_width * (m.attentions - (0.5 if causal else 0.0))
    mlp = m.mlps * 2 * tokens * m.matrices * m.hidden * m.ffn * (m.chosen or 1)
    weights = m.attentions * m.hidden * (2 * m.query_width + 2 * m.kv_width)
    return Work(
        attention=m.layers * 2 * tokens * weights,
        scores=m.layers * scores,
        mlp=m.layers * mlp,
        router=m.layers * 2 * tokens * m.hidden * m.experts,
        head=2 * tokens * m.hidden * m.vocab,
    )


def training(model: ModelConfig, batch: int, seq: int, causal: bool = False) -> Work:
    """Of forward and backward pass, nothing computed again."""
    return forward(model, batch, seq, causal).times(3.0)


def fine_tuning(model: ModelConfig, batch: int, seq: int, adapters: float) -> Work:
    """Of training `adapters` numbers beside a frozen model: no gradients of frozen weights, which
    are half of a backward pass but for the scores."""
    once = forward(model, batch, seq)
    weights = (once.attention, once.mlp, once.router, once.head)
    attention, mlp, router, head = (2.0 * x for x in weights)
    learned = 6.0 * adapters * batch * seq
    return Work(attention, 3.0 * once.scores, mlp, router, head, learned)


def again(model: ModelConfig, batch: int, seq: int, recompute: str, causal: bool = False) -> float:
    """What recomputation adds: "full" a forward pass of layers, "selective" the scores."""
    work = forward(model, batch, seq, causal)
    return {
        "none": 0.0,
        "selective": work.scores,
        "full": work.total - work.head,
    }[recompute]


def megatron(model: ModelConfig, batch: int, seq: int, recompute: bool = True) -> float:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), or without recomputation 72 B s l h^2 (1 + s / 6h +
    V / 12 l h), for kv_heads = heads and an MLP of 4 * hidden.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", equation 3.
    """
    b, s, n, h, v = batch, seq, model.layers, model.hidden, model.vocab
    if recompute:
        return 96.0 * b * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    return 72.0 * b * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))


def palm_flops_per_token(model: ModelConfig, seq: int, parameters: float | None = None) -> float:
    """6 P + 12 L a d s: Chowdhery et al. 2022, appendix B."""
    count = model.active_parameters if parameters is None else parameters
    return 6.0 * count + 12.0 * model.layers * model.query_width * seq


def solve_budget(
    *,
    parameters: float | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
    devices: float | None = None,
    tflops: float | None = None,
) -> dict[str, float]:
    """C = 6 P D = tau T, with tau of `devices` at `tflops` each, solved for the one not given.

    Returns all five and "flops" C. ConfigError unless exactly one is missing and all are above 0.
    """
    given = dict(zip(UNKNOWNS, (parameters, tokens, seconds, devices, tflops)))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        raise ConfigError(
            f"give four of {', '.join(UNKNOWNS)}, and the fifth is found; missing: "
            f"{', '.join(missing) or 'none'}"
        )
    known = {name: float(value) for name, value in given.items() if value is not None}
    for name, value in known.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}={value!r}: a number above 0")
    (unknown,) = missing
    if unknown in ("parameters", "tokens"):
        flops = known["seconds"] * known["devices"] * known["tflops"] * 1e12
        found = flops / 6 / known["tokens" if unknown == "parameters" else "parameters"]
    else:
        flops = 6 * known["parameters"] * known["tokens"]
        rest = 1.0
        for name, scale in (("seconds", 1.0), ("devices", 1.0), ("tflops", 1e12)):
            rest *= known.get(name, 1.0) * (scale if name in known else 1.0)
        found = flops / rest / (1e12 if unknown == "tflops" else 1.0)
    return known | {unknown: found, "flops": flops}
