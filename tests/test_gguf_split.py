"""GGUF files in parts, as `llama-gguf-split` and converters write them, are read as the one file that they make."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import foretoken
import gguf_zoo
from foretoken.catalogue.kept import ORIGIN
from foretoken.core.errors import ForetokenError
from foretoken.gguf.folder import contents
from foretoken.models.identity import fingerprint
from foretoken.models.load import load_model
from foretoken.models.named import located
from foretoken.models.packed import kept_file
from gguf_zoo import save_wide
from thinning import one_in

CPU = torch.device("cpu")
Q8 = gguf.GGMLQuantizationType.Q8_0
IDS = torch.arange(9)[None]
TENSORS = {"split_max_tensors": 8}  # of 21 in all, so that there are three parts
CUTS: dict[str, dict[str, Any]] = {
    "by tensors": TENSORS,
    "by size": {"split_max_size": 600_000},
    "no tensors in the first": TENSORS | {"small_first_shard": True},
}


pytestmark = pytest.mark.usefixtures("home")


def parts_in(folder: Path, name: str = "model", **how: Any) -> list[Path]:
    """A model in parts; how: as for `save_wide`."""
    folder.mkdir(exist_ok=True)
    save_wide(folder / f"{name}.gguf", **{"split": TENSORS} | how)
    return sorted(folder.glob(f"{name}-*.gguf"))


@pytest.mark.parametrize("cut", one_in(3, CUTS))
def test_parts_are_the_whole_file(tmp_path: Path, cut: str) -> None:
    """Whichever part is named, or their folder: weights, tokens, scores and texts are those of the one file."""
    whole = save_wide(tmp_path / "whole.gguf")
    parts = parts_in(tmp_path / "parts", split=CUTS[cut])
    assert len(parts) > 2
    kept = [kept_file(path) for path in (Path(whole), parts[0])]
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in kept if folder is not None]
    origins = [json.loads(each.pop(ORIGIN)) for each in files]
    assert files[0] == files[1]
    assert origins[0]["made"] == origins[1]["made"]
    assert len(origins[1]["files"]) == len(parts)
    wanted = load_model(whole, CPU)
    for source in (*parts, parts[0].parent):
        assert located(str(source)) == str(parts[0])
        lm = load_model(str(source), CPU)
        assert (lm.name, lm.execution) == (str(parts[0]), "kernel")
        assert fingerprint(lm) == fingerprint(wanted)
        assert torch.equal(lm.model(IDS).logits, wanted.model(IDS).logits)
    texts = [foretoken.load(str(path)).generate("the cat", max_new_tokens=8, seed=0).text for path in (whole, parts[1])]
    assert texts[0] == texts[1]
    plain = [load_model(str(path), CPU, torch.float32, compile="off").model(IDS).logits for path in (whole, parts[2])]
    assert torch.equal(*plain)


def test_what_is_kept_is_made_anew_where_any_part_changed(tmp_path: Path) -> None:
    parts = parts_in(tmp_path)
    before = load_model(str(parts[0]), CPU).model(IDS).logits
    raw = bytearray(parts[2].read_bytes())
    raw[-1024:] = raw[-512:] + raw[-1024:-512]  # the weights of the last norm
    parts[2].write_bytes(raw)
    assert not torch.equal(load_model(str(parts[0]), CPU).model(IDS).logits, before)


def test_one_part_is_a_whole_file(tmp_path: Path) -> None:
    """Also where the file does not say that it is a part, as such names alone do not."""
    for keys in ({"split.no": 0, "split.count": 1, "split.tensors.count": 19}, {}):
        path = tmp_path / f"model{len(keys)}-00001-of-00001.gguf"
        gguf_zoo.save(gguf_zoo.model("llama"), "llama", path, **keys)
        assert located(str(path)) == str(path)
        assert contents(path).weights


def test_parts_that_are_links(tmp_path: Path) -> None:
    """As in the hub's cache: what they point to has other names."""
    blobs, links = parts_in(tmp_path / "blobs"), tmp_path / "links"
    links.mkdir()
    for number, part in enumerate(blobs):
        part.rename(part.with_name(f"{number}"))
        (links / part.name).symlink_to(part.with_name(f"{number}"))
    assert load_model(str(links), CPU).execution == "kernel"


