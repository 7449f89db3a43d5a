"""Read the tensors of GGUF files of known architectures as weights under transformers' names, some rows at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from foretoken.core.errors import ForetokenError
from foretoken.gguf.reader import Reader

CHUNK = 1 << 22  # weights dequantised at once: 16 MiB of float32, and a few times as much inside the library
# Tensors that are no weights, but what rotary frequencies are divided by: config.py reads them.
FREQUENCIES, LONG, SHORT = OF_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FUSED = "attn_qkv"  # queries, keys and values in one matrix, as some files have them in every architecture
EMBEDDING, HEAD, ROUTER = "model.embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight"
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",  # LFM2's last norm
    "output": "lm_head",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Those of gate and up are one tensor in transformers; the router and the experts stand in the places of the matrices.
GATES, UPS, GATES_AND_UPS = "ffn_gate_exps", "ffn_up_exps", "mlp.experts.gate_up_proj"
_EXPERTS = {"ffn_gate_inp": "mlp.gate", GATES: GATES_AND_UPS, "ffn_down_exps": "mlp.experts.down_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FILTERS = "shortconv.conv"  # [d, taps] in the file, [d, 1, taps] in transformers


@dataclass(frozen=True)
class Architecture:
    """How one architecture of a GGUF file differs from the transformers model of the same weights.

    model_type, class_name: transformers' names of the configuration and of the causal language model.
    layer: the modules inside one layer: name in the GGUF file -> name in transformers.
    interleaved: whether the file stores the rows of a query or key head pair by pair (0, h, 1, h + 1, ... of a head
        with 2h rows), since llama.cpp rotates neighbouring rows; transformers rotates row i with row h + i.
    norm_offset: what was added to the norm weights in the file; transformers adds it when the model runs.
    """

    model_type: str
    class_name: str
    layer: dict[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, interleaved=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _LAYER, interleaved=True),
    "granite": Architecture("granite", "GraniteForCausalLM", _LAYER, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _HEAD_NORMS),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _LAYER | _HEAD_NORMS | _EXPERTS),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        {"post_attention_norm" if own == "ffn_norm" else own: name for own, name in _LAYER.items()},
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LAYER, norm_offset=1.0),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _LAYER
        | _HEAD_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _LAYER
        | {
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "shortconv.in_proj": "conv.in_proj",
            FILTERS: "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
        },
    ),
}


def architecture_of(reader: Reader) -> Architecture:
    """Return the architecture that the file in `reader` names. Raises ForetokenError if it is none of ARCHITECTURES."""
    name = reader.metadata("general.architecture")
    if name not in ARCHITECTURES:
        raise ForetokenError(
            f"The GGUF file's architecture is {name}, which is not supported: it must be one of "
            f"{', '.join(ARCHITECTURES)}."
            if name is not None
            else "The GGUF file names no architecture: it holds no language model."
        )
    return ARCHITECTURES[name]


@dataclass(frozen=True)
class Weight:
    """One tensor of the file.

    name: its name in transformers.
    shape: the shape of the torch tensor.
    stored: the library's descriptions of it, each with a view of its bytes. There are two where it is one of experts
        [experts, out, in] and has, for each expert, its outputs in the first and then those in the second.
    rows: per row of the torch tensor (or element of a vector) its place in the file; None: the order is the same.
    offset: what is subtracted from every value of the file.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[gguf.ReaderTensor, ...]
    rows: NDArray[np.int64] | None
    offset: float

    @property
    def kind(self) -> str:
        """The type of its values in the file, such as q4_k or f32."""
        return self.stored[0].tensor_type.name.lower()

    def raw(self) -> NDArray[np.uint8]:
        """Return the bytes of each row [out, bytes], as stored, in the order of the torch tensor."""
        data = self._some(slice(None)).view(np.uint8)
        return data.reshape(-1, data.shape[-1])

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the values in the order of the torch tensor, in flat float32 arrays of at most about CHUNK values."""
        step = max(1, CHUNK // int(np.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            some = self._some(slice(start, start + step))
            values = gguf.dequantize(some, self.stored[0].tensor_type).reshape(-1)
            yield values - np.float32(self.offset) if self.offset else values

    def _some(self, part: slice) -> NDArray[Any]:
        """Return some rows, elements or experts, as stored, in the order of the torch tensor; part: which of them."""
        data = [tensor.data[part] if self.rows is None else tensor.data[self.rows[part]] for tensor in self.stored]
        return data[0] if len(data) == 1 else np.concatenate(data, axis=1)


def gguf_weights(reader: Reader) -> list[Weight]:
    """Return all weights of the file in `reader`, without its tables of rotary frequencies.

    Raises ForetokenError for a tensor that the file's architecture does not have, or whose type the library `gguf`
    cannot read.
    """
    architecture = architecture_of(reader)
    heads = reader.of_model("attention.head_count", 1)
    of_rotary = {"attn_q": heads, "attn_k": reader.of_model("attention.head_count_kv", heads)}
    weights: list[Weight] = []
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reversed(reader.tensors)}.items():
        try:
            gguf.dequantize(tensor.data[:1], kind)
        except NotImplementedError as error:
            raise ForetokenError(
                f"The GGUF file has a tensor {tensor.name} of type {kind.name}, which is not supported: take another "
                "file of this model."
            ) from error
    ups = {tensor.name: tensor for tensor in reader.tensors if UPS in tensor.name}
    for tensor in reader.tensors:
        if tensor.name in OF_ROTARY or tensor.name in ups:
            continue
        part = re.sub(r"^blk\.\d+\.|\.\w+$", "", tensor.name)
        whole, all_stored = tuple(int(n) for n in reversed(tensor.shape)), (tensor,)
        if part == FILTERS:
            whole = (whole[0], 1, *whole[1:])
        if part == GATES and (up := ups.get(tensor.name.replace(GATES, UPS))) is not None:
            if up.tensor_type != tensor.tensor_type:
                raise ForetokenError(
                    f"In the GGUF file {up.name} is of another type ({up.tensor_type.name}) than {tensor.name} "
                    f"({tensor.tensor_type.name}), which is not supported: take another file of this model."
                )
            whole, all_stored = (whole[0], 2 * whole[1], whole[2]), (tensor, up)
        parts: dict[str, NDArray[np.int64] | None] = {part: None}
        if part == FUSED and part not in architecture.layer:
            queries, keys = of_rotary.values()
            ends = [whole[0] * count // (queries + 2 * keys) for count in (queries, queries + keys)]
            parts = dict(zip(("attn_q", "attn_k", "attn_v"), np.split(np.arange(whole[0]), ends), strict=True))
        for own, rows in parts.items():
            shape = whole if rows is None else (len(rows), *whole[1:])
            if architecture.interleaved and own in of_rotary:
                order = _halves(shape[0], of_rotary[own])
                rows = order if rows is None else rows[order]
            offset = architecture.norm_offset if own.endswith("norm") else 0.0
            name = _name(tensor.name.replace(part, own), architecture)
            weights.append(Weight(name, shape, all_stored, rows, offset))
    return weights


def _name(stored: str, architecture: Architecture) -> str:
    """Return transformers' name of a tensor of the file."""
    match stored.split("."):
        case [outer, kind] if outer in _OUTER:
            return f"{_OUTER[outer]}.{kind}"
        case ["blk", layer, *parts, kind] if (part := ".".join(parts)) in architecture.layer:
            own = architecture.layer[part]
            return f"model.layers.{layer}.{own}" + ("" if ".experts." in own else f".{kind}")
        case _:
            raise ForetokenError(
                f"The GGUF file has a tensor {stored}, which {architecture.class_name} does not: it is not supported."
            )


def _halves(rows: int, heads: int) -> NDArray[np.int64]:
    """Return the place in the file of each row of a query or key matrix [rows].

    In the file, the rows of the two halves of a head alternate.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
