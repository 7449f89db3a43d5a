"""Training texts: what is read of files, how it is cut into rows, and which lines are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from foretoken.cli.options import demo_folder
from foretoken.core.errors import ForetokenError
from foretoken.models.load import load_tokenizer
from foretoken.models.text import encode
from foretoken.train.data import Batches, Record, Row, records, rows
from serving import toy_tokenizer


def written(folder: Path, *lines: object, mark: str = "") -> list[Record]:
    """The records of a file of these JSON lines; a line that is a string stands there as it is."""
    path = folder / "d.jsonl"
    path.write_text(mark + "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return list(records([str(path)]))


def test_data(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes " * 9}]},
        {"text": "some text of its own, long enough"},
        {"prompt": "given", "text": "learnt and learnt and learnt"},
    ]
    written(tmp_path, *lines)
    (tmp_path / "plain.txt").write_text("x" * 100)
    found = list(records([str(tmp_path / "d.jsonl"), str(tmp_path / "plain.txt")]))
    assert found[0] == Record([{"role": "user", "content": "hi"}], "yes " * 9)
    cut = rows(found, tiny.tokenizer(), 64)
    assert [len(row.ids) for row in cut] == [57, 34, 34, 64, 37]
    assert [row.skipped for row in cut] == [20, 0, 5, 0, 0]
    batches = Batches(cut, 2, seed=1)
    ids, mask = batches[0]
    assert ids.shape == mask.shape
    assert torch.equal(ids, batches[0][0])
    seen = [tuple(row) for step in range(2) for row in batches[step][0].tolist()]
    assert len(set(seen)) == 4  # no row twice in an epoch
    ids, mask = Batches([Row(np.arange(n, dtype=np.int64), 0) for n in (16, 40)], 2, 0)[0]
    assert ids.shape == (2, 40)
    assert sorted(mask.sum(1).tolist()) == [16, 40]  # no text is all padding
    with pytest.raises(ForetokenError, match="Cannot read"):
        list(records([str(tmp_path / "none.txt")]))


def turns(*contents: object) -> dict[str, Any]:
    return {"conversations": [{"role": "assistant", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (turns(None), "line 2 must hold strings, but its text is null: write it as one"),
        (turns(["a"], "b"), "The content of message 1 of the conversation in .*line 2 is no text"),
        (turns("a", {"text": "b"}), r'line 2 must hold strings, but its text is {"text": "b"}'),
        (
            {"conversations": [{"role": 7, "content": "a"}, {"role": "assistant", "content": "b"}]},
            "The role of message 1 of the conversation in .*line 2 is no text",
        ),
        ({"prompt": None, "text": "a"}, "line 2 must hold strings, but its prompt is null"),
        ({"messages": [{"role": "user"}], "text": "a"}, "Message 1 of the conversation in .*line 2 has no content"),
        ({"text": "a\ud83d"}, r"The text in .*line 2 is not valid Unicode: character 2 .*U\+D83D"),
        (turns("\ude00"), r"The text in .*line 2 is not valid Unicode: character 1 .*U\+DE00"),
        ({"text": "a", "token_ids": [1, -1]}, "line 2 has token_ids that are no list of whole numbers"),
        ({"x": 1}, "line 2 is no training text"),
        ("[", "line 2 is no training text"),
        ({"text": 3}, "line 2 must hold strings"),
        ('"ids"', "line 2 is no training text"),
        ({"ids": "abc"}, "line 2 has ids that are no list of whole numbers"),
        ({"ids": [10**30]}, "line 2 has ids that are no list of whole numbers"),
        ({"ids": [1], "given": 2}, "line 2 has given 2: it must be a whole number up to 1, the number of ids"),
    ],
)
def test_a_line_that_is_no_text_is_named(bad: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match=message):
        written(tmp_path, {"text": "good \U0001f600"}, bad)


def test_json_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    path, texts = tmp_path / "d.jsonl", [f"a{end}b" for end in ("\u2028", "\u2029", "\x85")]
    path.write_text("\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts), encoding="utf-8")
    assert [record.text for record in records([str(path)])] == texts


@pytest.mark.parametrize(("name", "content"), [("none.jsonl", ""), ("none.jsonl", " \n\n"), ("none.txt", "\n")])
def test_empty_files_are_named(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ForetokenError, match=f"There is no text at all in {path}"):
        list(records([str(path)]))


def test_files_of_short_texts_alone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 14)  # 15 tokens, with the end
    with pytest.raises(ForetokenError, match=r"^There is no text of 16 tokens .* 1 from .*short\.txt: give longer"):
        rows(list(records([str(path)])), tiny.tokenizer(), 64)
    path.write_text("x" * 15)
    assert len(rows(list(records([str(path)])), tiny.tokenizer(), 64)) == 1


def test_records_may_be_token_ids(tmp_path: Path) -> None:
    for mark in ("", "\ufeff"):
        (row,) = rows(written(tmp_path, {"ids": [*range(20)], "given": 4}, mark=mark), tiny.tokenizer(), 64)
        assert row.ids.tolist() == [*range(20)]
        assert row.skipped == 4


def test_what_a_model_has_sampled_is_learnt_as_it_was_sampled(tmp_path: Path) -> None:
    """The tokenizer would merge its pieces and end it, although the model stopped at a length."""
    tokenizer = tiny.tokenizer(("ab",))
    ids = [tokenizer.convert_tokens_to_ids("ab")] * 20  # the tokenizer itself would write single letters
    said = {"text": "ab" * 19 + "a", "token_ids": ids, "finish_reason": "length"}
    asked = [{"role": "user", "content": "hi"}]
    both = written(tmp_path, {"prompt": "given", **said}, {"messages": asked, **said})
    before = [encode(tokenizer, "given"), encode(tokenizer, "user: hi\nassistant: ")]
    for row, given in zip(rows(both, tokenizer, 64), before, strict=True):
        assert row.ids.tolist() == [*given, *ids]
        assert row.skipped == len(given)
    with pytest.raises(ForetokenError, match="line 1 has token_ids that are not those of its text for this target"):
        rows(written(tmp_path, {"prompt": "given", "text": "other", "token_ids": ids}), tokenizer, 64)


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(ForetokenError, match=r"d\.jsonl, line 2 .*no system"):
        rows(written(tmp_path, "", turns("a", "b" * 20)), tokenizer, 64)


def test_conversations_have_the_form_of_the_chat_template() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (row,) = rows([Record([{"role": "user", "content": "hi"}], "yes " * 9)], tokenizer, 99)
    given = encode(tokenizer, "<user>hi<assistant>")
    assert row.ids.tolist() == [*given, *encode(tokenizer, "yes " * 9), tokenizer.eos_token_id]
    assert row.skipped == len(given)


def test_an_answer_ends_as_the_chat_template_ends_a_turn() -> None:
    tokenizer = toy_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end != tokenizer.eos_token_id
    texts = [Record([{"role": "user", "content": "hi"}], "yes " * 9), Record("hi", "yes " * 9)]
    assert [row.ids[-1] for row in rows(texts, tokenizer, 99)] == [end, tokenizer.eos_token_id]


def test_a_token_of_both_prompt_and_text_is_learnt() -> None:
    """Else the first word of every answer would be, where a prompt ends in a space."""
    tokenizer = load_tokenizer(str(demo_folder() / "target"))
    (row,) = rows(
        [Record("Who is there? ", "the answer is that nobody has been there since the beginning")], tokenizer, 99
    )
    assert tokenizer.decode(row.ids[: row.skipped]) == "Who is there?"
    assert tokenizer.decode(row.ids[row.skipped :]).startswith(" the answer")


def test_a_text_without_a_prompt_may_lack_the_space_that_its_tokens_begin_with(tmp_path: Path) -> None:
    """As tokenizers of the SentencePiece kind decode it: alone without the space, behind a prompt with it."""
    tokenizer = tiny.tokenizer()
    ids = encode(tokenizer, "word " * 5)
    (row,) = rows(written(tmp_path, {"text": " " + "word " * 5, "token_ids": ids}), tokenizer, 64)
    assert row.ids.tolist() == ids
