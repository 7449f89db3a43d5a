"""The checks of types that all tests run under see what is wrong."""

import pytest
from jaxtyping import TypeCheckError

from foretoken.core.tree import path_to
from foretoken.draft.acceptance import Acceptance


def test_wrong_types_are_seen_in_functions_and_in_fields():
    with pytest.raises(TypeCheckError):
        path_to("a", 1.5)
    with pytest.raises(TypeCheckError):
        Acceptance("a", 1.0)
