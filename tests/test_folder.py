"""A model's folder that is broken is refused without torch, by a sentence that names the file."""

import json
from pathlib import Path

import pytest

import command
import foretoken
import tiny
from foretoken.cli import options
from foretoken.core.errors import ForetokenError
from foretoken.models.folder import check_config, check_template, check_weights
from foretoken.recipe import check_engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny.save(tiny.llama(0), tmp_path / "model"))


def test_a_whole_one_passes(folder: Path) -> None:
    check_config(folder)
    check_weights(folder)
    check_engine(str(folder), str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("\x00", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="nested"),
    ],
)
def test_a_broken_configuration(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ForetokenError, match=rf"config\.json {words}.*mend it"):
        foretoken.load(str(folder))


@pytest.mark.parametrize(
    ("keep", "words"), [(0, "header too small"), (9, "invalid header length"), (-1, "file not fully covered")]
)
def test_weights_that_were_cut_off(folder: Path, keep: int, words: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ForetokenError, match=rf"model\.safetensors is not a whole .*{words}.*get the file again"):
        foretoken.load(str(folder))
    with pytest.raises(
        ForetokenError, match=rf"model\.safetensors is not a whole .*{words}"
    ):  # without torch, as a drafter too
        check_engine(str(Path(__file__).parents[1] / "models" / "target"), str(folder))


def test_what_is_no_weights_of_the_model_is_let_pass(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    check_weights(folder)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(ForetokenError, match=r"Cannot read .*model\.safetensors: No such file"):
        check_weights(folder)


@pytest.mark.parametrize("header", [b"[1]", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff", b"version 1"])
def test_weights_that_are_something_else(folder: Path, header: bytes) -> None:
    length = b"" if header.startswith(b"version") else len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(length + header)
    with pytest.raises(ForetokenError, match="is not a whole safetensors file"):
        check_weights(folder)


USER = [{"role": "user", "content": "hi"}]
ONE = {"The conversation": USER}
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('No system here!') }}{% endif %}{{ bos_token }}"


def test_a_conversation_needs_a_template(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text())
    found.pop("chat_template", None)
    settings.write_text(json.dumps(found))
    for path in folder.glob("chat_template*"):
        path.unlink()
    with pytest.raises(ForetokenError, match=r"The conversation needs a chat template.*model has none"):
        check_template(folder, ONE)
    settings.write_text(json.dumps(found | {"chat_template": "{{ messages }}"}))
    check_template(folder, ONE)
    settings.write_text(json.dumps(found))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    check_template(folder, ONE)
    check_template(folder / "elsewhere", ONE)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_what_a_template_refuses_is_told_before_the_model_is_loaded(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = place != "chat_template.jinja"
    (folder / place).write_text(json.dumps({"chat_template": REFUSES}) if inside else REFUSES)
    if not inside:
        (folder / "tokenizer_config.json").write_text("{}")
    check_template(folder, ONE)
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(ForetokenError, match=r"Conversation 2 is refused by .* chat template: No system here\."):
        check_template(folder, {**ONE, "Conversation 2": [{**system, "role": "developer"}, *USER]})
    monkeypatch.setattr(options, "load_engine", lambda **_: pytest.fail("the model was loaded"))
    for line in (["generate", "hi", "--system", "Be brief."], ["chat", "--system", "Be brief."]):
        code, _, err = command.run(monkeypatch, capsys, *line, "--target", folder)
        assert (code, err) == (
            2, "foretoken: The conversation is refused by the model's chat template: No system here.\n"
        )  # fmt: skip


def test_what_a_template_refuses_in_a_batch_file_is_told_with_its_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": REFUSES}))
    monkeypatch.setattr(options, "load_engine", lambda **_: pytest.fail("the model was loaded"))
    batch = tmp_path / "batch.jsonl"
    batch.write_text('"a text"\n\n{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}')

    def refused() -> str:
        code, _, err = command.run(monkeypatch, capsys, "generate", "--batch-file", batch, "--target", folder)
        assert code == 2
        return err

    assert f"The conversation of line 3 of {batch} is refused by the model's chat template: No system h" in refused()
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert f"The conversation of line 3 of {batch} needs a chat template" in refused()


@pytest.mark.parametrize("template", ["{{ messages.missing.too }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_template_that_fails_otherwise_is_left_to_the_tokenizer(folder: Path, template: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    check_template(folder, ONE)


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_never_left_out_in_silence(alone: bool, folder: Path) -> None:
    """transformers would read the model without it where peft is not installed; its tokenizer can still be named."""
    (folder / "adapter_config.json").write_text("{}")
    if alone:
        (folder / "config.json").unlink()
    for check in (check_engine, foretoken.load):
        with pytest.raises(ForetokenError, match=r"has an adapter \(adapter_config.json\): merge it"):
            check(str(folder), drafter=None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("target", [3, None, ["a"], "", 0])
def test_what_is_no_model_is_said_so(target: object) -> None:
    with pytest.raises(ForetokenError, match="The target is"):
        foretoken.load(target)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ForetokenError, match="The drafter is 3"):
        foretoken.load("model", drafter=3)  # pyright: ignore[reportArgumentType]
