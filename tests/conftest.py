"""Under pytest every function of the package and of the benchmarks checks the types and the shapes it declares."""

from collections.abc import Callable, Iterator

import pytest
import torch
from jaxtyping import config, install_import_hook

install_import_hook(["foretoken", "benchmarks"], "beartype.beartype")
pytest_plugins = ["command"]  # after the hook: it imports both
torch.set_num_threads(1)  # the models of the tests are tiny: waking a second thread costs more than their work


@pytest.fixture
def unchecked() -> Iterator[None]:
    """For tests that make the same calls many thousand times, at a tenth of the time."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], list[bool]]:
    """answers(cls, name): a list that grows with every call of that method, by whether it gave something."""

    def watch(cls: type, name: str) -> list[bool]:
        given, method = [], getattr(cls, name)

        def watched(*arguments):
            answer = method(*arguments)
            given.append(answer is not None)
            return answer

        monkeypatch.setattr(cls, name, watched)
        return given

    return watch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Commands that earlier tests ran in this process may have set another number."""
    torch.set_num_threads(1)
