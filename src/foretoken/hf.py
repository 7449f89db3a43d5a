"""transformers' own entry point: model.generate(..., custom_generate=foretoken.custom_generate, draft_model=...)."""

from typing import Any

import torch
from torch import Tensor

from foretoken.build import load
from foretoken.core.errors import ForetokenError
from foretoken.core.sampling import Sampling
from foretoken.core.sequence import Sequence
from foretoken.decode import Decoder
from foretoken.models.load import HFModel, generation_output


def custom_generate(
    model: HFModel,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    draft_model: HFModel | str | None = None,
    tree: str = "chain:4",
    verifier: str | None = None,
    law: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode for `model.generate`, which hands over its own processors (temperature and truncation included), stopping
    criteria and configuration; returns what `generate` returns, [b, t] ids padded on the right.

    draft_model: a transformers model with the same vocabulary, a folder, or "ngram". tree, verifier, law: as in
    `foretoken.load`. Prompts may be left-padded with an attention mask. Seeds come from torch's global generator, as
    everywhere in transformers. Beam search and other non-sampling modes are refused.
    """
    if generation_config.num_beams != 1 or generation_config.num_return_sequences not in (None, 1):
        raise ForetokenError("foretoken decodes one sequence a prompt: use num_beams=1 and num_return_sequences=1.")
    engine = load(model, drafter=draft_model, tree=tree, verifier=verifier, law=law, device=model.device)
    sampling = Sampling(
        temperature=1.0 if generation_config.do_sample else 0.0, processors=tuple(logits_processor or ())
    )
    mask = model_kwargs.get("attention_mask")
    prompts = [ids[mask[i].bool()].tolist() if mask is not None else ids.tolist() for i, ids in enumerate(input_ids)]
    width = input_ids.shape[1]
    max_new = generation_config.max_length - width
    seeds = torch.randint(2**62, (len(prompts),)).tolist()
    slots = max(map(len, prompts)) + max_new + engine.drafter.max_nodes
    decoder = Decoder(engine.target, engine.drafter, engine.verifier, len(prompts), slots)
    sequences = [
        Sequence(ids, sampling, torch.Generator().manual_seed(seed), max_new, engine.eos_ids)
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    for sequence in sequences:
        decoder.join(sequence)
    while decoder.sequences:
        for sequence, step in decoder.step():
            cut = _first_stop(sequence, len(step.tokens), stopping_criteria)
            if cut is not None:
                del sequence.ids[cut:]
                if not sequence.finished:
                    decoder.leave(sequence)
    pad = generation_config.pad_token_id
    pad = next(iter(engine.eos_ids), 0) if pad is None else pad
    rows = [
        torch.cat([input_ids[i].cpu(), torch.tensor(s.ids[s.num_prompt :], dtype=torch.long)])
        for i, s in enumerate(sequences)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad).to(input_ids.device)
    return generation_output(ids, bool(generation_config.return_dict_in_generate))


def _first_stop(sequence: Sequence, num_tokens: int, criteria: Any) -> int | None:
    """The length at which the criteria stop the text, looking at each of the step's tokens in turn."""
    for length in range(len(sequence.ids) - num_tokens + 1, len(sequence.ids) + 1) if criteria else ():
        if bool(criteria(torch.tensor([sequence.ids[:length]]), None).all()):
            return length
    return None
