"""Decoding from transformers: model.generate(..., custom_generate=foretoken.custom_generate, draft_model=...)."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foretoken.build import load
from foretoken.core.default_device import on_cpu_by_default
from foretoken.core.errors import ContextError, ForetokenError
from foretoken.core.random import seeded
from foretoken.core.sampling import Sampling, check_processors
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder
from foretoken.models.grammar import check_grammars
from foretoken.models.hf_model import CACHE_NAMES, HFModel
from foretoken.models.load import generation_output

OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@on_cpu_by_default
def custom_generate(
    model: HFModel,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    draft_model: HFModel | str | None = None,
    tree: str | None = None,
    method: str = "fixed",
    verifier: str | None = None,
    law: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode for `model.generate`, as its argument `custom_generate`; returns what `generate` returns.

    That is the prompts with their continuations, ids [b, t] padded on the right. Seeds come from torch's global
    generator, as everywhere in transformers.

    model: the target. `generate` itself passes it and the other arguments up to generation_config.
    input_ids: the prompts [b, t]; they may be padded on the left, with an attention mask.
    logits_processor: all processors of the call, temperature and truncation included.
    stopping_criteria: they are checked after each token, for each text in turn.
    generation_config: the settings of the call: its length, sampling on or off, ids of padding and of the end.
    draft_model: a transformers model with the same vocabulary, or whatever `foretoken.load` takes as drafter, such as
        a folder or "ngram"; None for plain decoding.
    tree, method, verifier, law: as in `foretoken.load`.
    model_kwargs: only `attention_mask` is used [b, t].

    Raises ForetokenError for beams, several sequences per prompt, prompt_lookup_num_tokens, penalty_alpha,
    dola_layers, force_words_ids, inputs_embeds, images and sound, token types, position_ids that do not count the
    tokens, a cache that holds some already, prompt and prefix tuning, scores and other extra outputs, and processors
    that keep state. transformers does not pass a `streamer` on: use `foretoken.load(...).stream`. Neither does it pass
    the `tokenizer` on, and for `stop_strings` and `token_healing` it raises an error before this function is called:
    pass stopping_criteria=[StopStringCriteria(tokenizer, ["..."])] of transformers instead of the first.
    """
    _refuse(generation_config, logits_processor or ())
    if model_kwargs.get("inputs_embeds") is not None:
        raise ForetokenError("Foretoken decodes from token ids: leave inputs_embeds out.")
    others = [name for name, value in model_kwargs.items() if name != "attention_mask" and _is_encoded(value)]
    if others:
        raise ForetokenError(
            f"Foretoken reads token ids alone, and generate was given {', '.join(others)}: leave images and sound out, "
            "or leave custom_generate out."
        )
    mask = model_kwargs.get("attention_mask")
    kept = input_ids.ne(-1) if mask is None else mask.bool()
    others = _unread(model, kept, model_kwargs)
    if others:
        raise ForetokenError(
            f"Foretoken reads the ids of the prompt, and generate was given {', '.join(others)}: leave that out, or "
            "leave custom_generate out."
        )
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        raise ForetokenError(
            f"The inputs of {type(model).__name__} are prepared by another object, as with peft's prompt and prefix "
            "tuning, and Foretoken would leave that out: use LoRA, or leave custom_generate out."
        )
    engine = load(model, drafter=draft_model, tree=tree, method=method, verifier=verifier, law=law)
    # A criterion of the caller takes the place of generate's own one of its class.
    own = {type(each).__name__: each for each in stopping_criteria or ()}
    max_new = own.get("MaxLengthCriteria", generation_config).max_length - input_ids.shape[1]
    eos = frozenset(_ids(own.get("EosTokenCriteria", generation_config).eos_token_id))
    seeds = torch.randint(2**62, (len(input_ids),)).tolist()
    limit = engine.target.lm.limit or 2**62
    stops: dict[Sequence, Callable[[list[int]], bool]] = {}  # whether the criteria stop a row's text with these ids
    for row, (ids, keep, seed) in enumerate(zip(input_ids.cpu(), kept.cpu(), seeds, strict=True)):
        if not keep.any():
            raise ForetokenError(f"Row {row} of input_ids has no token that its attention mask keeps: give one.")
        if keep.sum() >= limit:
            raise ContextError.of(f"Row {row} of input_ids", int(keep.sum()), engine.target.name, limit)
        padding = ids[~keep]
        sampling = Sampling(
            temperature=1.0 if generation_config.do_sample else 0.0,
            processors=tuple(_of_row(processor, row, len(input_ids), padding) for processor in logits_processor or ()),
        )
        stop = partial(_stopped, stopping_criteria, row, len(input_ids), padding)
        new = min(max_new, limit - int(keep.sum()))
        stops[Sequence(ids[keep].tolist(), sampling, seeded(seed), new, eos)] = stop
    slots = max(s.num_prompt + s.num_left for s in stops) + engine.drafter.max_nodes
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, len(stops), slots)
    for sequence in stops:
        decoder.join(sequence)
    _decode(decoder, stops, logits_processor or (), waits=not eos)
    if any(len(s.ids) == limit and s.num_new < max_new and s.ids[-1] not in eos for s in stops):
        warnings.warn(f"A text ends where the context of {engine.target.name} does, at {limit} tokens.", stacklevel=2)
    pad = next(iter(_ids(generation_config.pad_token_id) + _ids(generation_config.eos_token_id)), 0)
    rows = [
        torch.cat([input_ids[i].cpu(), torch.tensor(s.ids[s.num_prompt :], dtype=torch.long)])
        for i, s in enumerate(stops)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad).to(input_ids.device)
    return generation_output(ids, bool(generation_config.return_dict_in_generate))


