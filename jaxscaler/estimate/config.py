"""What a transformer is made of: from flags, a named model, or a Hugging Face `config.json`."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from math import gcd
from pathlib import Path
from typing import Any

from jaxscaler.errors import ConfigError

BUCKETS = 32  # of distances that T5 tells apart
FAMILIES = ("gpt", "llama", "moe", "t5")  # modules of `models/`


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: `layers` blocks of attention and an MLP between a table and a head. Of the family
    "t5" a layer is a pair, one of the encoder and one of the decoder.

    hidden: width. heads of `head_size` (0: hidden / heads), `kv_heads` of keys and values (0: as
    many as heads). ffn: width of the MLP (0: 4 * hidden), `gated` ones have three matrices. tied:
    the head is the table. positions: learned ones, `context` of them. experts, chosen: MLPs per
    layer, and how many of them a token goes to; 0 for a dense model. embed_norm: a norm after the
    table, as BLOOM has it: of consequence for memory alone.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    vocab: int = 50304
    context: int = 2048
    gated: bool = False
    tied: bool = False
    qkv_bias: bool = False
    positions: bool = False
    experts: int = 0
    chosen: int = 0
    embed_norm: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"family={self.family!r}: one of {', '.join(FAMILIES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.default == 0 else 1
            if field.type == "int" and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ConfigError(
                    f"{self.name}: {field.name}={value!r}: a whole number, {least} or more"
                )
        if not self.head_size:
            if self.hidden % self.heads:
                raise ConfigError(
                    f"{self.name}: heads={self.heads} do not divide hidden={self.hidden}: change "
                    "one of them, or give head_size"
                )
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.ffn:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.name}: kv_heads={self.kv_heads} do not divide heads={self.heads}"
            )
        if (self.experts > 0) != (self.family == "moe") or self.chosen > self.experts:
            raise ConfigError(
                f"{self.name}: experts={self.experts}, chosen={self.chosen}, "
                f"family={self.family!r}: a mixture has experts, and chooses at most all of them"
            )
        if self.family == "moe" and not self.chosen:
            raise ConfigError(f"{self.name}: chosen=0: how many experts does a token go to?")
        if self.family == "gpt" and (self.kv_heads != self.heads or self.gated):
            raise ConfigError(
                f"{self.name}: family='gpt' has kv_heads=heads and a plain MLP: use family='llama'"
            )
        if self.family == "t5" and self.kv_heads != self.heads:
            raise ConfigError(f"{self.name}: family='t5' has kv_heads=heads")
        if self.family == "gpt" and self.head_size * self.heads != self.hidden:
            raise ConfigError(
                f"{self.name}: head_size={self.head_size} * heads={self.heads} is not "
                f"hidden={self.hidden}, as family='gpt' wants it: use family='llama'"
            )

    # -- sizes that formulas speak of

    @property
    def attentions(self) -> int:
        """Of a layer; a pair's decoder has a second one, to what the encoder made."""
        return 3 if self.family == "t5" else 1

    @property
    def mlps(self) -> int:
        """Of a layer, the experts of one place counted once."""
        return 2 if self.family == "t5" else 1

    @property
    def query_width(self) -> int:
        """heads * head_size."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def matrices(self) -> int:
        """Weight matrices of one MLP."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Of one layer, with biases."""
        h, q, kv = self.hidden, self.query_width, self.kv_width
        weights = h * q + 2 * h * kv + q * h
        if self.family == "gpt":
            return weights + q + 2 * kv + h
        return weights + ((q + 2 * kv) if self.qkv_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Of one MLP (one expert), with biases."""
        weights = self.matrices * self.hidden * self.ffn
        return weights + (self.ffn + self.hidden if self.family == "gpt" else 0)

    @property
    def layer_parameters(self) -> int:
        """Of one layer: attention, MLP or all experts with their router, norms."""
        norms = (self.attentions + self.mlps) * (2 if self.family == "gpt" else 1) * self.hidden
        mlp = self.mlp_parameters
        if self.experts:
            mlp = self.experts * mlp + self.hidden * self.experts
        return self.attentions * self.attention_parameters + self.mlps * mlp + norms

    @property
    def embedding_parameters(self) -> int:
        """Of the table, and of learned positions."""
        return self.hidden * (self.vocab + (self.context if self.positions else 0))

    @property
    def head_parameters(self) -> int:
        """Of the last norms, of biases of positions, and of a head that is not the table."""
        norm = (2 if self.family in ("gpt", "t5") else 1) * self.hidden
        norm += 2 * BUCKETS * self.heads if self.family == "t5" else 0
        return norm + (0 if self.tied else self.hidden * self.vocab)

    @property
    def parameters(self) -> int:
        """All of them."""
        return (
            self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters
        )

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: of the experts only the chosen ones."""
        idle = (self.experts - self.chosen) * self.mlp_parameters if self.experts else 0
        return self.parameters - self.layers * idle

    def workload_options(self, layers: int, kv_heads: int) -> dict[str, Any]:
        """Fields of the `Config` of this family's module in `models/`."""
        common = {
            "layers": layers, "hidden": self.hidden, "heads": self.heads, "vocab": self.vocab,
            "context": self.context, "ffn": self.ffn, "tied": self.tied, "scan": True,
        }  # fmt: skip
        if self.family == "gpt":
            return common | {"positions": self.positions}
        if self.family == "t5":
            return common | {"head_width": self.head_size, "gated": self.gated,
                             "buckets": BUCKETS, "distance": 4 * BUCKETS}  # fmt: skip
        common |= {"kv_heads": kv_heads, "head_width": self.head_size, "qkv_bias": self.qkv_bias}
        if self.family == "moe":
            return common | {"experts": self.experts, "chosen": self.chosen, "routing": "permute",
                             "capacity_factor": 1.0}  # fmt: skip
        return common | {"gated": self.gated}


# -- named models ----------------------------------------------------------------------------------


@cache
def named_models() -> Mapping[str, ModelConfig]:
    """The models of `models.csv`, which names where each is from."""
    text = resources.files("jaxscaler.estimate").joinpath("models.csv").read_text()
    found = {}
    for row in csv.DictReader(text.splitlines()):
        values: dict[str, Any] = {}
        for field in fields(ModelConfig):
            cell = row[field.name]
            values[field.name] = (
                cell
                if field.type == "str"
                else bool(int(cell))
                if field.type == "bool"
                else int(cell)
            )
        found[row["name"]] = ModelConfig(**values)
    return found


def find_model(name: str) -> ModelConfig:
    """The named model; ConfigError with the closest names if there is none."""
    known = named_models()
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"closest: {', '.join(close)}; " if close else ""
        raise ConfigError(
            f"model {name!r} is not known; {hint}known: {', '.join(known)}; or give the path of a "
            "config.json, or its sizes"
        )
    return known[name.lower()]


# -- Hugging Face ----------------------------------------------------------------------------------


def _of(config: Mapping[str, Any], model_type: str, *keys: str, default: Any = None) -> Any:
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    if default is None:
        raise ConfigError(f"config of model_type {model_type!r}: `{keys[0]}` is missing")
    return default


def _llama(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    heads = _of(c, t, "num_attention_heads")
    hidden = _of(c, t, "hidden_size")
    return {
        "family": "llama", "hidden": hidden, "heads": heads,
        "layers": _of(c, t, "num_hidden_layers"),
        "kv_heads": _of(c, t, "num_key_value_heads", default=heads),
        "head_size": _of(c, t, "head_dim", default=0),
        "ffn": _of(c, t, "intermediate_size"), "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "max_position_embeddings", default=4096), "gated": True,
        "tied": _of(c, t, "tie_word_embeddings", default=False),
        "qkv_bias": _of(c, t, "attention_bias", default=False),
    }  # fmt: skip


def _qwen2(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return _llama(c, t) | {"qkv_bias": True}


def _gemma(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return _llama(c, t) | {"tied": _of(c, t, "tie_word_embeddings", default=True)}


def _mixtral(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return _llama(c, t) | {
        "family": "moe", "experts": _of(c, t, "num_local_experts"),
        "chosen": _of(c, t, "num_experts_per_tok"),
    }  # fmt: skip


def _gpt2(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    hidden = _of(c, t, "n_embd")
    return {
        "family": "gpt", "hidden": hidden, "heads": _of(c, t, "n_head"),
        "layers": _of(c, t, "n_layer"), "ffn": _of(c, t, "n_inner", default=4 * hidden),
        "vocab": _of(c, t, "vocab_size"), "context": _of(c, t, "n_positions", default=1024),
        "tied": _of(c, t, "tie_word_embeddings", default=True), "positions": t == "gpt2",
        "qkv_bias": True,
    }  # fmt: skip


def _gptj(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return _gpt2(c, t) | {"tied": _of(c, t, "tie_word_embeddings", default=False)}


def _gpt_neox(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return {
        "family": "gpt", "hidden": _of(c, t, "hidden_size"),
        "heads": _of(c, t, "num_attention_heads"), "layers": _of(c, t, "num_hidden_layers"),
        "ffn": _of(c, t, "intermediate_size"), "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "max_position_embeddings", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=False), "qkv_bias": True,
    }  # fmt: skip


def _gpt_neo(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    hidden = _of(c, t, "hidden_size")
    return {
        "family": "gpt", "hidden": hidden, "heads": _of(c, t, "num_heads"),
        "layers": _of(c, t, "num_layers"),
        "ffn": _of(c, t, "intermediate_size", default=4 * hidden),
        "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "max_position_embeddings", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=True), "positions": True,
        "qkv_bias": True,
    }  # fmt: skip


def _opt(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return {
        "family": "gpt", "hidden": _of(c, t, "hidden_size"),
        "heads": _of(c, t, "num_attention_heads"), "layers": _of(c, t, "num_hidden_layers"),
        "ffn": _of(c, t, "ffn_dim"), "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "max_position_embeddings", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=True), "positions": True,
        "qkv_bias": True,
    }  # fmt: skip


def _bloom(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    return {
        "family": "gpt", "hidden": _of(c, t, "hidden_size", "n_embed"),
        "heads": _of(c, t, "n_head", "num_attention_heads"),
        "layers": _of(c, t, "n_layer", "num_hidden_layers"), "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "seq_length", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=True), "qkv_bias": True,
        "embed_norm": True,
    }  # fmt: skip


def _mpt(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    hidden = _of(c, t, "d_model")
    return {
        "family": "llama", "hidden": hidden, "heads": _of(c, t, "n_heads"),
        "layers": _of(c, t, "n_layers"), "ffn": _of(c, t, "expansion_ratio", default=4) * hidden,
        "vocab": _of(c, t, "vocab_size"), "context": _of(c, t, "max_seq_len", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=True),
    }  # fmt: skip


def _falcon(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    hidden, heads = _of(c, t, "hidden_size"), _of(c, t, "num_attention_heads")
    shared = 1 if c.get("multi_query", True) else heads
    return {
        "family": "llama", "hidden": hidden, "heads": heads,
        "kv_heads": _of(c, t, "num_kv_heads") if c.get("new_decoder_architecture") else shared,
        "layers": _of(c, t, "num_hidden_layers"),
        "ffn": _of(c, t, "ffn_hidden_size", default=4 * hidden),
        "vocab": _of(c, t, "vocab_size"),
        "context": _of(c, t, "max_position_embeddings", default=2048),
        "tied": _of(c, t, "tie_word_embeddings", default=True),
    }  # fmt: skip


def _t5(c: Mapping[str, Any], t: str) -> dict[str, Any]:
    layers = _of(c, t, "num_layers")
    if _of(c, t, "num_decoder_layers", default=layers) != layers:
        raise ConfigError(
            f"config of model_type {t!r}: num_layers={layers} of the encoder, but "
            f"num_decoder_layers={c['num_decoder_layers']}: equal stacks are priced"
        )
    return {
        "family": "t5", "hidden": _of(c, t, "d_model"), "heads": _of(c, t, "num_heads"),
        "head_size": _of(c, t, "d_kv"), "layers": layers, "ffn": _of(c, t, "d_ff"),
        "vocab": _of(c, t, "vocab_size"), "context": _of(c, t, "n_positions", default=512),
        "gated": "gated" in _of(c, t, "feed_forward_proj", default="relu"),
        "tied": _of(c, t, "tie_word_embeddings", default=True),
    }  # fmt: skip


READERS: Mapping[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "bloom": _bloom, "falcon": _falcon, "gemma": _gemma, "gpt2": _gpt2, "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox, "gptj": _gptj, "llama": _llama, "mistral": _llama,
    "mixtral": _mixtral, "mpt": _mpt, "mt5": _t5, "opt": _opt, "phi3": _llama, "qwen2": _qwen2,
    "qwen3": _llama, "t5": _t5,
}  # fmt: skip


def from_hugging_face(config: str | Path | Mapping[str, Any], name: str = "") -> ModelConfig:
    """The model of a `config.json`: its path, its folder, or its contents.

    ConfigError for a model type that is not in `READERS`, and for fields that are missing.
    """
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: no JSON: {error}") from error
        name = name or path.parent.name
    else:
        data = config
    if not isinstance(data, Mapping):
        raise ConfigError("a config.json is an object with the field `model_type`")
    kind = str(data.get("model_type"))
    if kind not in READERS:
        raise ConfigError(f"model_type {kind!r} is not known; known: {', '.join(READERS)}")
    return ModelConfig(
        name=name or str(data.get("_name_or_path") or kind), **READERS[kind](data, kind)
    )


def model_of(given: str | Path | Mapping[str, Any] | ModelConfig) -> ModelConfig:
    """A model as it may be given: itself, its name, a path of a `config.json`, its contents."""
    if isinstance(given, ModelConfig):
        return given
    if isinstance(given, Mapping):
        return from_hugging_face(given)
    if isinstance(given, Path) or str(given).endswith(".json") or Path(given).is_dir():
        return from_hugging_face(given)
    return find_model(str(given))


def padded_vocab(vocab: int, parts: int) -> int:
    """The vocabulary as it is split in `parts`: as it is if they divide it, else padded to rows of
    128 each (Megatron-LM's `make-vocab-size-divisible-by`)."""
    if vocab % parts == 0:
        return vocab
    unit = 128 * parts // gcd(128, parts) if 128 % parts else 128 * parts
    return -(-vocab // unit) * unit
