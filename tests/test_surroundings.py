"""What a caller's program has set, or does meanwhile, neither disturbs a load nor is disturbed by it."""

import os
import random
import subprocess
import sys
import threading
from itertools import chain

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig

import foretoken
from foretoken.cli.options import demo_folder
from foretoken.kernel import compile
from foretoken.models import panels
from foretoken.models.skeleton import without_weights
from thinning import one_in

TARGET = str(demo_folder() / "target")


def config():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    return LlamaConfig(**shape, num_attention_heads=2), GenerationConfig()


def test_models_without_weights_are_made_beside_other_threads():
    """Two at once, while the caller makes modules of its own."""
    made, stop, own = list[nn.Module](), threading.Event(), list[nn.Linear]()

    def make() -> None:
        made.extend(without_weights(*config(), torch.float32) for _ in range(10))

    def other() -> None:
        while not stop.is_set():
            own.append(nn.Linear(2, 2))

    threads = [threading.Thread(target=make) for _ in range(2)]
    beside = threading.Thread(target=other)
    for thread in (*threads, beside):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    beside.join()
    assert {parameter.device.type for model in made for parameter in model.parameters()} == {"meta"}
    assert len(made) == 20
    assert {linear.weight.device.type for linear in [*own, nn.Linear(2, 2)]} == {"cpu"}


def test_folders_are_loaded_in_threads():
    """transformers alone would leave models without their tied LM head, and do so in this process from then on."""
    loaded = list[foretoken.Engine]()
    for _ in range(3):
        threads = [threading.Thread(target=lambda: loaded.append(foretoken.load(TARGET))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(loaded) == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16, None])
def test_a_default_dtype_and_autocast_disturb_no_products(dtype: torch.dtype | None):
    """None: autocast to bfloat16."""
    torch.set_default_dtype(dtype or torch.float32)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            panels.check_quantised.__wrapped__("q4_0")
            assert panels._works.__wrapped__()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options",
    one_in(
        3,
        [
            {"drafter": "self"},
            {"drafter": str(demo_folder() / "drafter"), "tree": "kary:2x2", "compile": "off"},
            {"drafter": "ngram", "compile": "off"},
        ],
    ),
)
def test_a_default_device_disturbs_neither_a_load_nor_texts(options: dict[str, str]):
    """As torch.set_default_device("cuda") of a program whose model runs on the CPU; meta needs no such device."""
    prompt = [1, 2, 3]

    def texts(engine: foretoken.Engine) -> list[list[int]]:
        drawn = [engine.generate(prompt, max_new_tokens=12, seed=1, temperature=t).token_ids for t in (0.0, 0.8)]
        streamed = engine.stream(prompt, max_new_tokens=12, seed=1)
        return [*drawn, list(chain.from_iterable(x.token_ids for x in streamed))]

    expected = texts(foretoken.load(TARGET, device="cpu", **options))
    model = foretoken.load(TARGET, device="cpu", compile="off").target.lm.model
    ids, config = torch.tensor([prompt]), GenerationConfig(max_length=9, do_sample=True, eos_token_id=0)

    def sampled() -> list[list[int]]:
        torch.manual_seed(1)
        return foretoken.custom_generate(model, ids, generation_config=config, draft_model="ngram").tolist()

    drawn = sampled()
    assert len(drawn[0]) == config.max_length  # with this seed no end of text is drawn
    with torch.device("meta"):
        assert texts(foretoken.load(TARGET, device="cpu", **options)) == expected
        assert sampled() == drawn


@pytest.mark.usefixtures("unchecked")  # the checks of types draw from `random`
def test_random_numbers_of_the_caller_stay_as_they_were():
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate()
    panels._works.__wrapped__()
    foretoken.load(TARGET).generate("a", max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_products_in_one_thread_leave_other_threads_alone():
    found = list[int]()
    torch.set_num_threads(2)  # before the next test it is 1 again
    with panels.one_thread():
        assert panels.use_threads() is None
        assert torch.get_num_threads() == 2
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [2]


def test_the_compiling_process_ends_with_its_parent(tmp_path):
    """Also where that is killed: then its input ends."""
    paths = os.pathsep.join(map(str, sys.path))
    environment = os.environ | {compile.AT_ONCE: "1", "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    command = [sys.executable, "-c", compile.COMPILING.format(", ".join(compile.LINKED))]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 1, "it would compile for ten seconds and more, and end with 0"
