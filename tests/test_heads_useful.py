"""A head that drafts nothing useful is named as such, once; one that was trained for the target is not."""

import pytest
import torch

import foretoken
import tiny
from command import Command
from foretoken.cli.options import demo_folder
from foretoken.core.tree import opaque_tree, root_only
from foretoken.heads.checkpoint import save_head
from foretoken.heads.head import new_head
from foretoken.heads.lm import ENOUGH, Usefulness, UselessHeadWarning
from foretoken.models.causal_lm import CausalLM
from foretoken.models.parts import parts
from thinning import one_in

NOISE = "drafts nothing useful: wrong target or layout"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and an untrained head of it."""
    root = tmp_path_factory.mktemp("useless")
    model = tiny.llama(0, hidden=64, layers=6)
    torch.manual_seed(0)
    save_head(new_head("eagle3", parts(CausalLM(model))), root / "head")
    return tiny.save(model, root / "target"), str(root / "head")


@pytest.mark.parametrize("tree", one_in(2, ["chain:2", "dynamic:6"]))
def test_an_untrained_head_is_named_once(folders: tuple[str, str], tree: str) -> None:
    target, head = folders
    engine = foretoken.load(target, drafter=head, tree=tree, device="cpu")
    with pytest.warns(UselessHeadWarning) as told:
        engine.generate(["ab", "cd"], max_new_tokens=2 * ENOUGH, temperature=0.0, seed=0)
    engine.generate("ef", max_new_tokens=2 * ENOUGH, temperature=0.0, seed=0)  # a warning would be an error here
    assert len(told) == 1
    message = str(told[0].message)
    assert f"Draft head {head} {NOISE}" in message
    assert f"trained for {target}" in message


@pytest.mark.filterwarnings("default")
def test_the_command_line_says_so(run: Command, folders: tuple[str, str]) -> None:
    models = ("--target", folders[0], "--drafter", folders[1])
    code, _, err = run("generate", "ab", *models, "--max-new-tokens", 128, "--temperature", 0, "--method", "fixed")
    assert (code, err.count(NOISE)) == (0, 1)


def test_a_trained_head_is_not(recwarn: pytest.WarningsRecorder) -> None:
    models = demo_folder()
    engine = foretoken.load(models / "target", drafter=models / "heads" / "eagle", tree="chain:2", device="cpu")
    results = engine.generate(["def main():", "import os\n"], max_new_tokens=100, temperature=0.0, seed=0)
    lm = engine.source.lm
    assert lm.usefulness.drafts >= ENOUGH
    assert lm.usefulness.accepted > lm.usefulness.drafts / 2
    assert len(results) == 2
    assert not recwarn.list


def test_plain_steps_and_few_drafts_say_nothing() -> None:
    """Only trees with a draft count, and fewer than ENOUGH of them tell nothing; a warning would be an error here."""
    usefulness, drafted = Usefulness(), opaque_tree((1, 2), (-1, 0))
    for _ in range(2 * ENOUGH):
        usefulness.count([root_only(1)], [(0,)], "head", "target")
    for _ in range(ENOUGH - 1):
        usefulness.count([drafted], [(0,)], "head", "target")
    assert (usefulness.drafts, usefulness.accepted, usefulness.warned) == (ENOUGH - 1, 0, False)


def test_one_accepted_draft_of_twenty_is_enough() -> None:
    usefulness, drafted = Usefulness(accepted=3, drafts=3), opaque_tree((1, 2), (-1, 0))
    for _ in range(57):
        usefulness.count([drafted], [(0,)], "head", "target")
    assert not usefulness.warned
    with pytest.warns(UselessHeadWarning, match="Of 61 drafts 3 had a token accepted"):
        usefulness.count([drafted], [(0,)], "head", "target")
