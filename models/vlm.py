"""A vision-language model: a frozen encoder of images, a projector, and a Llama, in series.

What the encoder makes of an image is projected into tokens that stand before those of the text.
The encoder is not trained: it gets no gradient, and is not in the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from models import clip, llama
from models.stack import stacked
from models.workload import (
    Workload,
    at_least_f32,
    configure,
    cross_entropy,
    make_workload,
    token_batch,
)

L14 = clip.Tower(23, 1024, 16)


@dataclass(frozen=True)
class Config(llama.Config):
    """A Llama that sees square images by the patches of a CLIP's tower.

    `context` tokens of text follow the (image / patch) ** 2 of the image.
    """

    vision: clip.Tower = L14
    patch: int = 14
    image: int = 336

    def __post_init__(self) -> None:
        super().__post_init__()
        clip.check_patches(self.image, self.patch)


# Liu et al. 2024, "Improved Baselines with Visual Instruction Tuning" (LLaVA-1.5): the language
# models are Llama 2's (Touvron et al. 2023, table 1), with 64 rows more in the vocabulary; of the
# 24 layers of CLIP's L/14 at 336 the last is not used.
llava = partial(Config, context=1472, vocab=32064, theta=10000.0)
SIZES = {
    "tiny": Config(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, context=12, vocab=64,
                   vision=clip.Tower(2, 16, 2), patch=4, image=8),
    "7b": llava(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008),
    "13b": llava(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824),
}  # fmt: skip


class VLM(nn.Module):
    """Images [batch, height, width, channels] and texts [batch, seq] -> logits [batch, seq, vocab]
    of the texts."""

    config: Config

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        c = self.config
        wide = at_least_f32(c.dtype)
        dense: Any = partial(
            nn.Dense, c.hidden, dtype=c.dtype, param_dtype=wide, kernel_init=llama.INIT
        )
        seen = clip.Vision(c.vision, c.patch, c.dtype, c.scan, name="vision")(images)[:, 1:]
        seen = dense(name="project_2")(nn.gelu(dense(name="project_1")(seen)))
        embed: Any = partial(nn.Embed, dtype=c.dtype, param_dtype=wide, embedding_init=llama.INIT)
        table = embed(c.vocab, c.hidden, name="embed")
        x = jnp.concatenate([seen, table(tokens)], axis=1)
        angles = llama.rotary_angles(x.shape[1], c.head_size, c.theta, wide)
        layers = stacked(llama.Block, c, layers=c.layers, name="layers", scan=c.scan, remat=c.remat)
        x = llama.norm_of(c)(name="norm")(layers(x, angles)[:, seen.shape[1] :])
        return table.attend(x) if c.tied else llama.dense_of(c)(c.vocab, name="head")(x)


def workload(
    size: str = "tiny",
    batch: int = 8,
    seq: int | None = None,
    dtype: str = "bfloat16",
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> Workload:
    """Training of all but the encoder of a size in `SIZES`; `overrides` are fields of `Config`.

    `seq` tokens of text, the size's context unless given, follow the image.
    """
    config = configure(SIZES, size, dtype, **overrides)
    texts = token_batch(batch, config.context if seq is None else seq)
    images = jax.ShapeDtypeStruct((batch, config.image, config.image, 3), config.dtype)
    return make_workload(
        f"vlm-{size}",
        VLM(config),
        cross_entropy,
        {"inputs": images, "texts": texts["inputs"], "targets": texts["targets"]},
        vocab=config.vocab,
        frozen=("vision",),
        tx=tx,
    )
