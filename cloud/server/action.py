"""Observations into tokens, and tokens into actions.

An action value is one of 256 tokens, each the middle of an equal part of the
value's range, after RT-2 (Brohan et al. 2023, section 3.2) and OpenVLA (Kim et
al. 2024, section 3.2). A chunk is its steps one after the other, each with its
values in order: steps × values tokens, always.

A model has tokens of its own for that (<act_000>, …). Where its vocabulary has
none, the last 256 tokens that stand for text are taken, the very last for the
lowest bin, as OpenVLA does with Llama's (section 3.2: the tokens used least).
"""

from collections.abc import Sequence

from cloud.engine.tokenizer import Tokenizer, action_token_ids
from cloud.server.prompt import observation_text
from cloud.server.refused import CallRefused
from headway.config import ActionSettings, EmbodimentSettings
from headway.errors import ConfigError
from headway.v1 import robot_pb2

__all__ = ["MAX_TEXT_CHARACTERS", "NUM_BINS", "ActionCodec", "Embodiment"]

NUM_BINS = 256
# Ten milliseconds of tokenising, in which nobody else is answered.
MAX_TEXT_CHARACTERS = 16_384


class Embodiment:
    """A kind of robot: the names of an action's values, and what each bin means.

    Args:
        settings: names and ranges.
        num_steps: steps of a chunk.
    """

    __slots__ = ("_bins", "name", "num_tokens", "num_values", "values")

    def __init__(self, settings: EmbodimentSettings, num_steps: int) -> None:
        self.name = settings.name
        self.values = settings.values
        self.num_values = len(settings.values)
        self.num_tokens = num_steps * self.num_values
        self._bins = tuple(
            tuple(low + (high - low) * (bin_ + 0.5) / NUM_BINS for bin_ in range(NUM_BINS))
            for low, high in zip(settings.low, settings.high, strict=True)
        )

    def step(self, bins: Sequence[int]) -> list[float]:
        """The values that `bins`, one a value, stand for; SI units."""
        return [table[bin_] for table, bin_ in zip(self._bins, bins, strict=True)]


class ActionCodec:
    """Speaks a model's language for robots.

    Args:
        tokenizer: of the model.
        settings: chunk size and embodiments.
        model: name of the model, for errors and answers.

    Attributes:
        has_action_tokens: whether the vocabulary has tokens for actions alone. A
            model without them was not trained to act, unless an adapter was.

    Raises:
        ConfigError: the vocabulary has too few tokens.
    """

    def __init__(self, tokenizer: Tokenizer, settings: ActionSettings, model: str) -> None:
        own_ids = action_token_ids(tokenizer)
        ids = own_ids or tokenizer.last_text_ids(NUM_BINS)
        if len(ids) != NUM_BINS:
            what = "action tokens (<act_000>, …)" if own_ids else "tokens to use for actions"
            raise ConfigError(
                f"'{model}' has {len(ids)} {what}; expected a model with {NUM_BINS}",
                source="tokenizer.json",
            )
        self.has_action_tokens = bool(own_ids)
        self._tokenizer = tokenizer
        self._bin_of_token = {token: bin_ for bin_, token in enumerate(ids)}
        self._step_period_ns = round(settings.step_period_s * 1_000_000_000)
        self.model = model
        self.allowed_tokens = ids
        self.embodiments = {
            one.name: Embodiment(one, settings.chunk_steps) for one in settings.embodiments
        }

    def prompt(self, embodiment: Embodiment, observation: robot_pb2.Observation) -> tuple[int, ...]:
        """The tokens of what the model is to read.

        Raises:
            CallRefused: INVALID, it is more than a robot's model is meant to read.
        """
        text = observation_text(embodiment.name, observation)
        if len(text) > MAX_TEXT_CHARACTERS:
            raise CallRefused.invalid(
                "observation",
                f"task and state read as {len(text):,} characters; "
                f"expected at most {MAX_TEXT_CHARACTERS:,}",
            )
        return self._tokenizer.encode(text)

    def fill(
        self, chunk: robot_pb2.ActionChunk, embodiment: Embodiment, tokens: Sequence[int]
    ) -> None:
        """Writes names, steps, period and model into `chunk`.

        Raises:
            ValueError: `tokens` are not a whole chunk of action tokens.
        """
        if len(tokens) != embodiment.num_tokens:
            raise ValueError(f"a chunk has {embodiment.num_tokens} tokens, got {len(tokens)}")
        try:
            bins = [self._bin_of_token[token] for token in tokens]
        except KeyError as error:
            raise ValueError(f"token {error.args[0]} is no action token") from None
        width = embodiment.num_values
        add_step = chunk.steps.add
        for start in range(0, len(bins), width):
            add_step(values=embodiment.step(bins[start : start + width]))
        chunk.names.extend(embodiment.values)
        chunk.model = self.model
        period = chunk.step_period
        period.seconds, period.nanos = divmod(self._step_period_ns, 1_000_000_000)
