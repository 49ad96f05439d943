"""What a Hugging Face `config.json` says about a Llama-family model.

Needs neither torch nor the weights, so that a server can read it cheaply.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud.engine.errors import CheckpointError

__all__ = ["ModelConfig", "RopeScaling", "load_model_config"]

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder with RMSNorm, RoPE, GQA and SwiGLU."""

    name: str
    architecture: str
    vocabulary_tokens: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_context_tokens: int
    has_tied_head: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    # Tokens after which the model has nothing more to say.
    eos_tokens: tuple[int, ...]
    # Random weights: good for trying the system, not for answers.
    is_untrained: bool

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        """Bytes of KV memory per token, at `value_bytes` per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes


def load_model_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json.

    Raises:
        CheckpointError: missing, not JSON, or a model that this engine cannot run.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(
            folder, "no such folder; expected a Hugging Face checkpoint with config.json"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(path, f"is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(path, "expected a JSON object")
    return _Reader(path, raw).model_config()


class _Reader:
    """Takes values out of the JSON and says which one is wrong."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self._path = path
        self._raw = raw

    def model_config(self) -> ModelConfig:
        architecture = self._architecture()
        heads = self._count("num_attention_heads")
        hidden = self._count("hidden_size")
        kv_heads = self._count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._error(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = self._count("head_dim", hidden // heads)
        if head_dim % 2:
            raise self._error(f"head_dim must be even for RoPE, got {head_dim}")
        theta, scaling = self._rope()
        attention_bias = bool(self._raw.get("attention_bias", False))
        return ModelConfig(
            name=str(self._raw.get("_name_or_path") or self._path.parent.resolve().name),
            architecture=architecture,
            vocabulary_tokens=self._count("vocab_size"),
            hidden=hidden,
            layers=self._count("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self._count("intermediate_size"),
            norm_eps=self._positive("rms_norm_eps", self._raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_context_tokens=self._count("max_position_embeddings"),
            has_tied_head=bool(self._raw.get("tie_word_embeddings", False)),
            has_qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            # Qwen2 has a bias on q, k and v alone, whatever its config says.
            has_output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            has_qk_norm=architecture == "Qwen3ForCausalLM",
            eos_tokens=self._eos_tokens(),
            is_untrained=bool(self._raw.get("headway_untrained", False)),
        )

    def _architecture(self) -> str:
        architectures = self._raw.get("architectures") or []
        for name in architectures:
            if name in _ARCHITECTURES:
                break
        else:
            raise self._error(
                f"architectures is {architectures}; expected one of {', '.join(_ARCHITECTURES)}"
            )
        for key, only in (
            ("hidden_act", "silu"),
            ("mlp_bias", False),
            ("use_sliding_window", False),
        ):
            value = self._raw.get(key, only)
            if value != only:
                raise self._error(f"{key} is {value!r}; this engine runs {only!r} only")
        return str(name)

    def _rope(self) -> tuple[float, RopeScaling | None]:
        """Both spellings: rope_theta beside rope_scaling, or rope_parameters."""
        scaling = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self._error(f"rope_scaling must be an object, got {scaling!r}")
        theta = self._positive(
            "rope_theta", scaling.get("rope_theta", self._raw.get("rope_theta") or 10_000.0)
        )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self._error(f"RoPE scaling {kind!r}; this engine knows 'default' and 'llama3'")
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        for key in keys:
            if key not in scaling:
                raise self._error(f"RoPE scaling 'llama3' needs {key}")
        factor, low, high, original = (self._positive(key, scaling[key]) for key in keys)
        return theta, RopeScaling(factor, low, high, int(original))

    def _eos_tokens(self) -> tuple[int, ...]:
        """Of generation_config.json where there is one, else of config.json."""
        value = self._raw.get("eos_token_id")
        try:
            generation = json.loads(
                (self._path.parent / "generation_config.json").read_text(encoding="utf-8")
            )
            value = generation.get("eos_token_id", value)
        except (OSError, ValueError, AttributeError):
            pass  # The file is optional, and only a refinement.
        if value is None:
            return ()
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) for token in tokens):
            raise self._error(f"eos_token_id must be a token id or a list of them, got {value!r}")
        return tuple(tokens)

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{key} must be a whole number of at least 1, got {value!r}")
        return value

    def _positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._error(f"{key} must be a number above 0, got {value!r}")
        return float(value)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self._path, problem)