def _refuse(config: Any, processors: Any) -> None:
    if config.num_beams not in (None, 1) or config.num_return_sequences not in (None, 1):
        raise ForetokenError("Foretoken decodes one sequence per prompt: use num_beams=1 and num_return_sequences=1.")
    if config.prompt_lookup_num_tokens:
        raise ForetokenError("prompt_lookup_num_tokens is not used here: leave it out, and give draft_model='ngram'.")
    for name in ("penalty_alpha", "dola_layers", "force_words_ids", "constraints"):
        if getattr(config, name, None):
            raise ForetokenError(f"Foretoken does not decode by {name}: leave it out.")
    for name in OUTPUTS:
        if getattr(config, name, None):
            raise ForetokenError(f"Foretoken returns ids only: leave {name} off.")
    check_processors(processors)


def _decode(decoder: Decoder, stops: dict[Sequence, Callable[[list[int]], bool]], processors: Any, waits: bool) -> None:
    """Decode the texts that have joined until all are finished or stopped, and cut them where they stop.

    decoder: it holds the texts.
    stops: per text, whether the criteria stop it with these ids.
    processors: those of the call.
    waits: whether a text that is stopped goes on until all are, as in `generate` where no token ends a text.
    """
    ends: dict[Sequence, int] = {}  # the number of new tokens at which a text is stopped
    while decoder.sequences:
        steps = decoder.step()
        check_grammars(processors)
        for sequence, step in steps:
            for length in range(len(sequence.ids) - len(step.tokens) + 1, len(sequence.ids) + 1):
                if sequence not in ends and stops[sequence](sequence.ids[:length]):
                    ends[sequence] = length - sequence.num_prompt
        last = max(ends.values()) if len(ends) == len(stops) else None
        for sequence, _ in steps:
            end = last if waits else ends.get(sequence)
            if end is not None and sequence.num_new >= end:
                del sequence.ids[sequence.num_prompt + end :]
                if not sequence.finished:
                    decoder.leave(sequence)


def _unread(model: HFModel, kept: Tensor, inputs: Any) -> list[str]:
    """Return the names of a model's inputs besides its ids that would change its logits, and that are not read here.

    kept: which ids of the prompts are no padding [b, t].
    inputs: name -> input. Zeros among them say that all is text, where the model reads more than that.
    """
    found = [name for name in CACHE_NAMES if inputs.get(name) is not None and inputs[name].get_seq_length() > 0]
    positions = inputs.get("position_ids")
    counted = kept.long().cumsum(-1) - 1
    if positions is not None and not found:
        own = positions.shape[-1] != kept.shape[1] or bool((positions != counted)[..., kept].any())
        found += ["position_ids"] if own else []
    text_only = model.config.get_text_config() is model.config
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name not in ("attention_mask", "position_ids") and (text_only or value.any()):
            found.append(name)
    return found


def _is_encoded(value: Any) -> bool:
    """Whether a `value` among the inputs of a model stands for images or sound: numbers, or outputs of encoders."""
    return bool(value) if isinstance(value, dict) else isinstance(value, Tensor) and value.is_floating_point()


def _of_row(
    processor: Callable[..., Tensor], row: int, batch: int, padding: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the processor as `generate` would call it for one row: on ids with the row's padding, in a batch.

    row, batch: the row's index, and the number of rows. padding: the row's padding ids on the left [n].
    """

    def call(ids: Tensor, scores: Tensor) -> Tensor:
        ids = torch.cat([padding[None].to(ids.device), ids], 1)
        return processor(ids.expand(batch, -1), scores.expand(batch, -1).clone())[row : row + 1]

    return call


def _stopped(criteria: Any, row: int, batch: int, padding: Tensor, ids: list[int]) -> bool:
    """Whether criteria stop the text of a row, asked as `generate` would ask; row, batch, padding: as in `_of_row`."""
    return bool(criteria and criteria(torch.cat([padding, torch.tensor(ids)]).expand(batch, -1), None)[row])


def _ids(value: Any) -> list[int]:
    """Return configured ids as a list; they may be a number, a list, a tensor or None."""
    if value is None:
        return []
    return [int(x) for x in torch.as_tensor(value).flatten()]