def without(number: int) -> Callable[[list[Path]], object]:
    return lambda parts: parts[number].unlink()


def one_of_many(parts: list[Path]) -> None:
    parts[1].rename(parts[1].with_name("model-00002-of-09000.gguf"))
    parts[0].unlink()
    parts[2].unlink()


def replaced(before: bytes, after: bytes, *numbers: int) -> Callable[[list[Path]], None]:
    """A function that changes bytes in parts."""

    def change(parts: list[Path]) -> None:
        for number in numbers:
            raw = parts[number].read_bytes()
            assert raw.count(before) == 1
            parts[number].write_bytes(raw.replace(before, after))

    return change


def taken_from(architecture: str, **cut: int) -> Callable[[list[Path]], None]:
    """A function that takes the second part from another set; cut: how the library cuts it."""

    def change(parts: list[Path]) -> None:
        others = parts_in(parts[0].parent / "others", architecture=architecture, split=cut)
        shutil.copy(others[1], parts[1])
        shutil.rmtree(others[0].parent)

    return change


def total(number: int) -> bytes:
    """A part's key for the number of all tensors with its value, an int32."""
    return b"split.tensors.count\5\0\0\0" + bytes([number, 0, 0, 0])


SAYS = r"its split\.no, split\.count, split\.tensors\.count are"
REFUSED: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "the second is missing": (without(1), r"Folder .* lacks model-00002-of-00003\.gguf: all 3 parts"),
    "nearly all are missing": (
        one_of_many,
        r"lacks model-00001-of-09000\.gguf, model-00003\S*, model-00004\S* and 8996 more: all 9000 parts",
    ),
    "the first is missing": (without(0), r"Folder .* lacks model-00001-of-00003\.gguf: all 3 parts"),
    "one is cut off": (
        lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-5000]),
        r"Cannot read .*model-00002-of-00003\.gguf as a GGUF file: it is damaged, cut off or newer than what is known "
        r"\(it has \d+ bytes, and what its header names goes on to byte \d+\)",
    ),
    "one is a page": (
        lambda parts: parts[2].write_bytes(b"<html>"),
        r"model-00003-of-00003\.gguf is no GGUF file",
    ),
    "one is another": (
        lambda parts: shutil.copy(parts[0], parts[1]),
        rf"model-00002-of-00003\.gguf does not belong to .*: {SAYS} \(0, 3, 21\) and should be \(1, 3, 21\)",
    ),
    "one is of more parts": (
        taken_from("llama", split_max_tensors=6),
        rf"model-00002-of-00003\.gguf does not belong to .*: {SAYS} \(1, 4, 21\) and should be \(1, 3, 21\)",
    ),
    "one is of a larger model": (
        taken_from("qwen3", split_max_tensors=10),
        rf"model-00002-of-00003\.gguf does not belong to .*: {SAYS} \(1, 3, 24\) and should be \(1, 3, 21\)",
    ),
    "one is a whole file": (
        lambda parts: save_wide(parts[2]),
        rf"model-00003-of-00003\.gguf does not belong to .*: {SAYS} \(0, 0, 0\) and should be \(2, 3, 21\)",
    ),
    "all tell another total": (
        replaced(total(21), total(22), 0, 1, 2),
        r"model-00001-of-00003\.gguf and its other parts have 21 tensors and not 22",
    ),
    "a tensor is in two": (
        replaced(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", 1),
        r"Tensor blk\.0\.attn_q\.weight is in .*model-00001-of-00003\.gguf and in .*model-00002-of-00003\.gguf",
    ),
    "two sets": (
        lambda parts: parts_in(parts[0].parent, "other"),
        r"has 6 GGUF files: name one of \S*/model-00001-of-00003\.gguf, \S*/other-00001-of-00003\.gguf\.$",
    ),
    "a set and a file": (
        lambda parts: save_wide(parts[0].with_name("other.gguf")),
        r"has 4 GGUF files: name one of \S*/model-00001-of-00003\.gguf, \S*/other\.gguf\.$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_one_set_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    spoil, message = REFUSED[case]
    spoil(parts_in(tmp_path))
    with pytest.raises(ForetokenError, match=message):
        load_model(str(tmp_path), CPU)
